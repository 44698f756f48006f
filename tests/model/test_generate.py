"""Tests of LLM with a real model: its answers equal Hugging Face's, and it holds no memory afterwards."""

from array import array
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightkv.attention import BACKENDS
from lightkv.errors import OutOfMemory
from lightkv.router import (
    LLM,
    EngineConfig,
    InvalidConfig,
    InvalidParams,
    InvalidPrompt,
    NeverFits,
    SamplingParams,
)
from lightkv.router.config import ATTENTION_BACKENDS
from lightkv.router.llm import StepFailed
from lightkv.router.model_files import DEFAULT_MODEL, ModelNotFound, resolve
from lightkv.router.text.tokenizer import Tokenizer
from tests.support.byte_model import save_model_of_family
from tests.support.chat_templates import THINKING
from tests.support.served import save_tiny_model
from tests.support.tiny_files import save_tiny

NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
SHORT_TOKENS = 6
SHORT = SamplingParams(temperature=0, max_tokens=SHORT_TOKENS, ignore_eos=True)

SYSTEM = (
    "You are a careful assistant at a small museum of clocks. Answer in one short sentence, name the year "
    "where you know it, and say so when you do not."
)
PROMPTS = [
    "The capital of France is",
    "1, 1, 2, 3, 5, 8, 13,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Il était une fois, dans un petit village,",
    "東京は",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "a",
    "To be, or not to be, that is the question:",
    "{'name': 'Ada', 'year': 1815, 'field':",
    "Q: What do bees make?\nA:",
    "Once upon a time there was a clockmaker who could not sleep, and so",
    "\n\n\n",
    "The first law of thermodynamics states that " + "energy is conserved, and " * 20,
    "😀 😃 😄",
    "SELECT name FROM users WHERE",
]
CHATS = [
    "Who built the first clock?",
    "What is a pendulum?",
    "Tell me a joke.",
    "And in 1656?",
    "Who are you?",
]


@cache
def model_dir() -> Path:
    return Path(resolve(DEFAULT_MODEL, print))


@cache
def reference() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32).eval()


@cache
def prompts() -> list[list[int]]:
    """Returns 20 varied prompts; the last five share a system prompt."""
    tokenizer = Tokenizer(model_dir())
    ids = [tokenizer.encode(text).tolist() for text in PROMPTS]
    for question in CHATS:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        ids.append(tokenizer.encode_chat(messages).tolist())
    return ids


EVERY = tuple(range(len(PROMPTS) + len(CHATS)))
FEW = (0, 1, 4, 15, 16)  # of which two are longer than 32 tokens, and share a system prompt


@cache
def expected(places: tuple[int, ...] = EVERY, num_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """Returns Hugging Face's greedy continuations of the prompts at these places.

    Prompts of similar length run together, padded on the left. At each step the likeliest token leads by more
    than 0.001, which is over ten times as much as batching changes a logit.
    """
    outputs: dict[int, list[int]] = {}
    order = sorted(places, key=lambda i: len(prompts()[i]))
    middle = (len(order) + 1) // 2
    for batch in filter(None, (order[:middle], order[middle:])):
        width = len(prompts()[batch[-1]])
        ids, mask = torch.zeros(2, len(batch), width, dtype=torch.int64)
        for row, i in enumerate(batch):
            ids[row, width - len(prompts()[i]) :] = torch.tensor(prompts()[i])
            mask[row, width - len(prompts()[i]) :] = 1
        found = reference().generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs |= zip(batch, found[:, width:].tolist(), strict=True)
    return [outputs[i] for i in places]


def gap_at_first_difference(prompt: list[int], ours: list[int], theirs: list[int]) -> float:
    """Returns the gap between the reference's logits of the two tokens at the first difference."""
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    with torch.no_grad():
        logits = reference()(torch.tensor([prompt + theirs[:at]])).logits[0, -1]
    return abs(float(logits[ours[at]] - logits[theirs[at]]))


def shared(a: list[int], b: list[int]) -> int:
    """Returns the length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def assert_idle(llm: LLM) -> None:
    llm.check()
    stats = llm.stats()
    assert (stats.held, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.free + stats.cached == stats.capacity


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(EngineConfig(device="cpu", max_total_tokens=4096, max_num_seqs=32, prefill_chunk=32))
    yield llm
    assert_idle(llm)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a model of two random layers with the default model's tokenizer."""
    return str(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def tiny(tiny_model: str) -> Iterator[LLM]:
    tiny = LLM(EngineConfig(tiny_model, device="cpu", max_total_tokens=4096, prefill_chunk=32))
    yield tiny
    assert_idle(tiny)


@pytest.mark.parametrize(
    "chunk",
    [pytest.param(chunk, marks=pytest.mark.slow) for chunk in (7, 64, 0)],
    ids=["chunks-of-7", "chunks-of-64", "unlimited"],
)
def test_greedy_output_is_hugging_faces(chunk: int) -> None:
    config = EngineConfig(device="cpu", max_total_tokens=8192, max_num_seqs=32, prefill_chunk=chunk)
    assert_hugging_faces(LLM(config), EVERY, NEW_TOKENS)


def test_greedy_output_of_a_few_prompts_in_chunks_of_32_is_hugging_faces(llm: LLM) -> None:
    llm.engine.evict_cached()  # tests that ran before may have left tokens of these prompts
    assert_hugging_faces(llm, FEW, SHORT_TOKENS)


def assert_hugging_faces(llm: LLM, places: tuple[int, ...], num_tokens: int) -> None:
    """Compares the answers to the prompts at these places with Hugging Face's, computed and then cached."""
    asked = [prompts()[place] for place in places]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for run in ("first", "cached"):
        before = llm.stats()
        outputs = llm.generate(asked, params)
        hits = llm.stats().hit_tokens - before.hit_tokens
        if run == "cached":  # of every prompt all but the last token is cached
            assert hits == sum(len(ids) - 1 for ids in asked)
        num_different = 0
        for ids, output, theirs in zip(asked, outputs, expected(places, num_tokens), strict=True):
            ours = output.outputs[0].token_ids
            if ours != theirs:
                num_different += 1
                assert gap_at_first_difference(ids, ours, theirs) < 1e-3
        assert num_different <= 1
        assert_idle(llm)


@pytest.mark.slow
def test_chats_that_run_together_hit_their_common_prompt() -> None:
    llm = LLM(EngineConfig(device="cpu", max_total_tokens=4096))
    chats = prompts()[-len(CHATS) :]
    outputs = llm.generate(chats, GREEDY)
    hits = [max((shared(chat, before) for before in chats[:i]), default=0) for i, chat in enumerate(chats)]
    assert min(hits[1:]) > 40
    assert [output.num_cached_tokens for output in outputs] == hits
    assert [output.outputs[0].token_ids for output in outputs] == expected()[-len(CHATS) :]
    assert_idle(llm)


@pytest.mark.slow
def test_a_chat_says_where_its_next_turn_goes_on(tmp_path: Path) -> None:
    llm = LLM(EngineConfig(str(save_model_of_family(tmp_path, THINKING)), device="cpu", max_total_tokens=256))
    chat = [{"role": "user", "content": "Hello"}]
    assert llm._answers([chat], None)[0].request.boundary == 0
    llm.info = structs.replace(llm.info, num_states=1)
    request = llm._answers([chat], None)[0].request
    common = array("i", request.prompt_ids)[: request.boundary]
    assert llm.tokenizer.decode(common, False).endswith("Hello<|im_end|>\n<|im_start|>assistant\n")
    assert llm._answers(["Hello"], None)[0].request.boundary == 0


def test_a_pool_too_small_for_all_runs_them_in_turn(tiny: LLM, tiny_model: str) -> None:
    small = LLM(EngineConfig(tiny_model, device="cpu", max_total_tokens=100, max_num_seqs=4))
    asked = [prompts()[place] for place in FEW]
    wanted, found = (
        [one.outputs[0].token_ids for one in llm.generate(asked, SHORT)] for llm in (tiny, small)
    )
    assert found == wanted
    assert small.stats().reached_peak <= 100
    assert_idle(small)


def test_streaming_gives_the_same_text(tiny: LLM) -> None:
    texts = ["", ""]
    ends = {}
    for chunk in tiny.stream([PROMPTS[4], PROMPTS[13]], SHORT):
        texts[chunk.prompt_idx] += chunk.text
        if chunk.finish_reason:
            ends[chunk.prompt_idx] = chunk.finish_reason
    whole = tiny.generate([PROMPTS[4], PROMPTS[13]], SHORT)
    assert texts == [output.outputs[0].text for output in whole]
    assert ends == {0: "length", 1: "length"}


@pytest.mark.slow
def test_streams_may_be_interleaved(llm: LLM) -> None:
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    texts = [
        "".join(chunk.text for chunk in column)
        for column in zip(*zip(first, second, strict=True), strict=True)
    ]
    stream = llm.stream(PROMPTS[2], GREEDY)
    text = next(stream).text
    between = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text
    text += "".join(chunk.text for chunk in stream)
    whole = [output.outputs[0].text for output in llm.generate(PROMPTS[:3], GREEDY)]
    assert [*texts, text] == whole
    assert between == whole[0]


@pytest.mark.slow
def test_a_stop_string_ends_an_answer_that_another_call_has_stepped(llm: LLM) -> None:
    """The steps of the other call bring tokens behind the stop string, which are dropped."""
    (whole,) = llm.generate(PROMPTS[1], GREEDY)
    stop = whole.outputs[0].text.strip().split()[1]
    params = SamplingParams(temperature=0, max_tokens=GREEDY.max_tokens, stop=(stop,))
    stream = llm.stream(PROMPTS[1], params)
    chunks = [next(stream)]
    llm.generate(PROMPTS[0], GREEDY)
    chunks += stream
    (alone,) = llm.generate(PROMPTS[1], params)
    assert "".join(chunk.text for chunk in chunks) == alone.outputs[0].text
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    assert_idle(llm)


def test_dropping_a_stream_ends_its_requests(tiny: LLM) -> None:
    stream = tiny.stream([PROMPTS[0], PROMPTS[1]], SHORT)
    next(stream)
    assert tiny.stats().num_running == 2
    stream.close()  # type: ignore[attr-defined]
    assert_idle(tiny)


def test_a_stop_string_ends_the_text_and_the_request(tiny: LLM) -> None:
    plain = tiny.generate(PROMPTS[7], SHORT)[0].outputs[0]
    stop = plain.text[6:10]
    params = SamplingParams(temperature=0, max_tokens=SHORT_TOKENS, ignore_eos=True, stop=stop)
    stopped = tiny.generate(PROMPTS[7], params)[0].outputs[0]
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) < SHORT_TOKENS
    assert_idle(tiny)


def test_a_stop_token_is_not_part_of_the_text(tiny: LLM) -> None:
    plain = tiny.generate(PROMPTS[0], SHORT)[0].outputs[0]
    token = plain.token_ids[5]
    first = plain.token_ids.index(token)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, stop_token_ids=[token])
    stopped = tiny.generate(PROMPTS[0], params)[0].outputs[0]
    assert stopped.token_ids == plain.token_ids[: first + 1]
    assert stopped.text == tiny.tokenizer.decode(plain.token_ids[:first])


def test_the_model_ends_its_own_answers(llm: LLM) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.generate(chat, SamplingParams(temperature=0))[0].outputs[0]
    assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")


def test_n_answers_share_their_prompt_and_differ(tiny: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.2, seed=5, max_tokens=SHORT_TOKENS)
    output = tiny.generate("A list of unusual instruments, with reasons:", params)[0]
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 4
    again = tiny.generate("A list of unusual instruments, with reasons:", params)[0]
    assert [a.token_ids for a in again.outputs] == [a.token_ids for a in output.outputs]
    assert again.num_cached_tokens == len(output.prompt_token_ids) - 1


def test_a_seeded_answer_does_not_depend_on_the_batch(tiny: LLM) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=SHORT_TOKENS)
    alone = tiny.generate(PROMPTS[10], params)[0].outputs[0].token_ids
    greedy = tiny.generate(PROMPTS[0], SHORT)[0].outputs[0].token_ids
    mixed = tiny.generate([PROMPTS[0], PROMPTS[10], PROMPTS[2]], [SHORT, params, SHORT])
    assert mixed[1].outputs[0].token_ids == alone
    assert mixed[0].outputs[0].token_ids == greedy


def test_logprobs_equal_the_models(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, ignore_eos=True)
    output = llm.generate(PROMPTS[0], params)[0]
    answer = output.outputs[0]
    assert answer.logprobs is not None
    ids = output.prompt_token_ids
    for token, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
        with torch.no_grad():
            row = reference()(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        best = row.topk(2)
        assert logprobs.top_ids == best.indices.tolist()
        torch.testing.assert_close(
            torch.tensor([logprobs.logprob, *logprobs.top_logprobs]),
            torch.stack([row[token], *best.values]),
            atol=1e-3,
            rtol=0,
        )
        ids = [*ids, token]


@pytest.mark.slow
def test_penalties_reach_the_model(llm: LLM) -> None:
    plain = llm.generate(PROMPTS[12], GREEDY)[0].outputs[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, frequency_penalty=2.0)
    penalised = llm.generate(PROMPTS[12], params)[0].outputs[0].token_ids
    assert len(set(penalised)) > len(set(plain))
    biased = SamplingParams(temperature=0, max_tokens=2, logit_bias={42: 100.0})
    assert llm.generate(PROMPTS[0], biased)[0].outputs[0].token_ids == [42, 42]


@pytest.mark.parametrize(
    ("prompt", "params", "error", "match"),
    [
        (
            [1] * 4097,
            SamplingParams(max_tokens=200),
            NeverFits,
            "4097 prompt tokens and up to 1 .* pool of 4096",
        ),
        ([1] * 8000, SamplingParams(max_tokens=200), NeverFits, "the context of 8192"),
        ([1, 49152], None, InvalidPrompt, "go from 0 to 49151"),
        ("", None, InvalidPrompt, "empty"),
        ([1.5], None, TypeError, "prompt 1 .*integers"),
        ([2**40], None, InvalidPrompt, "prompt 1 .*fits 32 bits"),
        (None, None, TypeError, "prompt 1 is neither"),
        ([1], SamplingParams(logit_bias={50000: 1.0}), InvalidParams, "logit_bias"),
    ],
    ids=["pool", "context", "vocabulary", "empty", "floats", "huge", "none", "bias"],
)
def test_bad_requests_are_refused_before_anything_runs(
    llm: LLM, prompt: object, params: SamplingParams | None, error: type[Exception], match: str
) -> None:
    steps = llm.stats().num_steps
    with pytest.raises(error, match=match):
        llm.generate(["good", prompt], params)  # type: ignore[list-item]
    assert llm.stats().num_steps == steps
    assert_idle(llm)


def test_a_failed_step_loses_its_requests_and_nothing_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr("lightkv.router.model.parts.forward", fail)
        with pytest.raises(StepFailed, match="no such luck"):
            llm.generate(PROMPTS[:3], SHORT)
    assert_idle(llm)
    assert llm.generate(PROMPTS[0], SHORT)[0].outputs[0].token_ids == expected(FEW, SHORT_TOKENS)[0]


@pytest.mark.parametrize(
    ("config", "error", "match"),
    [
        (EngineConfig(model="/nowhere/model"), ModelNotFound, "/nowhere/model"),
        (EngineConfig(device="cuda:77"), InvalidConfig, "77"),
        (EngineConfig(device="cpu", max_model_len=9000), InvalidConfig, "context is 8192"),
    ],
    ids=["model", "gpu", "context"],
)
def test_bad_settings_are_refused_with_the_remedy(
    config: EngineConfig, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        LLM(config)


def test_a_pool_larger_than_the_memory_is_refused_with_what_a_token_takes(tmp_path: Path) -> None:
    config = EngineConfig(str(save_tiny(tmp_path)), device="cpu", kv_dtype="auto", max_total_tokens=2**40)
    with pytest.raises(OutOfMemory, match="256 each"):  # two layers, two heads of 8 dims, K and V, float32
        LLM(config)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("mem_fraction", 0.0),
        ("mem_fraction", float("nan")),
        ("max_num_seqs", 0),
        ("prefill_chunk", -1),
        ("session_share", -0.1),
        ("session_share", 1.01),
        ("session_share", float("nan")),
        ("itl_target", -0.01),
        ("itl_target", float("nan")),
        ("itl_target", float("inf")),
        ("dtype", "int3"),
        ("attention_backend", "abacus"),
    ],
)
def test_errors_of_settings_out_of_range_name_the_option(setting: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match="--" + setting.replace("_", "-")):
        EngineConfig(**{setting: value})  # type: ignore[arg-type]


def test_the_settings_name_every_backend() -> None:
    assert set(ATTENTION_BACKENDS) == set(BACKENDS)
