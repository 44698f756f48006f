"""Ten turns of calls and their results, with the chat template of each family: every prompt begins with the
tokens of the prompt and the answer before it, whether the calls are required, named or the model's own choice.

The answers are random texts of the calls' grammar. A model that chooses itself writes such texts, too.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightkv.router.api.answers.chat_writer import deltas_of, finish_reason, message_of
from lightkv.router.api.requests.chat import ChatRequest
from lightkv.router.api.requests.dialect import ChatDialect
from lightkv.router.api.requests.tools import ToolUse
from lightkv.router.sampling_params import Grammar
from lightkv.router.service.api_settings import ApiSettings
from lightkv.router.text.detokenizer import StopChecker
from lightkv.router.text.grammars import Grammars
from lightkv.router.text.tokenizer import Tokenizer
from tests.support.byte_model import VOCABULARY, save_model_of_family
from tests.support.chat_templates import TEMPLATES

SETTINGS = ApiSettings(served_model_name=("m",))
NUM_TURNS = 10
WHERE = {
    "type": "object",
    "properties": {
        "ids": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 999}, "maxItems": 2},
        "ñ": {"type": "string", "maxLength": 3},
    },
    "required": ["ids"],
}
SEARCH = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 6}, "where": WHERE},
    "required": ["text", "where"],
}
# Qwen3-Coder's texts have no end that a schema sets; a random model would never write it.
CHOICE = {"enum": ['a "b"', "ça {}", "<x>"], "type": "string"}
SEARCH_OF_CHOICES = SEARCH | {"properties": {"text": CHOICE, "where": WHERE}}
AUTO, REQUIRED, NAMED = "auto", "required", {"type": "function", "function": {"name": "search"}}
RESULT = "ça <va> \n"

# The templates that write calls as they were generated.
SAME = [
    "qwen2.5",
    "qwen3",
    "qwen3_coder",
    "llama3",
    "mistral_named",
    "deepseek_v3",
    "deepseek_v3.1",
    "gpt_oss",
]
# Those that write a call otherwise, and where the difference begins.
OTHER = {"mistral_ids": "}]</s>", "arguments_first": 'name": '}


class Loop:
    """A conversation in which a model calls and gets the results. Its prompts are made and its answers are read
    as the service does it. `generate`: returns the tokens of an answer to a prompt that follows a grammar."""

    def __init__(
        self, directory: Path, generate: Callable[[np.ndarray, Grammar], list[int]], tools: Any
    ) -> None:
        self.tokenizer = Tokenizer(directory)
        self.dialect = ChatDialect(self.tokenizer, SETTINGS)
        self.generate = generate
        self.tools = tools
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "Où?"}]
        self.known: list[int] = []  # the last prompt and its answer
        self.num_calls: list[int] = []
        self.num_reasoned = 0

    def turn(self, choice: Any, is_parallel: bool) -> list[int]:
        """Lets the model call, and adds its message and the results. Returns the prompt."""
        asked = {"messages": self.messages, "tools": self.tools, "parallel_tool_calls": is_parallel}
        body = ChatRequest.model_validate(asked | {"tool_choice": choice})
        use = body.tool_use()
        assert use is not None
        prompt = self.prompt(body, use)
        required = ChatRequest.model_validate(asked | {"tool_choice": REQUIRED if choice == AUTO else choice})
        grammar = self.dialect.grammar(required.tool_use(), None)
        assert grammar is not None
        token_ids = self.generate(prompt, grammar)
        message = self.message(body, use, prompt, token_ids)
        calls = message["tool_calls"]
        self.known = [*prompt.tolist(), *token_ids]
        self.num_calls.append(len(calls))
        self.num_reasoned += "reasoning_content" in message
        names = [call["function"]["name"] for call in calls]
        assert choice != NAMED or names == ["search"]
        self.messages += [
            message,
            *(
                {"role": "tool", "tool_call_id": call["id"], "name": name, "content": RESULT}
                for call, name in zip(calls, names, strict=True)
            ),
        ]
        return prompt.tolist()

    def prompt(self, body: ChatRequest, use: ToolUse) -> np.ndarray:
        chat = self.dialect.prepared(body.chat(), use)
        text = self.tokenizer.render_chat(chat.messages, True, chat.variables, chat.tools)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def message(
        self, body: ChatRequest, use: ToolUse, prompt: np.ndarray, token_ids: list[int]
    ) -> dict[str, Any]:
        """Returns the message of an answer. The calls of its stream, put together, are the same."""
        reading = self.dialect.reading(use, prompt)
        assert reading is not None
        hidden = self.tokenizer.special_ids - reading.shown_ids
        text = self.tokenizer.decode([one for one in token_ids if one not in hidden], False)
        whole, streamed = reading.new_reader(StopChecker(())), []
        parts = [*whole.push(text), *whole.finish()]
        message = message_of(parts, reading)
        assert (message["content"], finish_reason("stop", parts)) == (None, "tool_calls")
        reader = reading.new_reader(StopChecker(()))
        for parts in [*(reader.push(char) for char in text), reader.finish()]:
            for delta in deltas_of(parts, len(streamed), reading):
                for call in delta.get("tool_calls", ()):
                    if "id" in call:
                        streamed.append((call["function"]["name"], ""))
                    name, before = streamed[call["index"]]
                    streamed[call["index"]] = (name, before + call["function"]["arguments"])
        called = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
        assert streamed == called
        for name, arguments in called:
            found = json.loads(arguments)
            assert found == {} if name == "clock" else {"text", "where"} == set(found)
        return dict(message)


class RandomModel:
    """Draws any token that the grammar allows. The token that ends gpt-oss's reasoning is likelier than others,
    as that would go on without an end, and comes after a letter or another sign."""

    def __init__(self, directory: Path) -> None:
        self.grammars = Grammars(directory, VOCABULARY)
        self.rng = np.random.default_rng(0)
        self.tokenizer = Tokenizer(directory)
        self.end_of_reasoning = self.tokenizer.token_id("<|end|>")
        self.num_grammars = 0

    def generate(self, prompt: np.ndarray, grammar: Grammar) -> list[int]:
        self.num_grammars += 1
        self.grammars.compile(self.num_grammars, grammar)
        self.grammars.set_row(0, self.num_grammars)
        row = self.grammars.of(0)
        assert row is not None
        masks = np.zeros((1, self.grammars.mask_words), np.int32)
        token_ids: list[int] = []
        while not token_ids or token_ids[-1] not in self.tokenizer.eos_ids:
            assert len(token_ids) < 2000
            assert not self.grammars.fill(masks, [(0, row)])
            allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
            if self.end_of_reasoning in allowed and len(allowed) > 1:
                has_text = self.tokenizer.token_bytes(token_ids[-1]).strip()
                ends = has_text and self.rng.random() < 0.1
                allowed = allowed[(allowed == self.end_of_reasoning) == bool(ends)]
            token_ids.append(row.take(int(self.rng.choice(allowed))))
        return token_ids


def loop_of(template: str, directory: Path) -> Loop:
    save_model_of_family(directory, TEMPLATES[template])
    search = SEARCH_OF_CHOICES if template == "qwen3_coder" else SEARCH
    described = {"name": "search", "description": "Où?", "parameters": search}
    tools = [{"type": "function", "function": described}, {"type": "function", "function": {"name": "clock"}}]
    return Loop(directory, RandomModel(directory).generate, tools)


@pytest.mark.parametrize("template", SAME)
def test_every_prompt_begins_with_what_was_generated(template: str, tmp_path: Path) -> None:
    loop = loop_of(template, tmp_path)
    for number in range(NUM_TURNS):
        known = loop.known
        prompt = loop.turn([AUTO, REQUIRED, NAMED][number % 3], is_parallel=number % 4 < 2)
        assert prompt[: len(known)] == known
    takes_one = template in ("llama3", "gpt_oss")  # whose templates write one call of a message
    assert (max(loop.num_calls) == 1) == takes_one
    assert (loop.num_reasoned > 0) == (template == "gpt_oss")


@pytest.mark.parametrize("template", OTHER)
def test_some_templates_write_a_call_otherwise(template: str, tmp_path: Path) -> None:
    """docs/api.md names them."""
    loop = loop_of(template, tmp_path)
    for _ in range(3):
        known = loop.known
        prompt = loop.turn(REQUIRED, is_parallel=False)
        if known:
            pairs = enumerate(zip(known, prompt, strict=False))
            num_same = next(place for place, (first, second) in pairs if first != second)
            assert loop.tokenizer.decode(known[num_same:], False).startswith(OTHER[template])
