"""The ids that a prompt has in common with its chat's next turn, against a comparison of all ids."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightkv.router.text.stable_boundary import next_turn, stable_boundary
from lightkv.router.text.tokenizer import Tokenizer
from tests.support.byte_model import save_model_of_family
from tests.support.chat_templates import TEMPLATES, THINKING, FamilyTemplate

FAMILIES = TEMPLATES | {
    "thinks": THINKING,
    "plain": FamilyTemplate(
        "{%- for m in messages %}{{- m.role + ': ' + m.content + '\\n' }}{%- endfor %}", "</s>", (), ()
    ),
}
CALL: dict[str, Any] = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {}}}
WRITTEN_CALL = {**CALL, "function": {"name": "f", "arguments": "{}"}}  # as DeepSeek's templates take it
CHATS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "Hi"}],
    "an answer that is continued": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hel"},
    ],
    "several turns": [
        {"role": "user", "content": "Hi <|im_end|> there"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "ça <|im_start|> va? " * 90},
    ],
    "a call": [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [CALL]},
        {"role": "tool", "content": "found", "tool_call_id": "123456789"},
    ],
}


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_model_of_family(tmp_path_factory.mktemp("model"), FAMILIES[request.param]))


def _rendered(tokenizer: Tokenizer, messages: Any, **variables: Any) -> tuple[str, np.ndarray, str]:
    text = tokenizer.render_chat(messages, variables=variables)
    later = tokenizer.render_chat(next_turn(messages), variables=variables)
    return text, tokenizer.encode(text, False), later


def _common(one: np.ndarray, other: np.ndarray) -> int:
    least = min(len(one), len(other))
    return int(np.argmin(np.append(one[:least] == other[:least], False)))


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("thinking", [{}, {"enable_thinking": False}], ids=["default", "no thinking"])
def test_as_many_ids_as_both_texts_begin_with(
    tokenizer: Tokenizer, name: str, thinking: dict[str, bool]
) -> None:
    messages = CHATS[name]
    if name == "a call" and "arguments | " not in tokenizer.template:
        messages = [messages[0], {**messages[1], "tool_calls": [WRITTEN_CALL]}, messages[2]]
    text, ids, later = _rendered(tokenizer, messages, **thinking)
    common = _common(ids, tokenizer.encode(later, False))
    has_mark = any(token in tokenizer.special_ids for token in ids[:common])
    assert stable_boundary(tokenizer, text, ids, later) == (common if has_mark else 0)


def test_thinking_that_is_begun_for_the_answer_is_behind_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_model_of_family(tmp_path, FAMILIES["thinks"]))
    text, ids, later = _rendered(tokenizer, CHATS["several turns"])
    boundary = stable_boundary(tokenizer, text, ids, later)
    assert tokenizer.decode(ids[boundary:], False) == "<think>\n"


def test_thinking_that_the_next_turn_leaves_out_is_behind_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_model_of_family(tmp_path, FAMILIES["thinks"]))
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "I call", "reasoning_content": "Hm"},
        {"role": "tool", "content": "found " * 2000},
    ]
    text, ids, later = _rendered(tokenizer, messages)
    boundary = stable_boundary(tokenizer, text, ids, later)
    assert tokenizer.decode(ids[:boundary], False).endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(ids[boundary:], False).startswith("<think>\nHm")


def test_what_is_common_is_not_tokenised_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(save_model_of_family(tmp_path, FAMILIES["thinks"]))
    text, ids, later = _rendered(tokenizer, [{"role": "user", "content": "words and " * 10_000}])
    encoded: list[str] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> np.ndarray:
        encoded.append(text)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    assert stable_boundary(tokenizer, text, ids, later) == len(ids) - 2  # the mark and the end of its line
    assert sum(map(len, encoded)) < 500


def test_an_added_token_far_before_the_difference_is_found(tmp_path: Path) -> None:
    source = "{{- '<|im_start|>' }}{%- for m in messages %}{{- m.content }}{%- endfor %}"
    template = FamilyTemplate(source, "<|im_end|>", ("<|im_start|>",), ())
    tokenizer = Tokenizer(save_model_of_family(tmp_path, template))
    messages = [{"role": "user", "content": "a" * 5000 + "b"}]
    text, ids, later = _rendered(tokenizer, messages)
    assert stable_boundary(tokenizer, text, ids, later) == len(ids) == 5002
