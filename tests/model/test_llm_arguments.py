"""What `LLM` takes: habits of vLLM's users work or are answered with what to give, as are wrong types."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightkv.router import LLM, BeamParams, EngineConfig, InvalidConfig, InvalidPrompt, SamplingParams
from lightkv.router.config import ServiceConfig
from tests.support.served import save_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=4)
CHAT = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    llm = LLM(EngineConfig(model=str(directory), device="cpu", max_total_tokens=500))
    yield llm
    llm.check()


# --------------------------------------------------------------------------------
# What works as in vLLM


def test_prompts_and_sampling_params_by_position_and_by_name(llm: LLM) -> None:
    by_name = llm.generate(prompts=["ab", "cd"], sampling_params=GREEDY)
    by_position = llm.generate(["ab", "cd"], [GREEDY, GREEDY])
    assert [one.outputs[0].token_ids for one in by_name] == [one.outputs[0].token_ids for one in by_position]
    assert [one.prompt for one in by_name] == ["ab", "cd"]
    streamed = list(llm.stream("ab", sampling_params=GREEDY))
    assert [chunk.token_ids[0] for chunk in streamed] == by_name[0].outputs[0].token_ids


def test_a_chat_and_several(llm: LLM) -> None:
    (one,) = llm.chat(CHAT, GREEDY)
    both = llm.chat([CHAT, CHAT], sampling_params=GREEDY)
    assert [each.outputs[0].token_ids for each in both] == [one.outputs[0].token_ids] * 2
    assert one.prompt == CHAT
    assert one.prompt_token_ids == llm.tokenizer.encode_chat(CHAT).tolist()


def test_a_path_is_a_model(llm: LLM, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    other = LLM(directory)
    assert other.generate("ab", GREEDY)[0].outputs == llm.generate("ab", GREEDY)[0].outputs


def test_it_prints_what_it_is(llm: LLM) -> None:
    assert re.fullmatch(
        r"LLM\('.*/tiny': LlamaForCausalLM, float32 on cpu; K/V of 500 tokens in float32; context \d+; "
        r"0 running, 0 waiting\)",
        repr(llm),
    )


# --------------------------------------------------------------------------------
# What is answered with what to give

SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "ours": (
        {"max_model_len": 64},
        "as an EngineConfig: LLM(EngineConfig(model='m', max_model_len=64))",
    ),
    "renamed": ({"gpu_memory_utilization": 0.5}, "LLM(EngineConfig(model='m', mem_fraction=0.5))"),
    "opposite": ({"enforce_eager": True}, "LLM(EngineConfig(model='m', cuda_graphs=False))"),
    "absent": (
        {"tensor_parallel_size": 2},
        "LLM('m'); tensor_parallel_size: an LLM runs on one GPU; leave it out, or start lightkv serve "
        "--tensor-parallel N",
    ),
    "several": (
        {"max_num_seqs": 8, "enable_prefix_caching": True},
        "max_num_seqs=8)); enable_prefix_caching: prefixes are cached to the token, and it is always so",
    ),
    "mistyped": ({"max_modell_len": 64}, "max_modell_len: there is no such setting; is it max_model_len?"),
    "unheard": ({"zzz": 1}, "zzz: there is no such setting"),
}


@pytest.mark.parametrize(("settings", "remedy"), SETTINGS.values(), ids=SETTINGS)
def test_settings_by_keyword_are_answered_with_the_configuration(
    settings: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(remedy)):
        LLM(model="m", **settings)


CALLS: dict[str, tuple[Callable[[LLM], object], str]] = {
    "a dict of settings": (lambda llm: llm.generate("a", {"temperature": 0}), "SamplingParams, such as"),
    "a list of dicts": (lambda llm: llm.generate(["a"], [{}]), "give SamplingParams"),
    "settings of beams": (lambda llm: llm.generate("a", BeamParams()), "give SamplingParams"),
    "no beams": (lambda llm: llm.beam_search("a", GREEDY), r"give BeamParams, such as BeamParams\(width=4\)"),
    "a dict": (lambda llm: llm.generate({"prompt": "a"}), "prompt 0 is in a dict with 'prompt'; give the text"),
    "ids in dicts": (
        lambda llm: llm.generate([{"prompt_token_ids": [1]}, {"prompt_token_ids": [2]}]),
        "in a dict with 'prompt_token_ids'; give the text or the list of token ids itself",
    ),
    "one message": (lambda llm: llm.generate(CHAT[0]), "prompts is one message; give a list of them"),
    "a text among messages": (lambda llm: llm.chat([*CHAT, "a"]), "a chat with 'a' among its messages"),
    "a text as chat": (lambda llm: llm.chat("Hello!"), "where a chat is expected.*or texts to generate"),
    "texts as chats": (lambda llm: llm.chat(["Hello!"]), "where a chat is expected"),
    "none": (lambda llm: llm.generate(None), "prompt 0 is neither a text nor token ids nor a list of messages"),
    "bytes in a list": (lambda llm: llm.generate([[1.5]]), "give a list of integers"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "remedy"), CALLS.values(), ids=CALLS)
def test_a_call_with_something_else_says_what_to_give(
    llm: LLM, call: Callable[[LLM], object], remedy: str
) -> None:
    steps = llm.stats().num_steps
    with pytest.raises(TypeError, match=remedy):
        call(llm)
    assert (llm.stats().num_steps, llm.stats().held, llm.stats().num_waiting) == (steps, 0, 0)


def test_ids_out_of_range_are_an_invalid_prompt(llm: LLM) -> None:
    for ids in ([-1], [2**40], [2**70]):
        with pytest.raises(InvalidPrompt):
            llm.generate(ids)


def test_a_model_is_a_name_a_path_or_a_configuration() -> None:
    for model in (5, None, {"model": "m"}):
        with pytest.raises(
            TypeError, match="give a directory, an id on the Hugging Face hub or an EngineConfig"
        ):
            LLM(model)
    with pytest.raises(TypeError, match="'float16'; give a function"):
        LLM("m", "float16")


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: EngineConfig(mem_fraction="0.9"), r"--mem-fraction is '0.9'; give a share above 0"),
        (lambda: EngineConfig(max_num_seqs=2.5), "--max-num-seqs is 2.5; give a whole number of at least 1"),
        (lambda: EngineConfig(max_num_seqs=True), "--max-num-seqs is True; give a whole number of at least 1"),
        (lambda: EngineConfig(cuda_graphs=1), "--cuda-graphs is 1; give true or false"),
        (lambda: EngineConfig(model=Path("m")), "--model is .*give a text"),
        (lambda: EngineConfig(itl_target="fast"), "--itl-target is 'fast'; give seconds from 0"),
        (lambda: ServiceConfig(port="8000"), "--port is '8000'; give a whole number"),
        (lambda: ServiceConfig(api_key=["secret"]), r"--api-key is \['secret'\]; give texts"),
        (lambda: ServiceConfig(api_key="secret"), "--api-key is 'secret'; give texts"),
    ],
)  # fmt: skip
def test_a_setting_of_another_type_is_refused(make: Callable[[], object], remedy: str) -> None:
    with pytest.raises(InvalidConfig, match=remedy):
        make()


def test_a_whole_number_is_a_number() -> None:
    assert EngineConfig(mem_fraction=1).mem_fraction == 1
