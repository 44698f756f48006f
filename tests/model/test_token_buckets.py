"""The token buckets of prompt graphs: the choice by tables of times, what is measured, the shapes of each."""

import random
import re
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lightkv.integrations.model.fused_layers import fuse_layers
from lightkv.integrations.model.hf_model import bind
from lightkv.integrations.model.linears import Linears
from lightkv.integrations.weights.plain import PlainWeight
from lightkv.router import EngineConfig
from lightkv.router.model import token_buckets as module
from lightkv.router.model.build import assemble
from lightkv.router.model.step_graphs import StepGraphs, batch_sizes, graphs_bytes
from lightkv.router.model.token_buckets import (
    FEW_PREFILLS,
    MOST_TOKENS,
    candidates,
    choose,
    measure,
    most_buckets,
    prompt_shapes,
    token_buckets,
)
from tests.support.combinations import slow
from tests.support.tiny_models import tiny_llama

# Milliseconds of the products of an 8B model's layers: on an H200, beyond 2048 on an H100. Those of 1, 256 and
# 384 are made up.
HOPPER = {
    1: 5.0, 256: 8.0, 384: 10.0, 448: 15.4, 450: 11.4, 480: 11.7, 512: 10.9, 544: 13.7, 576: 14.0,
    608: 14.1, 640: 14.3, 700: 16.0, 704: 17.5, 736: 17.4, 768: 17.2, 800: 18.1, 832: 20.2,
    864: 19.3, 896: 20.3, 960: 21.4, 1024: 22.0, 1088: 23.9, 1152: 24.4, 1216: 27.2, 1280: 27.9,
    1300: 28.4, 1312: 29.2, 1344: 28.4, 1408: 30.3, 1472: 31.3, 1536: 30.6, 1600: 35.4, 1664: 35.4,
    1728: 40.8, 1792: 38.3, 1856: 42.0, 1920: 42.3, 1984: 42.8, 2048: 42.5,
    2112: 43.6, 2176: 45.1, 2240: 45.7, 2304: 45.9, 2368: 49.0, 2432: 49.0, 2496: 49.5, 2560: 50.0,
    2624: 55.8, 2688: 54.7, 2752: 54.0, 2816: 54.0, 2880: 58.3, 2944: 58.6, 3008: 59.9, 3072: 60.2,
    3136: 64.5, 3200: 65.7, 3264: 65.6, 3328: 65.5, 3392: 66.7, 3456: 66.4, 3520: 70.6, 3584: 71.7,
    3648: 71.6, 3712: 72.6, 3776: 73.2, 3840: 73.4, 3904: 77.2, 3968: 77.2, 4032: 77.2, 4096: 78.2,
    4100: 77.5, 4160: 80.6, 4224: 80.7, 4288: 86.3, 4352: 86.3,
}  # fmt: skip


def on_hopper(size: int) -> float:
    """The time of a size by the table, on a straight line between its neighbours there."""
    below = max(known for known in HOPPER if known <= size)
    above = min(known for known in HOPPER if known >= size)
    part = (size - below) / max(above - below, 1)
    return HOPPER[below] + part * (HOPPER[above] - HOPPER[below])


def smooth(size: int) -> float:
    return 4 + size * 0.02


def noisy(seed: int) -> Callable[[int], float]:
    """Smooth times and noise of up to half of them; some seeds give hardly any."""
    rng = random.Random(seed)
    noise = rng.choice([0.01, 0.05, 0.5])
    return lambda size: smooth(size) * (1 + noise * rng.random())


CURVES = [
    on_hopper,
    smooth,
    float,
    lambda size: 9.0,
    lambda size: 9.0 + size % 3,
    lambda size: 5000.0 - size,
    *map(noisy, range(20)),
]


def times_of(curve: Callable[[int], float], most: int = MOST_TOKENS) -> dict[int, float]:
    return {size: curve(size) for size in candidates(most)}


def fits_rule(size: int, smaller: int) -> bool:
    return 10 * size <= (15 if size <= 512 else 12) * smaller


@pytest.mark.parametrize(
    "most", [1, 15, 16, 64, 76, 193, 256, 257, 300, 511, 600, 1000, 2304, 2305, 2560, 3333, 10_000]
)
def test_buckets_grow_in_small_steps(most: int) -> None:
    for curve in CURVES:
        buckets = choose(times_of(curve, most))
        assert buckets[-1] == min(most, MOST_TOKENS)
        assert buckets == sorted(set(buckets))
        assert buckets[0] == min(most, 16)
        assert all(fits_rule(larger, size) for size, larger in pairwise(buckets))
        assert len(buckets) <= most_buckets(most)


def test_the_sizes_that_are_fast_on_hopper() -> None:
    buckets = choose(times_of(on_hopper))
    assert {512, 700, 768, 800, 1024, 1344, 1536, 1792, 2304, 2816, 3456, 4224} <= set(buckets)
    assert set(buckets) & {864, 896}
    assert not set(buckets) & {448, 704, 832, 1600, 2624, 2688, 3200}
    assert 20 <= sum(256 <= size <= 2304 for size in buckets) <= 26
    assert 10 <= sum(size > 2304 for size in buckets) <= 16


def test_a_little_noise_changes_little() -> None:
    rng = random.Random(0)
    for _ in range(20):
        buckets = choose(times_of(lambda size: on_hopper(size) * rng.uniform(0.997, 1.003)))
        assert {512, 700, 768, 1344, 1536, 1792, 2816, 3456, 4224} <= set(buckets)
        assert set(buckets) & {2300, 2304}
        assert not set(buckets) & {448, 704, 832, 1600, 2624, 2688, 3200}


def test_no_bucket_is_slower_than_a_larger_one() -> None:
    """Unless the limit on padding needs it. So no step is padded to a size slower than a larger one."""
    for curve in CURVES:
        times = times_of(curve)
        for smaller, size, larger in zip(buckets := choose(times), buckets[1:], buckets[2:], strict=False):
            if size in times:
                assert times[size] < times[larger] or not fits_rule(larger, smaller)


def test_a_slow_size_is_left_out_and_a_fast_one_taken() -> None:
    times, buckets = times_of(smooth), choose(times_of(smooth))
    for size in buckets[10:-1]:
        assert size not in choose(times | {size: 1.1 * times[size]})
    for size in set(times) - set(buckets):
        assert size in choose(times | {size: 0.9 * times[size]})


@pytest.mark.parametrize("chunk", [256, 300, 1000, 2047, 2048, 3333, 4096])
def test_the_chunk_of_long_prompts_is_never_padded(chunk: int) -> None:
    assert set(candidates(chunk + 256, chunk)) - set(candidates(chunk + 256)) <= {chunk}
    for curve in CURVES[:8]:
        times = {size: curve(size) for size in candidates(chunk + 256, chunk)}
        slow = times | {chunk: 2 * max(times.values())}
        for found in (choose(times, chunk), choose(slow, chunk)):
            assert chunk in found
            assert all(fits_rule(larger, size) for size, larger in pairwise(found))
            assert len(found) <= most_buckets(chunk + 256)
    assert (
        choose(times_of(on_hopper), 100) == choose(times_of(on_hopper), 2305) == choose(times_of(on_hopper))
    )


def test_sizes_that_save_nothing_are_few() -> None:
    assert len(choose(times_of(lambda size: 9.0, 2304))) <= 20
    assert len(choose(times_of(smooth))) > 28


@pytest.mark.parametrize("seed", range(3))
def test_the_choice_is_the_cheapest_of_all(seed: int) -> None:
    times = times_of(noisy(seed), 512)
    sizes = sorted(times)

    def cost(chosen: tuple[int, ...]) -> float:
        lost, before = 0.0, 192
        for size in sizes:
            bucket = min(one for one in chosen if one >= size)
            best = min(times[one] for one in sizes if one >= size)
            lost += (size - before) * (times[bucket] / best - 1) ** 2
            before = size
        return lost + len(chosen) * module._BUCKET_COST

    sets = [(*some, 512) for num in range(len(sizes)) for some in combinations(sizes[:-1], num)]
    allowed = [one for one in sets if all(fits_rule(*pair[::-1]) for pair in pairwise((192, *one)))]
    large = tuple(size for size in choose(times) if size >= 256)
    assert cost(large) == pytest.approx(min(map(cost, allowed)))


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, *slow(7, 48, 256)])
def test_a_shape_fits_every_step(max_num_seqs: int) -> None:
    """Padded to at most 1.5 times its tokens, above 512 to at most 1.2 times; a step of few prompts even to the
    next bucket, without slots for decodes if it has none."""
    for curve in CURVES:
        sizes = choose(times_of(curve, 2200))
        buckets = prompt_shapes(sizes, max_num_seqs)
        assert list(buckets) == sizes
        shapes = [shape for shapes in buckets.values() for shape in shapes]
        for size, smaller in zip(buckets, [0, *buckets], strict=False):
            assert all(shape.num_tokens == size for shape in buckets[size])
            for num_prefills in range(1, min(size, max_num_seqs) + 1):
                for num_decodes in {0, min(size, max_num_seqs) - num_prefills}:
                    shape = next(
                        shape for shape in shapes if shape.fits(smaller + 1, num_prefills, num_decodes)
                    )
                    assert shape.num_tokens == size or fits_rule(shape.num_tokens, smaller)
                    if num_prefills < FEW_PREFILLS:
                        assert shape.num_tokens == size
                        assert num_decodes or not shape.num_decodes
        assert not any(shape.fits(2201, 1, 0) for shape in shapes)


def test_there_are_not_too_many_graphs() -> None:
    for curve in CURVES:
        shapes = prompt_shapes(choose(times_of(curve)), 256).values()
        assert sum(map(len, shapes)) <= 123
    assert sum(map(len, prompt_shapes(choose(times_of(on_hopper)), 256).values())) <= 115


def test_the_memory_to_keep_does_not_depend_on_times() -> None:
    """Every choice has room: at most three shapes a bucket, and two of them also with shared prefixes."""
    for most in (20, 300, 2304, 4352):
        few, many = graphs_bytes(1, most, 0, 0, 0), graphs_bytes(256, most, 0, 0, 0)
        for curve in CURVES:
            buckets = prompt_shapes(choose(times_of(curve, most)), 256)
            shapes = [shape for shapes in buckets.values() for shape in shapes]
            num_graphs = len(shapes) + sum(shape.num_decodes > 0 for shape in shapes)
            assert num_graphs << 21 <= few < many
    assert graphs_bytes(1, 10_000, 7, 0, 0) - graphs_bytes(1, 10_000, 0, 0, 0) == 7 * MOST_TOKENS


@pytest.mark.parametrize("fused", [True, False])
def test_the_layers_that_see_every_token(fused: bool) -> None:
    model = tiny_llama(torch.device("cpu"))
    bind(model)
    linears = fuse_layers(model, lambda line: None).linears if fused else Linears(model)
    by_shape = {
        tuple(same[0].shape): len(same)
        for same in linears.by_shape()
        if len({one.dense().data_ptr() for one in same}) == len(same)
    }
    if fused:
        assert by_shape == {(160, 48): 2, (48, 96): 2, (128, 48): 2, (48, 64): 2}
    else:
        assert by_shape == {(96, 48): 2, (32, 48): 4, (48, 96): 2, (64, 48): 4, (48, 64): 2}


def test_experts_are_no_linear_layers() -> None:
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    shapes = {tuple(same[0].shape) for same in Linears(Qwen3MoeForCausalLM(config)).by_shape()}
    assert {(32, 32), (16, 32)} <= shapes
    assert not any(24 in shape for shape in shapes)


class Clock:
    """Makes events whose time passes as its layers compute: by the tokens, and ten times as long at first."""

    def __init__(self, num_slow: int) -> None:
        self.now = 0.0
        self.num_slow = num_slow
        self.num_synchronised = 0
        self.seen: list[tuple[PlainWeight, int]] = []

    def watch(self, rows: int, columns: int, per_token: float) -> PlainWeight:
        clock = self

        class Watched(PlainWeight):
            def matmul(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
                clock.seen.append((self, x.shape[1]))
                clock.now += per_token * x.shape[1] * (10 if len(clock.seen) <= clock.num_slow else 1)
                return super().matmul(x, out)

        return Watched(torch.randn(rows, columns), None)

    def event(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self) -> None:
        self.at = self.clock.now

    def synchronize(self) -> None:
        self.clock.num_synchronised += 1

    def elapsed_time(self, other: "Event") -> float:
        return other.at - self.at


def test_every_size_is_measured_with_every_kind_of_layer() -> None:
    clock = Clock(num_slow=6)  # the first turn
    wide = [clock.watch(3, 5, 2.0) for _ in range(3)]
    narrow = [clock.watch(4, 2, 0.5)]
    times = measure([wide, narrow], [1, 2, 7], clock.event)
    assert times == pytest.approx({size: size * (3 * 2.0 + 0.5) for size in (1, 2, 7)})
    assert clock.num_synchronised == 1
    sizes = [size for layer, size in clock.seen if layer is narrow[0]]
    assert sizes == [7, 2, 1, 1, 2, 7] * 2
    used = [layer for layer, _ in clock.seen if layer is not narrow[0]]
    assert all(used[i] is wide[i % 3] for i in range(12))


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measurements are kept for a GPU that this machine need not have."""
    pytest.importorskip("triton", exc_type=ImportError)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def test_what_is_measured_is_told(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, lines, measured = [[PlainWeight(torch.randn(2, 2), None)]], list[str](), list[list[int]]()

    def fake(layers: object, sizes: list[int]) -> dict[int, float]:
        measured.append(sizes)
        return {size: on_hopper(size) for size in sizes}

    monkeypatch.setattr(module, "measure", fake)
    assert token_buckets(layers, 0, 5000, lines.append) == choose(times_of(on_hopper))
    assert measured == [candidates(4352)]
    assert re.fullmatch(
        r"prompt graphs for 45 sizes, measured in [\d.]+ s: 16, 24, .*, 4352 tokens", lines[0]
    )
    assert token_buckets(layers, 0, 5000, lines.append) == choose(times_of(on_hopper))
    assert ", measured in an earlier start: 16, 24, " in lines.pop()
    assert token_buckets([], 0, 5000, lines.append) == choose(times_of(float))
    assert token_buckets(layers, 0, 100, lines.append) == [16, 24, 32, 48, 64, 96, 100]
    assert lines[2] == "prompt graphs for 7 sizes, not measured: 16, 24, 32, 48, 64, 96, 100 tokens"
    assert len(measured) == 1


def test_without_graphs_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure", None)
    lines: list[str] = []
    config = EngineConfig(device="cpu", max_total_tokens=900, max_num_seqs=4, prefill_chunk=600)
    assemble(tiny_llama(torch.device("cpu")), config, lines.append)
    assert not any(line.startswith("prompt graphs") for line in lines)


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    """Each size has a time, the memory is as before, and the graphs are those of the sizes that are told."""
    model = tiny_llama(torch.device("cuda"), context=700)
    lines: list[str] = []
    config = EngineConfig(
        device="cuda", max_total_tokens=2500, max_num_seqs=20, prefill_chunk=600, itl_target=0.0
    )
    runner, info = assemble(model, config, lines.append)
    assert isinstance(runner._graphs, StepGraphs)
    buckets, most = list(runner._graphs._prompts), info.limits.max_step_tokens
    (line,) = [line for line in lines if line.startswith("prompt graphs for ")]
    assert line.startswith(f"prompt graphs for {len(buckets)} sizes, measured in ")
    assert buckets[-1] == most
    assert 600 in buckets
    assert set(buckets) - set(candidates(most, 600)) == {16, 24, 32, 48, 64, 96, 128, 192}
    assert all(fits_rule(larger, size) for size, larger in pairwise(buckets))
    layers = Linears(model).by_shape()
    before = torch.cuda.memory_allocated()
    times = measure(layers, candidates(most))
    assert torch.cuda.memory_allocated() == before
    assert list(times) == candidates(most)
    assert all(0 < milliseconds < 1000 for milliseconds in times.values())


def test_experts_in_a_list_are_left_out() -> None:
    layer = nn.Module()
    layer.attention = nn.Linear(8, 8, bias=False)
    layer.attention.layer_idx = 0
    layer.experts = nn.ModuleList([nn.Linear(8, 32), nn.Linear(8, 32)])
    model = nn.Module()
    model.layers = nn.ModuleList([layer])
    assert [[one.shape for one in same] for same in Linears(model).by_shape()] == [[(8, 8)]]


def test_a_device_without_memory_measures_nothing(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(module, "measure", fails)
    lines: list[str] = []
    buckets = token_buckets([[PlainWeight(torch.randn(4, 4), None)]], 0, 600, lines.append)
    assert buckets == token_buckets([], 0, 600, lines.append)
    assert "not measured, for lack of memory" in lines[0]


def test_the_memory_to_keep_has_room_for_the_graphs_of_rows_with_grammars() -> None:
    """Each size of decode batches has up to eight graphs, and the masks are kept once."""
    sizes = len(batch_sizes(256))
    least = graphs_bytes(256, 20, 0, 0, 0) - graphs_bytes(1, 20, 0, 0, 0)
    assert least >= (8 * (sizes - 1)) << 21
    vocab_size = 128_000
    logits = graphs_bytes(256, 20, 0, 4 * vocab_size, 0) - graphs_bytes(256, 20, 0, 0, 0)
    assert logits >= 256 * (5 * 4 * vocab_size + vocab_size // 8)
