"""A model on several ranks answers, token for token, as it does on one. Ranks listen on this machine alone."""

import os
import random
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.common.quantised_checkpoint import save_mxfp4, save_quantised
from lightkv.errors import UnsupportedModel
from lightkv.integrations.ranks.group import RankGroup
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.estimates import OutputLengths
from lightkv.router.engine.loop import LocalEngine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.model.build import build_runner
from lightkv.router.model.info import model_info
from lightkv.router.model.loader import load_model
from lightkv.router.simulate.admissions import SimulatedAdmission, make_simulated
from tests.support.combinations import slow_cases
from tests.support.ranks import run_ranks
from tests.support.tiny_architectures import VOCABULARY, random_weights, tiny
from tests.support.tiny_files import save_tiny
from tests.support.tiny_wrappers import whole_wrapper
from tests.support.windowed_models import FAMILIES as WINDOWED
from tests.support.windowed_models import LONG, NUM_NEW, expected, request, run_all, text


def answers(
    ranks: RankGroup | None, directory: str, settings: dict[str, Any], top_k: int = 0
) -> tuple[Any, ...]:
    """Runs requests with shared prefixes, chunks and sampling, of the `top_k` likeliest tokens unless it is 0;
    returns tokens, free counts and the report."""
    config = EngineConfig(
        model=directory, device="cpu", dtype="float32", prefill_chunk=16, max_total_tokens=200, **settings
    )
    lines: list[str] = []
    runner, info = build_runner(config, lines.append, ranks=ranks)
    engine = LocalEngine(make_scheduler(info), runner)
    rng = random.Random(5)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(20)]
    for i in range(8):
        prompt = shared[: rng.randint(0, 20)]
        prompt += [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 12))]
        temperature = 0.0 if i % 2 else 0.9
        params = SamplingParams(max_tokens=12, temperature=temperature, top_k=top_k, ignore_eos=True)
        engine.add(Request(str(i), array("i", prompt).tobytes(), params, seed=i))
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            if event.token is not None:
                tokens.setdefault(event.request_id, []).append(event.token)
    engine.check()
    return tokens, info.capacity, info.bytes_per_token, lines


def life(ranks: RankGroup | None, directory: str, num_edits: int) -> tuple[list[int], list[bytes], int]:
    """Runs requests that come and are aborted at random, in a pool that is too small for their estimates, until
    the memory has had so many edits. Returns the tokens drawn, digests of the tables on the way, and how often
    a request was preempted."""
    config = EngineConfig(
        model=directory, device="cpu", dtype="float32", prefill_chunk=16, max_total_tokens=150
    )
    runner, info = build_runner(config, lambda line: None, ranks=ranks)
    engine = LocalEngine(make_scheduler(info, make_simulated("quantile", 0, 0)), runner)
    memory, edits = runner._parts.memory, 0
    apply = memory.apply_step

    def counted(given: Any, *kept: Any) -> Any:
        nonlocal edits
        edits += len(given)
        return apply(given, *kept)

    memory.apply_step = counted  # type: ignore[method-assign]
    rng, number, tokens, digests = random.Random(8), 0, list[int](), list[bytes]()
    shared = [rng.randrange(3, VOCABULARY) for _ in range(20)]
    while edits < num_edits:
        if engine.stats().num_running + engine.stats().num_waiting < 6:
            prompt = shared[: rng.randint(0, 20)]
            prompt += [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 20))]
            params = SamplingParams(
                max_tokens=rng.randint(1, 70), temperature=rng.choice((0.0, 1.0)), ignore_eos=True
            )
            engine.add(Request(str(number), array("i", prompt).tobytes(), params, seed=number))
            number += 1
        if rng.random() < 0.02:
            engine.abort(str(number - rng.randint(1, 6)))
        tokens += [event.token for event in engine.step() if event.token is not None]
        if rng.random() < 0.05:
            digests.append(runner.digest())
    return tokens, digests, engine.stats().num_preemptions


@pytest.mark.slow  # the layer groups below compare tables, too
@pytest.mark.timeout(900)  # the long one takes five minutes beside other tests
@pytest.mark.parametrize("num_edits", [60, 20_000])
def test_tables_stay_the_same_bytes_on_all_ranks(num_edits: int, tmp_path: Path) -> None:
    random_weights(tiny("llama")).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    expected = life(None, str(tmp_path), num_edits)
    assert expected[2] > 0 or num_edits < 1_000, "no request was preempted"
    assert all(found == expected for found in run_ranks(2, life, str(tmp_path), num_edits))


FAMILIES = ["llama", "qwen3_moe", "gemma3_text", "gpt_oss", "olmo2", "phi3", "glm", "cohere2"]


@pytest.mark.slow  # the layer groups and the quantised weights below run on two ranks in `make test`
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_one_rank(family: str, size: int, tmp_path: Path) -> None:
    """Requests with shared prefixes, in chunks, greedy and drawn, on models with experts, windows, sinks, norms
    of all heads, one weight for gate and up, and fewer K/V heads than ranks. The padding token is the
    vocabulary's last, so that no other rank than the last has it."""
    model = random_weights(tiny(family))
    model.config.pad_token_id = VOCABULARY - 1
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    expected, capacity, num_bytes, _ = answers(None, str(tmp_path), {})
    for tokens, rank_capacity, rank_bytes, lines in run_ranks(size, answers, str(tmp_path), {}):
        assert tokens == expected
        assert rank_capacity == capacity
        # olmo2 normalises all heads together and phi3 has one weight for them: their ranks have all heads.
        assert rank_bytes == (num_bytes if family in ("olmo2", "phi3") else num_bytes // 2)
        assert lines


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_the_text_half_of_a_wrapper_has_the_tokens_of_one_rank(family: str, tmp_path: Path) -> None:
    whole_wrapper(family).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    expected, capacity, num_bytes, _ = answers(None, str(tmp_path), {})
    for tokens, rank_capacity, rank_bytes, _ in run_ranks(2, answers, str(tmp_path), {}):
        assert (tokens, rank_capacity, rank_bytes) == (expected, capacity, num_bytes // 2)


# Beside a long text: prompts that leave it in its middle and shortly before its end, and one that is longer.
SHARING = [LONG[:57] + text(30, 1), LONG[:76] + text(12, 2), LONG + text(9, 3)]


def shared_windows(
    ranks: RankGroup | None, directory: str, pool: int
) -> tuple[list[list[int]], list[int], int, list[bytes]]:
    """Runs a long prompt, and then others that hit a part of it, in chunks and in a pool of so many tokens,
    which is too small for all of them. Returns the answers, the tokens that each has hit, the number of
    preemptions, and digests of the tables."""
    config = EngineConfig(
        model=directory,
        device="cpu",
        dtype="float32",
        prefill_chunk=16,
        max_total_tokens=pool,
        max_num_seqs=6,
    )
    runner, info = build_runner(config, lambda line: None, ranks=ranks)
    assert not info.groups.is_uniform
    admission = SimulatedAdmission(OutputLengths(assumed=2), guarantees=False)
    engine = LocalEngine(make_scheduler(info, admission), runner)
    found, hits, digests = [], [], []
    for turn, prompts in enumerate(([LONG], SHARING)):
        requests = [request(f"{turn} {i}", prompt, 2 * NUM_NEW) for i, prompt in enumerate(prompts)]
        found += run_all(engine, requests)
        hits += [one.num_hit for one in requests]
        engine.check()
        digests.append(runner.digest())
    assert engine.stats().held == 0
    return found, hits, engine.stats().num_preemptions, digests


@pytest.mark.parametrize(
    ("family", "pool", "size"),
    [
        ("gpt-oss", 110, 2),
        pytest.param("gpt-oss", 110, 4, marks=pytest.mark.slow),
        *[pytest.param("gemma3", 56, size, marks=pytest.mark.slow) for size in (2, 4)],
    ],
)
def test_layer_groups_on_several_ranks(family: str, pool: int, size: int, tmp_path: Path) -> None:
    """Answers are transformers', with prefixes that are hit across windows, chunks and preemptions, and the
    tables of all ranks are those of one."""
    WINDOWED[family].model().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    own = expected(family, [LONG, *SHARING], 2 * NUM_NEW)
    alone = shared_windows(None, str(tmp_path), pool)
    answers, hits, num_preemptions, _ = alone
    assert answers == own
    assert sum(hit >= 57 for hit in hits) == 2
    assert num_preemptions > 0
    assert all(found == alone for found in run_ranks(size, shared_windows, str(tmp_path), pool))


@pytest.mark.parametrize(
    ("form", "family"), [("fp8", "qwen3_moe"), *slow_cases(("fp8", "olmo_hybrid"), ("awq", "llama"))]
)
def test_quantised_weights(tmp_path: Path, form: str, family: str) -> None:
    """Of sizes of which each rank has whole blocks."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 128}
    if family == "qwen3_moe":
        sizes |= {"moe_intermediate_size": 256, "mlp_only_layers": [0]}
    elif family == "olmo_hybrid":
        sizes |= {"layer_types": ["linear_attention", "full_attention"]}
        sizes |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    model = random_weights(tiny(family, fields={**sizes, "num_hidden_layers": 2}))
    save_quantised(model, tmp_path, form, ("lm_head", "gate", "a_proj", "b_proj"))
    (tmp_path / "tokenizer.json").touch()
    expected = answers(None, str(tmp_path), {})
    assert [found[0] for found in run_ranks(2, answers, str(tmp_path), {})] == [expected[0]] * 2


@pytest.mark.slow
def test_experts_that_are_stored_in_mxfp4(tmp_path: Path) -> None:
    """As gpt-oss' own checkpoints store them: a rank reads and unpacks its own ones."""
    save_mxfp4(random_weights(tiny("gpt_oss", fields={"intermediate_size": 64})), tmp_path)
    expected = answers(None, str(tmp_path), {})
    assert all(found[0] == expected[0] for found in run_ranks(2, answers, str(tmp_path), {}))


def static_scales(ranks: RankGroup, directory: str) -> list[Any]:
    """Returns the scales of K and V of each head that a rank has, in the last layer."""
    config = EngineConfig(directory, device="cpu", kv_dtype="fp8-static", max_total_tokens=40)
    runner, _ = build_runner(config, lambda line: None, ranks=ranks)
    scales = runner._parts.memory.pool.scales(1)
    assert scales is not None
    return scales[17].tolist()  # type: ignore[no-any-return]


def test_a_rank_has_the_scales_of_its_own_heads(tmp_path: Path) -> None:
    file = save_tiny(tmp_path) / "model.safetensors"
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([0.5, 2.0])}  # V has one for each head
    names = [(layer, name) for layer in (0, 1) for name in scales]
    more = {f"model.layers.{layer}.self_attn.{name}": scales[name].clone() for layer, name in names}
    save_file(load_file(file) | more, file, {"format": "pt"})
    assert run_ranks(2, static_scales, str(tmp_path)) == [[[0.5, 0.5]], [[0.5, 2.0]]]


@pytest.mark.slow
def test_the_default_model_on_three_ranks() -> None:
    """It has nine heads and three K/V heads. Most of its 49,152 tokens are less likely than sums are rounded
    by, so a draw among all of them may fall on another one."""
    found = run_ranks(3, answers, EngineConfig.model, {}, 20)
    expected = answers(None, EngineConfig.model, {}, 20)
    assert all(tokens == expected[0] for tokens, *_ in found)


def part(ranks: RankGroup, directory: str) -> tuple[int, int, int]:
    """Returns how many parameters a rank has, and the bytes of a token and of the pool in it."""
    config = EngineConfig(directory, device="cpu")
    model: Any = load_model(Path(directory), ranks.device, torch.float32, lambda line: None, ranks)
    _, info = build_runner(config, lambda line: None, ranks=ranks)
    return sum(one.numel() for one in model.parameters()), info.bytes_per_token, info.pool_bytes


@pytest.mark.slow
def test_info_tells_what_a_rank_has(tmp_path: Path) -> None:
    """The model's head is tied to its embedding, and most of its layers have windows."""
    random_weights(tiny("gemma3_text")).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    config = EngineConfig(str(tmp_path), device="cpu", tensor_parallel=2)
    told = model_info(config, tmp_path)
    found = told["num_parameters"], told["bytes_per_token"], told["pool_bytes"]
    assert run_ranks(2, part, str(tmp_path))[0] == found
    assert found[1] < model_info(replace(config, tensor_parallel=1), tmp_path)["bytes_per_token"]


@pytest.mark.parametrize(("family", "size"), [("llama", 3), ("gpt2", 2)])
def test_info_refuses_a_number_of_ranks_as_the_service_does(family: str, size: int, tmp_path: Path) -> None:
    random_weights(tiny(family)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(UnsupportedModel, match="divide"):
        model_info(EngineConfig(str(tmp_path), device="cpu", tensor_parallel=size), tmp_path)
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "size", "reason"),
    [
        ("llama", 3, "4 heads and 2 K/V heads cannot be divided among 3 ranks, but among 2, 4"),
        ("gpt2", 2, "transformers has no plan of how to divide its layers among ranks"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(
    family: str, size: int, reason: str, tmp_path: Path
) -> None:
    random_weights(tiny(family)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(AssertionError, match=reason):
        run_ranks(size, answers, str(tmp_path), {})


def addresses(ranks: RankGroup) -> tuple[set[str], str]:
    """Returns the addresses on which this process listens, in hexadecimal, and what NCCL is told."""
    assert ranks.smallest(ranks.rank) == 0  # they have connected
    sockets = {os.readlink(fd)[8:-1] for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()
    ]
    listening = {line[1].rpartition(":")[0] for line in lines if line[3] == "0A" and line[9] in sockets}
    return listening, os.environ["NCCL_SOCKET_IFNAME"]


def test_ranks_listen_on_the_loopback_interface_alone() -> None:
    assert run_ranks(2, addresses) == [({"0100007F"}, "lo")] * 2
