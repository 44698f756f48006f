"""What the scripts of all clients share: the service that they talk to, the classes that they ask for, the
functions that they let the model call, and how their checks run.

A script runs in the environment of its client, which has neither lightkv nor pytest.
"""

import argparse
import asyncio
import inspect
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

MAX_TOKENS = 1024  # more than any answer of these schemas needs


@dataclass(frozen=True)
class Service:
    """A running service. `url`: that of the API, with /v1."""

    url: str
    key: str
    model: str


class Closed(BaseModel):
    """A class whose schema allows no further properties: a model of random weights adds them without end."""

    model_config = ConfigDict(extra="forbid")


class Place(Closed):
    city: Literal["Paris", "Oslo", "São Paulo"]
    is_capital: bool


class Forecast(Closed):
    """The weather of a place. It has no free text, for the same reason."""

    place: Place
    sky: Literal["clear", "rain", "snow"]
    degrees: Literal[-10, 0, 25]
    wind: Literal["weak", "strong"] | None


class City(Closed):
    """The arguments of the function `weather`."""

    city: Literal["Paris", "Oslo", "São Paulo"]


FORECAST_SCHEMA = {
    "type": "object",
    "properties": {
        "sky": {"type": "string", "enum": ["clear", "rain", "snow"]},
        "degrees": {"type": "integer", "minimum": -9, "maximum": 9},
    },
    "required": ["sky", "degrees"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo", "São Paulo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Returns the time.",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
QUESTION = "What is the weather?"
RESULT = "It rains."  # what the function returned
ANSWERS = ["Yes.", "No."]  # a text that ends, of a model that would write on
CHOICE = {"structured_outputs": {"choice": ANSWERS}}

# Ten turns of calls, each required or of a named function.
SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches the notes of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {
                    "type": "object",
                    "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo", "São Paulo"]}},
                    "required": ["city"],
                },
                "days": {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 1, "maximum": 31},
                    "maxItems": 2,
                },
            },
            "required": ["place", "days"],
        },
    },
}
TURNS: list[Any] = ["required", {"type": "function", "function": {"name": "search"}}] * 5


class TenTurns:
    """Counts what each turn of a conversation found in the cache."""

    def __init__(self) -> None:
        self.num_known = 0
        self.question = f"What do the notes {secrets.token_hex(8)} say of São Paulo?"  # in no cache

    def check(self, usage: Any) -> None:
        """The prompt begins with the last prompt and its answer, whose last token was never computed."""
        assert usage.prompt_tokens > self.num_known
        if self.num_known:
            found = usage.prompt_tokens_details.cached_tokens
            assert found == self.num_known - 1, f"{found} cached of {self.num_known - 1}"
        self.num_known = usage.prompt_tokens + usage.completion_tokens


# An example that a small model follows, where its answer may be any JSON object.
EXAMPLES = [
    {"role": "user", "content": "Paris, in the rain, as JSON."},
    {"role": "assistant", "content": '{"city": "Paris", "sky": "rain"}'},
    {"role": "user", "content": "Rome, in the snow, as JSON."},
    {"role": "assistant", "content": '{"city": "Rome", "sky": "snow"}'},
]
LAST = "Oslo, in the rain, as JSON."


class Report(BaseModel):
    """What the examples show."""

    city: str
    sky: str


Check = Callable[[Service], Awaitable[None] | None]


def main(checks: dict[str, list[Check]]) -> None:
    """Runs the checks of the model that the command line names, and prints a line for each. Exits with 1 if one
    of them failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--model", required=True, choices=list(checks))
    given = parser.parse_args()
    service = Service(given.url, given.key, given.model)
    num_failed = 0
    for check in checks[given.model]:
        start = time.monotonic()
        try:
            if inspect.iscoroutinefunction(check):
                asyncio.run(check(service))
            else:
                check(service)
            outcome = "passed"
        except Exception:
            traceback.print_exc()
            num_failed += 1
            outcome = "FAILED"
        print(f"{outcome} {check.__name__} ({time.monotonic() - start:.1f} s)", flush=True)
    raise SystemExit(1 if num_failed else 0)
