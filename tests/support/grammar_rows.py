"""Engines of tests whose rows have grammars over single tokens."""

import json
import random
from array import array

from lightkv.router import SamplingParams
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.step import TokenEvent
from lightkv.router.sampling_params import Grammar
from tests.support.byte_model import MERGES
from tests.support.model_worker import assert_idle

END = 256 + len(MERGES)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},
}


OF_REQUESTS = [  # by their ids, from 1 on
    Grammar("regex", "[a-f ]{60}[0-9]"),
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", "(ab|cd|e){12,20}"),
]


def requests() -> list[Request]:
    rng = random.Random(0)
    grammars = [1, 2, None, 3]
    found = []
    for i in range(12):
        ids = array("i", [rng.randrange(250) for _ in range(rng.randint(5, 60))]).tobytes()
        temperature = (0.0, 1.0)[i % 2]
        penalty = 1.2 if i % 5 == 0 else 1.0
        params = SamplingParams(
            temperature=temperature,
            max_tokens=60,
            repetition_penalty=penalty,
            logprobs=1 if i % 7 == 0 else None,
        )
        stop_ids = frozenset({END})
        found.append(Request(str(i), ids, params, seed=i, stop_ids=stop_ids, grammar=grammars[i % 4]))
    return found


def compile_grammars(engine: LocalEngine, grammars: list[Grammar]) -> None:
    """Compiles the grammars for the engine's runner, with ids from 1 on."""
    compiled = engine.executor.grammars  # type: ignore[attr-defined]
    for grammar_id, grammar in enumerate(grammars, start=1):
        compiled.release(grammar_id)
        compiled.compile(grammar_id, grammar)


def run(engine: LocalEngine) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {}
    compile_grammars(engine, OF_REQUESTS)
    for one in requests():
        engine.add(one)
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    assert_idle(engine)
    return events


def tokens(events: dict[str, list[TokenEvent]]) -> dict[str, list[int | None]]:
    return {name: [event.token for event in found] for name, found in events.items()}
