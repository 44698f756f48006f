"""Tests of the tokens among log-probabilities as clients get them: their names, bytes, places and number."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightkv.router.api.answers.chat_writer import ChatWriter
from lightkv.router.api.answers.completion_writer import CompletionWriter
from lightkv.router.api.answers.extras import Echo, Extras
from lightkv.router.api.answers.generation import Answer, TextDelta
from lightkv.router.api.answers.pieces import Scores, in_pieces
from lightkv.router.engine.step import PromptLogprobs, TokenEvent, TokenLogprobs
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.text.completion import AnswerForm, Completion
from lightkv.router.text.tokenizer import Tokenizer
from tests.support.piece_tokenizers import piece_tokenizer

KINDS = ["llama", "gemma", "metaspace", "bytes"]
NO_CLOCK: Any = None


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {kind: piece_tokenizer(tmp_path_factory.mktemp("tokenizer"), kind) for kind in KINDS}


def prompt_scores(num_tokens: int, top: list[int]) -> PromptLogprobs:
    """Returns log-probabilities of a prompt of so many tokens, each with the alternatives `top`."""
    num = num_tokens - 1
    values = np.tile(-np.arange(len(top), dtype=np.float32), (num, 1))
    ids = np.tile(np.array(top, np.int32), (num, 1))
    own = np.full(num, -0.5, np.float32)
    return PromptLogprobs(own.tobytes(), np.ones(num, np.int32).tobytes(), ids.tobytes(), values.tobytes())


def answered(
    tokenizer: Tokenizer, form: AnswerForm, prompt: list[int], ids: list[int], top: list[int]
) -> tuple[Any, list[TextDelta]]:
    """Returns a generation of one answer, in which each token has the alternatives `top`, and its deltas."""
    prompt_ids = np.array(prompt, np.int32).tobytes()
    completion = Completion(tokenizer, SamplingParams(max_tokens=99), form, prompt_ids)
    answer = Answer(0, 0, completion, NO_CLOCK, True)
    deltas = []
    scores = TokenLogprobs(-0.5, top, [-0.25 - place for place in range(len(top))])
    of_prompt = prompt_scores(len(prompt), top)
    for place, token in enumerate(ids):
        reason = "length" if place == len(ids) - 1 else None
        event = TokenEvent("", token, reason, scores, None, None, None if place else of_prompt)
        text, gained = completion.push(event), Scores()
        assert completion.place is not None
        gained.append(token, scores, completion.place)
        answer.scored.extend(gained)
        deltas.append(TextDelta(answer, text, scored=gained, finish_reason=reason))
    usage = {"num_prompt_tokens": 1, "num_completion_tokens": 1, "num_cached_tokens": None, "cut_to": None}
    return SimpleNamespace(answers=[answer], **usage), deltas


def choice_of(writer: ChatWriter | CompletionWriter, generation: Any) -> Any:
    (choice,) = json.loads(b"".join(writer.whole(generation)))["choices"]
    return choice


def choices_of(writer: ChatWriter | CompletionWriter, deltas: list[TextDelta]) -> list[Any]:
    """Returns the choices of a stream."""
    chunks: list[Any] = [chunk for delta in deltas for chunk in writer.chunks(delta)]
    return [json.loads(b"".join(in_pieces(chunk["choices"][0]))) for chunk in chunks]


def ids_of(tokenizer: Tokenizer, *names: str) -> list[int]:
    found = [tokenizer.token_id(name) for name in names]
    assert None not in found
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("own", "others", "names"),
    [
        ("A", ["A", "<0x41>"], ["A", 68]),  # one text of two tokens
        ("<0x41>", ["A", "<0x41>"], ["A", "token_id:A"]),
        ("a", ["<0x61>", "▁a", "a"], ["a", 100, " a"]),
        ("▁", ["<0x20>", "▁", "▁▁▁▁"], [" ", 35, "    "]),
        (".", ["<0x2E>", ",", "<0x2C>"], [".", 49, ",", 47]),
        ("<0xC3>", ["<0xA9>", "<0xF0>"], ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xf0"]),
        ("é", ["<0xC3>", "<0xE9>", "é"], ["é", "bytes:\\xc3", "bytes:\\xe9"]),
        ("<0x0A>", ["<0x0D>", "</s>"], ["\n", "\r", "</s>"]),
        ("<unk>", ["<s>", "</s>"], ["<unk>", "<s>", "</s>"]),
        ("x", [], ["x"]),
    ],
)
def test_each_alternative_has_a_name_of_its_own(
    tokenizers: dict[str, Tokenizer], own: str, others: list[str], names: list[Any]
) -> None:
    tokenizer = tokenizers["llama"]
    prompt = ids_of(tokenizer, "▁house")
    asked = ids_of(tokenizer, own), ids_of(tokenizer, *others)
    generation, _ = answered(tokenizer, AnswerForm(continues=True), prompt, *asked)
    logprobs = choice_of(CompletionWriter("m", tokenizer), generation)["logprobs"]
    found = logprobs["top_logprobs"][0]
    expected = [f"token_id:{name}" if isinstance(name, int) else name for name in names]
    expected = [name.replace("token_id:A", f"token_id:{tokenizer.token_id('A')}") for name in expected]
    assert list(found) == expected
    assert logprobs["tokens"] == expected[:1]
    assert len(found) == len({own, *others})


def test_ids_beyond_the_tokenizer_have_names(tokenizers: dict[str, Tokenizer]) -> None:
    """The vocabulary of a model may be larger than its tokenizer's."""
    tokenizer = tokenizers["llama"]
    generation, _ = answered(tokenizer, AnswerForm(continues=True), [5, 6], [5000], [5001, 5002, 5000])
    logprobs = choice_of(CompletionWriter("m", tokenizer), generation)["logprobs"]
    assert [list(one) for one in logprobs["top_logprobs"]] == [["", "token_id:5001", "token_id:5002"]]


TEXTS = [
    "A house",
    " A house",
    "é你🙂 a home in",
    "a\n  b",
    "🐦🐦",
    "  ",
    ".",
    "x y  z",
    "The capital of",
    "\u00a0é",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_an_echo_has_the_places_of_its_tokens(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    """In whole answers and in streams, whether the prompt was a text or token ids."""
    tokenizer = tokenizers[kind]
    prompt = tokenizer.encode("A é home").tolist()
    ids = tokenizer.encode(f"x{text}", add_special_tokens=False).tolist()[1:]
    for has_special in (False, True):
        echo = Echo(tokenizer.decode(prompt, not has_special), has_special)
        form = AnswerForm(continues=True, is_echoed=True)
        generation, deltas = answered(tokenizer, form, prompt, ids, ids[:1])
        prompts = [np.array(prompt, np.int32).tobytes()]
        extras = Extras(echoes_logprobs=True, prompts=prompts, echoed=[echo])
        whole = choice_of(CompletionWriter("m", tokenizer, extras), generation)
        logprobs = whole["logprobs"]
        assert whole["text"] == tokenizer.decode(prompt + ids, not has_special)
        for token, name, start in zip(prompt + ids, logprobs["tokens"], logprobs["text_offset"], strict=True):
            if name.startswith("bytes:") or (token in tokenizer.special_ids and not has_special):
                continue
            assert whole["text"].startswith(name, start)
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        pieces = choices_of(CompletionWriter("m", tokenizer, extras), deltas)
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        for name, values in logprobs.items():
            assert [one for piece in pieces for one in piece["logprobs"][name]] == values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("continues", [True, False])
def test_the_bytes_of_a_chat_join_to_its_text(
    tokenizers: dict[str, Tokenizer], kind: str, text: str, continues: bool
) -> None:
    tokenizer = tokenizers[kind]
    ids = [*tokenizer.encode(text).tolist(), *sorted(tokenizer.special_ids)]  # special tokens are hidden
    form = AnswerForm(continues=continues)
    generation, deltas = answered(tokenizer, form, tokenizer.encode("a home").tolist(), ids, ids[:2])
    whole = choice_of(ChatWriter("m", tokenizer), generation)
    choices = choices_of(ChatWriter("m", tokenizer), deltas)
    for found in ([whole["logprobs"]], [choice["logprobs"] for choice in choices]):
        entries = [entry for one in found if one for entry in one["content"]]
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == whole["message"]["content"]
        assert [len(entry["top_logprobs"]) for entry in entries] == [len(ids[:2])] * len(ids)
    assert "".join(choice["delta"].get("content", "") for choice in choices) == whole["message"]["content"]
