"""Compares `prefill_hopper` with the reference, element by element, on a GPU that has it, and checks when it
runs.

The caches are those of `test_decode_attention`: shuffled slots, NaN in all free slots.
"""

import pytest
import torch
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, HeadShape, PagedKV
from lightkv.triton_kernels.attention.prefill import prefill_attention as prefill_module
from lightkv.triton_kernels.attention.prefill import prefill_tuning
from lightkv.triton_kernels.attention.prefill.prefill_attention import (
    _hopper,
    _hopper_launch,
    prefill_attention,
    prefill_attention_reference,
)
from lightkv.triton_kernels.attention.prefill.prefill_plan import PrefillPlan, prefill_plan
from lightkv.triton_kernels.attention.variants import Alibi, SinkLogits, Softcap, TreeMask, ValueMask, Window
from lightkv.triton_kernels.attention.variants.variant import Variant, limits
from tests.support.attention.caches import assert_close, poisoned_cache, starts
from tests.support.attention.log_sum_exps import lse_reference

H200 = tuning.DeviceClass(num_multiprocessors=132, shared_memory=232448, major=9)
A100 = H200._replace(major=8)
SMALL_TILES = tuning.Launch(64, 64, 4, 3)

# (queries, tokens before them) of each request
RAGGED = [(300, 0), (37, 512), (0, 9), (64, 0), (333, 1300), (18, 3000), (1, 127), (0, 0), (128, 128)]


class Case:
    """Queries of some requests over a cache; three queries after the last request belong to none."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        *,
        group: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 128,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        out_dtype: torch.dtype | None = None,
        shift: int = 0,
        window: int = 0,
        softcap: float = 0.0,
        sink_logits: Tensor | None = None,
    ) -> None:
        value_dim = value_dim or head_dim
        self.options = AttentionOptions().plus(
            Window(window) if window else None,
            Softcap(softcap) if softcap else None,
            None if sink_logits is None else SinkLogits(sink_logits),
        )
        self.cache = poisoned_cache(
            [max(q_len + prefix, 0) for q_len, prefix in sequences],
            device="cuda",
            dtype=dtype,
            num_kv_heads=num_kv_heads,
            key_dim=head_dim,
            value_dim=value_dim,
            shift=shift,
        )
        q_lens = [q_len for q_len, _ in sequences]
        self.num_queries = sum(q_lens)
        self.q = torch.randn(self.num_queries + 3, group * num_kv_heads, head_dim).to("cuda", dtype)
        self.out = self.q.new_empty((*self.q.shape[:2], value_dim), dtype=out_dtype)
        self.lse = torch.empty(self.q.shape[:2], device="cuda")
        self.q_starts = starts(q_lens, "cuda")

    def plan(self, launch: tuning.Launch | None = None) -> PrefillPlan:
        """Makes a plan with tiles as high as those of `launch`, by default those of `prefill_hopper`."""
        launch = launch or prefill_tuning.hopper_prefill_launch(H200, self.q.shape[2], self.out.shape[2], 2)
        return prefill_plan(
            self.cache.rows,
            self.q_starts,
            self.cache.lengths,
            HeadShape.of(self.q, self.cache.kv),
            num_tokens=len(self.q),
            dtype=self.q.dtype,
            limits=limits(self.options.variants),
            launch=launch,
        )

    @property
    def args(self) -> tuple[Tensor, PagedKV, Tensor, Tensor, Tensor, AttentionOptions]:
        cache = self.cache
        return self.q, cache.kv, cache.rows, self.q_starts, cache.lengths, self.options

    def run(self, plan: PrefillPlan, *, lse: bool = True) -> None:
        self.out.fill_(torch.nan)
        self.lse.fill_(torch.nan)
        prefill_attention(*self.args, plan=plan, out=self.out, lse=self.lse if lse else None)

    def check(self, *, lse: bool = True) -> None:
        n = self.num_queries
        assert_close(self.out[:n].to(self.q.dtype), prefill_attention_reference(*self.args)[:n])
        assert self.out[n:].isnan().all()
        if lse:
            assert_close(self.lse[:n], lse_reference(*self.args)[:n])
            assert self.lse[n:].isnan().all()


def test_devices_and_shapes_it_is_used_for() -> None:
    for dim, value_dim in ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)):
        launch = prefill_tuning.hopper_prefill_launch(H200, dim, value_dim, 2)
        assert launch is not None
        tiles_size = launch.block_m * dim + launch.num_stages * launch.block_n * (dim + value_dim)
        assert 2 * tiles_size + 1024 <= H200.shared_memory
        # A plan has Hopper's tiles, however few there are: then their keys are shared out.
        for num_requests, num_rows in ((1, 65536), (1, 4), (64, 64 * 8 * 4)):
            tiles = prefill_tuning.prefill_launch(H200, num_requests, 8, num_rows, dim, value_dim, 2)
            assert tiles.block_m == launch.block_m
            shares = prefill_tuning.prefill_shares(H200, tiles, 8)
            assert shares.num_workers == 16
            assert shares.unit % launch.block_n == 0
    for device, key_dim, value_dim, size in [
        (A100, 128, 128, 2),
        (H200._replace(major=10), 128, 128, 2),
        (H200, 128, 64, 2),
        (H200, 112, 112, 2),
        (H200, 128, 128, 4),
    ]:
        assert prefill_tuning.hopper_prefill_launch(device, key_dim, value_dim, size) is None
    assert prefill_tuning.prefill_launch(A100, 1, 8, 512 * 4, 128, 128, 2).block_m < 128
    assert prefill_tuning.prefill_launch(H200, 1, 8, 64 * 4, 112, 112, 2).block_m < 128


def test_only_where_it_can_copy_16_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = pytest.importorskip("lightkv.triton_kernels.attention.prefill.hopper.prefill_hopper")
    monkeypatch.setattr(prefill_module, "_hopper", lambda: hopper)
    monkeypatch.setattr(tuning, "device_class", lambda _: H200)
    q, k, v, out = torch.empty(4, 5, 8, 128, dtype=torch.float16)
    tree, values = TreeMask(torch.zeros(5, 1, dtype=torch.int32)), ValueMask(torch.zeros(5, 12))
    launch, index = prefill_tuning.hopper_prefill_launch(H200, 128, 128, 2), torch.zeros(1, 1).int()

    def launched(q: Tensor, k: Tensor, v: Tensor, out: Tensor, variants: tuple[Variant, ...]) -> object:
        return _hopper_launch(q, PagedKV(k, v, index), out, AttentionOptions(variants=variants), 128)

    assert launched(q, k, v, out, ()) == (hopper, launch)
    assert launched(q, k, v, out.float(), ()) is not None
    assert launched(q, k.bfloat16(), v, out, ()) is None
    assert launched(q, k, v, out, (Softcap(3.0), tree)) is not None
    assert launched(q, k, v, out, (Softcap(3.0), values)) == (hopper, launch)
    for mask in (
        ValueMask(torch.zeros(5, 9)),  # rows of 36 bytes
        ValueMask(torch.zeros(5, 16, dtype=torch.bool)[:, 1:]),  # begins in the middle of 16 bytes
        ValueMask(torch.zeros(8, 5, 2).bool()),
        ValueMask(values.values, torch.zeros(1, dtype=torch.int32)),  # a column for each request
    ):
        assert launched(q, k, v, out, (mask,)) is None
    assert launched(q, k, v, out, (Alibi(torch.ones(8)), values)) is None
    wide = torch.empty(5, 8, 136, dtype=torch.float16)
    assert launched(wide[..., :128], k, v, out, ()) is None  # strides of 136
    shifted = torch.empty(5 * 8 * 128 + 1, dtype=torch.float16)[1:].view(5, 8, 128)
    assert launched(q, k, shifted, out, ()) is None


def test_alibi_takes_a_stage_only_where_the_product_adds_it() -> None:
    hopper = pytest.importorskip("lightkv.triton_kernels.attention.prefill.hopper.prefill_hopper")
    launch, alibi = prefill_tuning.hopper_prefill_launch(H200, 128, 128, 2), Alibi(torch.ones(8))
    for variants, stages in ((), 3), ((alibi,), 2), ((Softcap(3.0), alibi), 3):
        assert hopper._stages_of(variants, H200, launch, (128, 128)).keys == stages


def test_pieces_of_head_dims() -> None:
    tiles = pytest.importorskip("lightkv.triton_kernels.attention.prefill.hopper.prefill_hopper_tiles")

    def widths(dim: int) -> list[int]:
        return [tiles.piece_width(dim, piece) for piece in range(tiles.num_pieces(dim))]

    assert [widths(dim) for dim in (64, 80, 96)] == [[64], [64, 16], [64, 32]]
    assert [widths(dim) for dim in (128, 192, 256)] == [[128], [128, 64], [256]]
    for dim in range(16, 257, 8):
        for value_dim in range(16, 257, 8):
            if prefill_tuning.hopper_prefill_launch(H200, dim, value_dim, 2):
                assert widths(dim)[: len(widths(value_dim))] == widths(value_dim)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about the interpreter")
def test_never_in_the_interpreter() -> None:
    assert _hopper() is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("group", "head_dim", "shift"),
    [
        (4, 128, 0),
        (1, 64, 0),
        (7, 64, 4),
        (8, 128, 31),
        (7, 128, 0),
        (1, 128, 4),
        (8, 64, 0),
        (4, 64, 31),
        (4, 256, 0),
    ],
    ids=str,
)
def test_ragged_batches(group: int, head_dim: int, shift: int) -> None:
    torch.manual_seed(group)
    case = Case(RAGGED, group=group, head_dim=head_dim, shift=shift)
    plan = case.plan()
    case.run(plan)
    case.check()
    case.run(plan)  # a run leaves the plan as it was
    case.check()
    assert not plan.counters[:2].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "group", "shift"),
    [
        (80, 80, 1, 0),
        (80, 80, 4, 4),
        (80, 80, 16, 0),
        (96, 96, 1, 4),
        (96, 96, 4, 0),
        (96, 96, 7, 31),
        (192, 128, 1, 0),
        (192, 128, 8, 4),
    ],
    ids=str,
)
def test_head_dims_of_several_pieces(
    head_dim: int, value_dim: int, group: int, shift: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(head_dim + group)
    sizes = {"head_dim": head_dim, "value_dim": value_dim, "group": group, "shift": shift, "dtype": dtype}
    case = Case(RAGGED, **sizes)
    case.run(case.plan())
    case.check()
    first = case.out[: case.num_queries].clone()
    for _ in range(5):
        case.run(case.plan(), lse=False)
        assert torch.equal(case.out[: case.num_queries], first)


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "softcap"), [(100, 0.0), (1000, 20.0), (0, 20.0)], ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(80, 80), (96, 96), (192, 128)], ids=str)
def test_options_at_head_dims_of_several_pieces(
    head_dim: int, value_dim: int, window: int, softcap: float
) -> None:
    torch.manual_seed(window)
    sinks = torch.linspace(-2.0, 5.0, 8, device="cuda")
    dims = {"head_dim": head_dim, "value_dim": value_dim}
    case = Case(RAGGED, window=window, softcap=softcap, sink_logits=sinks, **dims)
    case.run(case.plan())
    case.check()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 100, 1000], ids="window{}".format)
@pytest.mark.parametrize("softcap", [0.0, 20.0], ids="cap{}".format)
def test_window_and_softcap(window: int, softcap: float) -> None:
    torch.manual_seed(window)
    case = Case(RAGGED, window=window, softcap=softcap)
    case.run(case.plan())
    case.check()


@pytest.mark.gpu
def test_a_window_reads_nothing_before_it() -> None:
    torch.manual_seed(1)
    case = Case([(200, 700)], num_kv_heads=1, window=100)
    kv, rows, _ = case.cache
    k_cache, v_cache, index = kv[:3]
    gone = index[rows[0], : 700 - 100 + 1].long()
    expected = prefill_attention_reference(*case.args)
    k_cache[gone] = torch.nan
    v_cache[gone] = torch.nan
    index[rows[0], : 700 - 100 + 1] = -(2**30)
    case.run(case.plan(), lse=False)
    assert_close(case.out[: case.num_queries], expected[: case.num_queries])


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32], ids=str)
def test_float16_and_what_is_written(out_dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    case = Case(RAGGED, head_dim=64, dtype=torch.float16, out_dtype=out_dtype)
    case.run(case.plan())
    case.check()


@pytest.mark.gpu
def test_more_queries_than_tokens() -> None:
    torch.manual_seed(3)
    case = Case([(200, -100), (64, -64), (90, -1), (40, 300)])
    case.run(case.plan())
    case.check()
    assert not case.out[:100].any()
    assert (case.lse[:100] == -torch.inf).all()


@pytest.mark.gpu
def test_strides_of_their_own() -> None:
    torch.manual_seed(4)
    case = Case(RAGGED)
    case.q = torch.stack((case.q, case.q.flip(0)), 1).flatten(1, 2)[:, :8]  # as in a fused QKV
    case.out = torch.empty(len(case.q), 16, 128, dtype=torch.bfloat16, device="cuda")[:, ::2]
    assert not case.q.is_contiguous()
    case.run(case.plan())
    case.check()


@pytest.mark.gpu
@pytest.mark.parametrize("launch", [None, SMALL_TILES], ids=["hopper", "general"])
def test_captured_with_its_plan_and_the_same_bits_each_time(launch: tuning.Launch | None) -> None:
    torch.manual_seed(5)
    case = Case([(700, 0), (80, 900), (300, 400)], num_kv_heads=8)
    case.run(case.plan(launch))  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(case.plan(launch))
    case.q_starts.copy_(starts([400, 7, 600], "cuda"))
    case.num_queries = 1007
    case.cache.lengths.copy_(torch.tensor([500, 600, 700], dtype=torch.int32))
    graph.replay()
    case.check()
    out, lse = case.out.clone(), case.lse.clone()
    for _ in range(5):
        graph.replay()
        assert torch.equal(case.out.nan_to_num(), out.nan_to_num())
        assert torch.equal(case.lse.nan_to_num(), lse.nan_to_num())


@pytest.mark.gpu
def test_many_more_items_than_programs_many_times() -> None:
    torch.manual_seed(6)
    case = Case([(900, 100 * i) for i in range(8)], num_kv_heads=8)
    plan = case.plan()
    case.run(plan)
    case.check()
    first = case.out[: case.num_queries].clone()
    for _ in range(20):
        case.run(plan, lse=False)
        assert torch.equal(case.out[: case.num_queries], first)


@pytest.mark.gpu
def test_never_synchronises() -> None:
    case = Case([(300, 20), (64, 7)])
    plan = case.plan()
    case.run(plan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_prefill_attention_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if tuning.device_class(torch.device("cuda")).major != 9:
        q, k, v, out = torch.empty(4, 5, 8, 128, dtype=torch.float16, device="cuda")
        assert (
            _hopper_launch(
                q, PagedKV(k, v, k.new_zeros(1, 1, dtype=torch.int32)), out, AttentionOptions(), 128
            )
            is None
        )
        return
    hopper = _hopper()
    assert hopper is not None
    calls = []
    launch_hopper_prefill = hopper.launch_hopper_prefill
    monkeypatch.setattr(
        hopper,
        "launch_hopper_prefill",
        lambda *args, **kw: (calls.append(1), launch_hopper_prefill(*args, **kw)),
    )
    case = Case(RAGGED)
    case.run(case.plan())
    assert len(calls) == 1
    case.check()
    case.run(case.plan(SMALL_TILES))
    assert len(calls) == 1
    case.check()
    for head_dim, value_dim in ((80, 80), (96, 96), (192, 128)):
        case = Case(RAGGED, head_dim=head_dim, value_dim=value_dim)
        before = len(calls)
        case.run(case.plan())
        assert len(calls) == before + 1
