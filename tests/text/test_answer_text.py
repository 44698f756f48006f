"""Tests of the text of answers: what continues a prompt, what begins a text, and where its tokens are."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from lightkv.router.engine.step import TokenEvent, TokenLogprobs
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.text.answer_reader import AnswerReader, joined, think
from lightkv.router.text.completion import AnswerForm, Completion
from lightkv.router.text.detokenizer import MAX_BEFORE, Detokenizer, Place, StopChecker, closed_text
from lightkv.router.text.tokenizer import Tokenizer
from lightkv.router.text.tool_calls.families import FAMILIES
from tests.support.piece_tokenizers import DECODERS, piece_tokenizer

KINDS = [*DECODERS, "words", "word parts", "bytes"]
TEXTS = [
    "The capital of France is Paris",
    "A house is a home",
    "one two. one",
    "The houses returned. A home",
]
# Those that only a tokenizer with bytes keeps.
ANY_TEXTS = [
    "def main():\n    return one",
    "  two spaces",
    "a  b   c",
    "x\n\n\n y",
    "é你🙂 a",
    "a é, 日本語 b",
    "🐦🐦🐦",
    " a ",
    "\ta\u00a0b",
    "naïve café",
]
CONTINUES, BEGINS = AnswerForm(continues=True), AnswerForm()
ECHOES = AnswerForm(continues=True, is_echoed=True)
SCORES = TokenLogprobs(-1.0, [], [])


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {kind: piece_tokenizer(tmp_path_factory.mktemp("tokenizer"), kind) for kind in KINDS}


def answer(
    tokenizer: Tokenizer, form: AnswerForm, prompt: list[int], ids: list[int], **params: Any
) -> tuple[str, Completion]:
    """Returns the text of an answer, as it streams, and the whole of it."""
    return placed(tokenizer, form, prompt, ids, **params)[:2]


def placed(
    tokenizer: Tokenizer, form: AnswerForm, prompt: list[int], ids: list[int], **params: Any
) -> tuple[str, Completion, list[Place]]:
    """Returns an answer, and the place of each token."""
    asked = SamplingParams(max_tokens=999, **params)
    completion = Completion(tokenizer, asked, form, np.array(prompt, np.int32).tobytes())
    pieces, places = [], []
    for number, token in enumerate(ids):
        reason = "length" if number == len(ids) - 1 else None
        pieces.append(completion.push(TokenEvent("", token, reason, SCORES)))
        if completion.place is not None:
            places.append(completion.place)
    assert "".join(pieces) == completion.text
    return completion.text, completion, places


def texts_of(kind: str) -> list[str]:
    return TEXTS + ([] if kind.startswith("word") else ANY_TEXTS)


CASES = [(kind, text) for kind in KINDS for text in texts_of(kind)]
cases = pytest.mark.parametrize(("kind", "text"), CASES)


@cases
@pytest.mark.parametrize("skips", [True, False])
def test_prompt_and_answer_are_the_text_of_all_tokens(
    tokenizers: dict[str, Tokenizer], kind: str, text: str, skips: bool
) -> None:
    """Wherever the answer begins: also within a character, which is the answer's if it ends it."""
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text).tolist()
    whole = tokenizer.decode(ids, skips)
    for cut in range(len(ids)):
        before = tokenizer.decode(ids[:cut], skips)
        text_of, _ = answer(tokenizer, CONTINUES, ids[:cut], ids[cut:], skip_special_tokens=skips)
        if not before.endswith("\ufffd"):
            assert before + text_of == whole, cut
        echoed, _ = answer(tokenizer, ECHOES, ids[:cut], ids[cut:], skip_special_tokens=skips)
        shown = [one for one in ids[:cut] if not skips or one not in tokenizer.special_ids]
        assert closed_text(tokenizer, shown) + echoed == whole, cut
    assert answer(tokenizer, BEGINS, ids, ids, skip_special_tokens=skips)[0] == whole  # of a chat


def test_an_answer_continues_whatever_ends_the_prompt(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["llama"]
    token = {
        name: tokenizer.token_id(name) for name in ("▁Paris", "▁is", "▁", "▁▁▁▁", "<s>", "</s>", "<0x0A>")
    }
    paris = [token["▁Paris"]]
    for prompt, text in [
        (["▁is"], " Paris"),
        (["▁is", "</s>"], " Paris"),  # special tokens have no text
        (["▁is", *["</s>"] * (MAX_BEFORE - 1)], " Paris"),
        (["▁is", "▁"], " Paris"),
        (["▁"], " Paris"),
        (["▁▁▁▁"], " Paris"),
        (["<0x0A>"], " Paris"),
        (["<s>"], "Paris"),  # here the text begins
        (["<s>", "</s>"], "Paris"),
        ([], "Paris"),
    ]:
        ids = [token[name] for name in prompt]
        assert answer(tokenizer, CONTINUES, ids, paris)[0] == text, prompt
        assert tokenizer.decode(ids) + text == tokenizer.decode(ids + paris)
    assert answer(tokenizer, CONTINUES, [token["<s>"]], paris, skip_special_tokens=False)[0] == " Paris"


@pytest.mark.parametrize("kind", ["llama", "bytes"])
def test_a_character_that_a_prompt_begins(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("a🙂🙂").tolist()
    rest = tokenizer.encode("🙂", add_special_tokens=False).tolist()[-2:]
    other = tokenizer.encode("b", add_special_tokens=False).tolist()[-1:]
    assert closed_text(tokenizer, ids[:-2]).endswith("a🙂")
    assert answer(tokenizer, CONTINUES, ids[:-2], rest)[0] == "🙂"
    assert answer(tokenizer, CONTINUES, ids[:-2], other)[0] == "b"  # what is begun has its text in the prompt
    assert answer(tokenizer, ECHOES, ids[:-2], rest)[0] == "🙂"
    assert answer(tokenizer, ECHOES, ids[:-2], other)[0].strip("\ufffd") == "b"
    assert answer(tokenizer, CONTINUES, ids, rest)[0] == "\ufffd\ufffd"


@pytest.mark.parametrize(
    ("stop", "text"),
    [(" Paris", ""), ("Paris", " "), (" Paris. The", ""), (" The", " Paris."), (".", " Paris"), (" X", None)],
)
@pytest.mark.parametrize("kind", ["llama", "gemma", "metaspace"])
def test_stop_strings_with_a_space(
    tokenizers: dict[str, Tokenizer], kind: str, stop: str, text: str | None
) -> None:
    tokenizer = tokenizers[kind]
    names = ["▁France", "▁is", "▁Paris", ".", "▁The", "▁capital"]
    ids = [tokenizer.token_id(name) for name in names]
    assert None not in ids
    got, completion = answer(tokenizer, CONTINUES, ids[:2], ids[2:], stop=[stop])  # type: ignore[arg-type]
    assert got == (" Paris. The capital" if text is None else text)
    assert completion.finish_reason == ("length" if text is None else "stop")


# The text, the bytes and the place of one token


@cases
@pytest.mark.parametrize("form", [CONTINUES, BEGINS], ids=["continues", "begins"])
def test_tokens_join_to_the_text_and_have_their_place_in_it(
    tokenizers: dict[str, Tokenizer], kind: str, text: str, form: AnswerForm
) -> None:
    tokenizer = tokenizers[kind]
    prompt = tokenizer.encode("A house").tolist()
    ids = tokenizer.encode(text).tolist()  # with a special token, which the text leaves out
    got, _, places = placed(tokenizer, form, prompt, ids)
    begun = Detokenizer(tokenizer)
    assert form is not BEGINS or places == [begun.push_placed(one)[1] for one in ids]
    shown = [(one, place) for one, place in zip(ids, places, strict=True) if not place.is_hidden]
    pieces = [tokenizer.token_bytes(one, place.begins) for one, place in shown]
    assert b"".join(pieces).decode() == got
    for number, (one, place) in enumerate(shown):
        before = b"".join(pieces[:number]).decode(errors="ignore")
        assert place.start == len(before)
        own = tokenizer.token_text(one, place.begins)
        assert "\ufffd" in own or got.startswith(own, place.start)


@pytest.mark.parametrize(
    ("name", "text", "first"),
    [
        ("▁", " ", ""),
        ("▁▁▁▁", "    ", "   "),
        ("▁house", " house", "house"),
        ("A", "A", "A"),
        ("é", "é", "é"),
        (".", ".", "."),
        ("<0x41>", "A", "A"),
        ("<0x0A>", "\n", "\n"),
        ("<0xC3>", "\ufffd", "\ufffd"),
        ("</s>", "</s>", "</s>"),
    ],
)
def test_the_text_of_one_token(tokenizers: dict[str, Tokenizer], name: str, text: str, first: str) -> None:
    tokenizer = tokenizers["llama"]
    token_id = tokenizer.token_id(name)
    assert token_id is not None
    assert (tokenizer.token_text(token_id), tokenizer.token_text(token_id, begins=True)) == (text, first)
    expected = {"<0xC3>": b"\xc3", "</s>": b""}.get(name, text.encode())
    assert tokenizer.token_bytes(token_id) == expected
    assert tokenizer.token_text(10**6) == "" == tokenizer.token_bytes(10**6).decode()


# Stop strings in an answer that is divided

TOOLS = {"f": {"type": "object"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"s": "STOP"}}\n</tool_call>'
TAKES_CALLS: Any = lambda source: FAMILIES["hermes"].read(source, TOOLS)  # noqa: E731
TAKES_MESSAGES: Any = lambda source: FAMILIES["gpt_oss"].read(source, TOOLS)  # noqa: E731
REASONS: Any = partial(think, is_inside=True)
MAY_REASON: Any = partial(think, is_inside=False)
F = ("f", '{"s": "STOP"}')
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
DIVIDED: list[tuple[list[Any], str, tuple[str, str, list[tuple[str, str]]], bool]] = [
    ([REASONS], "The STOP is.\n</think>\n\nAnswer: 4", ("The STOP is.", "Answer: 4", []), False),
    ([REASONS], "STOP</think>Answer STOP 4", ("STOP", "Answer ", []), True),
    ([REASONS], "So STOP STOP", ("So STOP STOP", "", []), False),
    ([REASONS], "ST</think>OP", ("ST", "OP", []), False),
    ([MAY_REASON], "<think>STOP</think>\nYes. STOP", ("STOP", "Yes. ", []), True),
    ([MAY_REASON], "No STOP <think>", ("", "No ", []), True),
    ([MAY_REASON], "STOP", ("", "", []), True),
    ([TAKES_CALLS], f"I look.\n{CALL}", ("", "I look.", [F]), False),
    ([TAKES_CALLS], f"I STOP.\n{CALL}", ("", "I ", []), True),
    ([TAKES_CALLS], f"I ST{CALL}OP", ("", "I STOP", [F]), False),
    ([TAKES_CALLS], f"{CALL}\nSTOP", ("", "", [F]), True),
    ([REASONS, TAKES_CALLS], f"STOP</think>{CALL}", ("STOP", "", [F]), False),
    ([REASONS, TAKES_CALLS], f"a</think>b STOP{CALL}", ("a", "b ", []), True),
    ([TAKES_MESSAGES], f"{ANALYSIS}STOP{FINAL}Yes", ("STOP", "Yes", []), False),
    ([TAKES_MESSAGES], f"{ANALYSIS}a{FINAL}Yes STOP no", ("a", "Yes ", []), True),
]


@pytest.mark.parametrize(("stages", "text", "expected", "stops"), DIVIDED)
def test_stop_strings_are_looked_for_in_the_content(
    tokenizers: dict[str, Tokenizer],
    stages: list[Any],
    text: str,
    expected: tuple[str, str, list[tuple[str, str]]],
    stops: bool,
) -> None:
    tokenizer = tokenizers["bytes"]
    ids = tokenizer.encode(text).tolist()
    make: Callable[[StopChecker], AnswerReader] = partial(AnswerReader, stages, None)
    form = AnswerForm(shown_ids=tokenizer.special_ids, new_reader=make)
    for stop in ("STOP", ["x", "STOP"]):
        _, completion = answer(tokenizer, form, [], ids, stop=stop)
        assert joined(completion.parts) == expected
        assert completion.finish_reason == ("stop" if stops else "length")
    _, completion = answer(tokenizer, form, [], ids, stop="STOP", include_stop_str_in_output=True)
    assert joined(completion.parts)[1].endswith("STOP") == (stops or expected[1].endswith("STOP"))
    _, completion = answer(tokenizer, form, [], ids, stop="STOP", min_tokens=len(ids))
    assert completion.finish_reason == "length"
    assert joined(completion.parts) == joined(answer(tokenizer, form, [], ids)[1].parts)


def test_an_answer_ends_as_soon_as_its_content_has_the_stop_string(tokenizers: dict[str, Tokenizer]) -> None:
    """Also where it is white space, which is held back from the client before a call."""
    tokenizer = tokenizers["bytes"]
    ids = tokenizer.encode("a\n\n</think>\n\nb\n\nc").tolist()
    make: Callable[[StopChecker], AnswerReader] = partial(AnswerReader, [REASONS], None)
    completion = Completion(tokenizer, SamplingParams(stop="\n\n"), AnswerForm(new_reader=make))
    taken = []
    for token in ids:
        completion.push(TokenEvent("", token, None, None))
        taken.append(token)
        if completion.stopped:
            break
    assert (len(ids) - len(taken), joined(completion.parts)) == (1, ("a", "b", []))
