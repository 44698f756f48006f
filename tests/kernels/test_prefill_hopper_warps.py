"""Runs the kernels of `prefill_hopper` and `prefill_fp8_hopper` in Python, a thread in place of each warpgroup,
and compares them with the reference: which keys and rows they take, where they write, and that no barrier is
waited for in vain.

Gluon has no interpreter. Here its operations work on NumPy arrays, copies and products are done at once, and
barriers count arrivals as `mbarrier` does.
"""

import functools
import importlib
import random
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.attention_reference import slots_reference
from lightkv.triton_kernels.attention.lookups import TOKEN_TABLE
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, HeadShape
from lightkv.triton_kernels.attention.prefill import prefill_tuning
from lightkv.triton_kernels.attention.prefill.hopper.hopper_features import features_of
from lightkv.triton_kernels.attention.prefill.prefill_attention import prefill_attention_reference
from lightkv.triton_kernels.attention.prefill.prefill_combine import combine_tiles
from lightkv.triton_kernels.attention.prefill.prefill_plan import prefill_plan
from lightkv.triton_kernels.attention.records import Cache, Heads, Index, Outputs, Shape
from lightkv.triton_kernels.attention.variants import (
    Alibi,
    Chunk,
    SinkLogits,
    Softcap,
    TreeMask,
    ValueMask,
    Window,
)
from lightkv.triton_kernels.attention.variants.variant import limits
from tests.support.attention.caches import poisoned_cache, starts
from tests.support.attention.log_sum_exps import lse_reference
from tests.support.combinations import each_value, slow, slow_cases

skeleton = pytest.importorskip("lightkv.triton_kernels.attention.prefill.hopper.prefill_hopper_skeleton")
tiles = pytest.importorskip("lightkv.triton_kernels.attention.prefill.hopper.prefill_hopper_tiles")

_SHARED = ("hopper_scores", "hopper_slots", "hopper_values", "prefill_hopper_items", "prefill_hopper_tiles")
MODULES = {
    "prefill_hopper": (*_SHARED, "prefill_hopper_skeleton", "prefill_hopper"),
    "prefill_fp8_hopper": (*_SHARED, "prefill_hopper_skeleton", "prefill_fp8_tiles", "prefill_fp8_hopper"),
}
SECONDS = 20.0  # that a thread waits for a barrier before the test fails
KEYS, ROWS, STAGES = 16, 8, 2


class Array(np.ndarray):
    """An array with what Gluon's tensors have besides; scalars stay arrays."""

    def __array_wrap__(self, array: np.ndarray, context: Any = None, return_scalar: bool = False) -> "Array":
        return np.asarray(array).view(Array)

    def to(self, dtype: object) -> "Array":
        if dtype == "bfloat16":
            return array(torch.from_numpy(np.asarray(self, np.float32)).bfloat16().float().numpy())
        return self.astype(np.float32) if self.dtype == np.float16 else self

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)


def array(values: Any) -> Array:
    return np.asarray(values).view(Array)


def narrow(values: np.ndarray) -> Any:
    """Returns the type of values of a mask that are narrower than float32; None for all others."""
    return values.dtype.type if values.dtype in (np.uint8, np.float16) else None


class Pointer:
    """Addresses of elements of a tensor."""

    def __init__(self, memory: np.ndarray, offsets: Any = 0) -> None:
        self.memory, self.offsets = memory, array(offsets)
        self.dtype = types.SimpleNamespace(element_ty=narrow(memory))

    def __add__(self, offsets: Any) -> "Pointer":
        return Pointer(self.memory, self.offsets + offsets)

    def __getitem__(self, key: Any) -> "Pointer":
        return Pointer(self.memory, self.offsets[key])


class Shared:
    """A tensor in shared memory."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape = values, values.shape
        self.dtype = narrow(values) or types.SimpleNamespace(primitive_bitwidth=16)

    def index(self, i: Any) -> "Shared":
        return Shared(self.values[int(i)])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.values.transpose(order))

    def store(self, values: Any) -> None:
        self.values[...] = values

    def load(self, _layout: object) -> Array:
        return array(self.values.copy())


class Barrier:
    def __init__(self) -> None:
        self.count = self.pending = self.phase = 0
        self.changed = threading.Condition()

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, num: int = 1) -> None:
        time.sleep(random.random() * 1e-4)
        with self.changed:
            assert self.pending >= num, "more arrivals than the barrier counts"
            self.pending -= num
            if not self.pending:
                self.pending, self.phase = self.count, self.phase ^ 1
                self.changed.notify_all()

    def wait(self, phase: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase != int(phase), SECONDS), "waited in vain"


class Barriers:
    """A barrier for each stage."""

    def __init__(self, num: int) -> None:
        self.barriers = [Barrier() for _ in range(num)]
        self.shape = [num, 1]

    def index(self, i: Any) -> Barrier:
        return self.barriers[int(i)]


def load(pointer: Pointer, mask: Any = True, other: int = 0) -> Array:
    offsets = np.where(mask, pointer.offsets, 0)
    assert (offsets >= 0).all()
    return array(np.where(mask, pointer.memory[offsets], other))


def store(pointer: Pointer, values: Any, mask: Any = True) -> None:
    offsets, values, mask = np.broadcast_arrays(pointer.offsets, values, mask)
    pointer.memory[offsets[mask]] = values[mask]


LOCK = threading.Lock()


def atomic_add(pointer: Pointer, value: int, sem: str = "") -> Array:
    with LOCK:
        before = load(pointer).copy()
        store(pointer, before + value)
    return before


def product(a: Any, b: Shared, acc: Array, use_acc: bool = True, is_async: bool = False) -> Array:
    left = a.values if isinstance(a, Shared) else a
    return array((acc if use_acc else 0) + left @ b.values)


def allocate(dtype: object, shape: list[int], layout: object) -> Any:
    """Returns what Gluon's `allocate_shared_memory` would."""
    if layout == "barriers":
        return Barrier() if len(shape) == 1 else Barriers(shape[0])
    if dtype in (np.uint8, np.float16):
        return Shared(np.full(shape, 77, dtype))
    return Shared(np.zeros(shape, np.int64) if dtype == "int32" else np.full(shape, np.nan, np.float32))


def numpy_gluon(program: int, num_programs: int, kind: str = "prefill_hopper") -> dict[str, Any]:
    """Returns the globals of a module with a kernel, for a program: Gluon's names, on NumPy. Under "tasks" are
    the calls of the warpgroups that the kernel has started."""

    def ignored(*_: object, **__: object) -> None:
        return None

    def unchanged(values: Any, *_: object) -> Any:
        return values

    tasks: list[Callable[[], None]] = []

    def warp_specialize(calls: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: object) -> None:
        tasks.extend(functools.partial(function, *args) for function, args in calls)

    language = types.SimpleNamespace(
        program_id=lambda _: array(program),
        num_programs=lambda _: array(num_programs),
        load=load,
        store=store,
        atomic_add=atomic_add,
        arange=lambda begin, end, _layout=None: array(np.arange(begin, end)),
        full=lambda shape, value, _dtype, _layout=None: array(np.full(shape, value, np.result_type(value))),
        zeros=lambda shape, _dtype, _layout=None: array(np.zeros(shape, np.float32)),
        where=lambda *args: array(np.where(*args)),
        maximum=lambda a, b: array(np.maximum(a, b)),
        minimum=lambda a, b: array(np.minimum(a, b)),
        max=lambda a, axis: array(np.max(np.asarray(a), axis)),
        sum=lambda a, axis: array(np.sum(np.asarray(a), axis)),
        exp=np.exp,
        exp2=np.exp2,
        log2=np.log2,
        split=lambda pairs: (pairs[..., 0], pairs[..., 1]),
        join=lambda low, high: array(np.stack((low, high), -1)),
        cdiv=lambda a, b: array(-(-a // b)),
        convert_layout=unchanged,
        max_contiguous=unchanged,
        multiple_of=unchanged,
        static_range=range,
        warp_specialize=warp_specialize,
        allocate_shared_memory=allocate,
        **dict.fromkeys(
            (
                "SliceLayout",
                "BlockedLayout",
                "NVMMADistributedLayout",
                "NVMMASharedLayout",
                "SwizzledSharedLayout",
                "DotOperandLayout",
            ),
            ignored,
        ),
        int32="int32",
        bfloat16="bfloat16",
        uint16=np.uint16,
        **dict.fromkeys(("int1", "int64", "float32", "float8e4nv", "constexpr")),
    )

    def copy(target: Shared, source: Pointer) -> None:
        target.values[...] = load(source)

    def wait_products(_num: int, deps: list[Any]) -> Any:
        return deps[0] if len(deps) == 1 else tuple(deps)

    names: dict[str, Any] = {
        "gl": language,
        "mbarrier": types.SimpleNamespace(
            MBarrierLayout=lambda: "barriers", init=Barrier.init, wait=Barrier.wait, arrive=Barrier.arrive
        ),
        "async_copy": types.SimpleNamespace(
            async_copy_global_to_shared=copy,
            mbarrier_arrive=lambda barrier, increment_count: barrier.arrive(128),
        ),
        "warpgroup_mma": product,
        "warpgroup_mma_wait": wait_products,
        "fence_async_shared": ignored,
        "range": range,
        "_row_pieces": ignored,
        "tasks": tasks,
    }
    known: dict[str, Any] = {}
    for module in MODULES[kind]:  # the kind's own come last
        known.update(
            vars(importlib.import_module(f"lightkv.triton_kernels.attention.prefill.hopper.{module}"))
        )
    for name, value in known.items():
        if hasattr(value, "fn") and isinstance(value.fn, types.FunctionType):
            function = types.FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
            names.setdefault(name, function)
        elif isinstance(getattr(value, "value", None), int | float):
            names[name] = value.value
        elif isinstance(value, type) and hasattr(value, "_fields"):
            names[name] = value
    # What threads hold, and how, exists on the device alone.
    names["ROWS"] = ROWS
    names["_raise_peaks"], names["_scale_piece"] = raise_peaks, scale_piece
    names["value_bytes"] = lambda dtype: 1 if dtype is np.uint8 else 2 if dtype is np.float16 else 4
    names["_load_pairs"] = lambda tile, _layout: array(tile.values.view(np.uint16))
    names["row_pointers"] = lambda head, slots, stride, _layout, dim: (
        head + (slots * stride)[:, None] + np.arange(dim)
    )
    names["pair_up"] = names["pack_pairs"] = names["unpack_pairs"] = names["unpack_fours"] = unchanged
    names["pack_fours"] = lambda weights, _q: weights[:, keys_of_places(weights.shape[1])]
    return names


peaks_seen: Counter[str] = Counter()  # by what became of them: threads count what tests look at


def raise_peaks(most: Any, peak: Any, slack: float) -> tuple[Any, Any]:
    """What the assembly of that name does, for all rows of a warpgroup as if they were those of one warp."""
    if not (most - peak > slack).any():
        peaks_seen["kept"] += 1
        return peak, array(np.ones_like(peak))
    peaks_seen["begun" if (peak < -1e29).all() else "raised"] += 1
    raised = np.maximum(peak, most.max(1, keepdims=True))
    return array(raised), array(np.exp2(peak - raised))


def scale_piece(acc: Any, factors: Any, _num: int) -> Any:
    return acc * factors[:, :1]


def keys_of_places(num: int) -> np.ndarray:
    """Returns the keys of the places of a scratch (`restore_kv.py`)."""
    places = np.arange(num)
    return places & ~15 | (places & 2) << 2 | (places & 12) >> 1 | places & 1


def run_all(tasks: list[Callable[[], None]]) -> None:
    """Runs the tasks in threads, and raises what one of them raised."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            with np.errstate(divide="ignore"):
                task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    if errors:
        raise errors[0]


class Case(NamedTuple):
    """What the kernels compute. `num_workers`: that keys are shared out among; 0 if they are not. `extra`:
    "alibi", "tree", "steep" for scores that rise by more than peaks are kept, a mask of `values_mask`, or
    nothing. `members`: warpgroups that compute."""

    window: int
    softcap: float
    num_workers: int
    chunk: int
    with_sinks: bool
    causal: bool
    extra: str
    group: int
    dims: tuple[int, int] = (16, 16)
    members: int = 2


def values_mask(extra: str, num_tokens: int, num_heads: int) -> ValueMask | None:
    """Returns the mask that `extra` names: its type, and its width. After the last of `width` columns are
    numbers that nobody may see."""
    name, _, width = extra.partition(" ")
    if name not in ("bool", "float16", "float32"):
        return None
    values = torch.randn(num_heads, num_tokens, 112)
    if name == "bool":
        hides = values[0] < -1.0
        return ValueMask((~hides)[:, : int(width)])
    values[torch.rand(values.shape) < 0.1] = -torch.inf
    values[:, ::3, 0] = -1e10 if name == "float32" else -6e4  # all that a query sees
    values[:, :, int(width) :] = torch.nan
    return ValueMask(values.to(getattr(torch, name))[:, :, : int(width)])


def scratch_of(cache: Any, keys: Any, scales: Any) -> tuple[Any, Any]:
    """Returns the requests' K and V as prefill in fp8 gets them, here in float32: K is stored in units of 1/2
    and 1/4 for the K/V heads, and V in units of 4 and 8."""
    lengths = cache.lengths.clamp(min=0).tolist()
    ends = np.cumsum([-(-length // KEYS) * KEYS for length in lengths])
    num_heads, key_dim, value_dim = cache.kv.k.shape[1], cache.kv.key_dim, cache.kv.value_dim
    units = torch.tensor([[2.0 ** -(head + 1), 2.0 ** (head + 2)] for head in range(num_heads)])
    k, v = torch.zeros(ends[-1], num_heads, key_dim), torch.zeros(num_heads, value_dim, ends[-1])
    begins = torch.tensor([0, *ends[:-1]], dtype=torch.int32)
    for row, length, begin, end in zip(cache.rows.tolist(), lengths, begins.tolist(), ends, strict=True):
        found = cache.kv.read(slots_reference(cache.kv, row, torch.arange(length)))
        k[begin : begin + length] = found[0] / units[:, :1]
        padded = torch.zeros(end - begin, num_heads, value_dim)
        padded[:length] = found[1] / units[:, 1:]
        v[:, :, begin:end] = padded[keys_of_places(end - begin)].permute(1, 2, 0)
    return keys(k, v, begins, k.stride(0), v.stride(1)), scales(units, 1.0, 1.0)


WARPGROUPS = [(1, 3), (3, 2)]  # query heads to a K/V head, and warpgroups
FEATURES = [  # window, soft-cap, workers, chunk, sinks, causal, and what else
    (0, 0.0, 0, 0, False, True, ""),
    (0, 5.0, 9, 0, False, True, ""),
    (40, 0.0, 7, 0, True, True, ""),
    (0, 0.0, 0, 7, False, True, ""),
    (0, 0.0, 60, 48, True, True, ""),
    (0, 0.0, 0, 0, False, False, ""),
    (0, 0.0, 60, 0, True, False, "alibi"),
    (20, 0.0, 60, 0, False, False, ""),
    (30, 0.0, 0, 0, False, True, "alibi"),
    (0, 0.0, 60, 0, True, True, "tree"),
    (0, 0.0, 60, 0, True, True, "float32 70"),
    (0, 5.0, 60, 0, False, False, "float16 107"),
    (0, 0.0, 0, 0, False, True, "bool 112"),
    (0, 0.0, 60, 48, False, True, "bool 61"),
    (0, 0.0, 60, 0, True, False, "bool 16"),
    (0, 0.0, 60, 0, True, True, "steep"),
    *slow(  # options that each occur above, with others
        (0, 0.0, 0, 64, True, True, ""),
        (0, 5.0, 9, 0, True, True, "alibi"),
        (0, 0.0, 0, 0, False, True, "tree"),
        (30, 0.0, 0, 0, True, True, "float16 42"),
        (0, 0.0, 5, 0, True, True, ""),
        (0, 0.0, 60, 0, False, True, ""),
        (0, 0.0, 60, 90, True, True, ""),
        (0, 0.0, 60, 0, False, False, "alibi"),
        (0, 0.0, 0, 0, False, True, "float32 112"),
        (0, 0.0, 0, 0, False, True, "steep"),
    ),
]


# Every option of the features runs with both numbers of warpgroups.
@each_value(features=FEATURES, warpgroups=WARPGROUPS)
def test_warpgroups(
    features: tuple[Any, ...], warpgroups: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, members = warpgroups
    case = Case(*features, group, members=members)
    peaks_seen.clear()
    compare(case, monkeypatch)
    assert peaks_seen["kept"] or case.window or case.chunk or case.extra == "steep"
    assert peaks_seen["raised"] or case.extra != "steep"


def compare(case: Case, monkeypatch: pytest.MonkeyPatch, kind: str = "prefill_hopper") -> None:
    """Compares the kernel of a module with the reference."""
    window, softcap, num_workers, chunk, with_sinks, causal, extra, group, dims, members = case
    torch.manual_seed(group + num_workers)
    key_dim, value_dim = dims
    if group == 3:  # one K/V head after the other
        monkeypatch.setattr(prefill_tuning, "SECTION_BYTES", 1)
        monkeypatch.setattr(sys.modules[__name__], "STAGES", 3)
    sequences = [(5, 100), (0, 9), (20, 30), (1, 60), (3, -2), (40, 0)]
    cache = poisoned_cache(
        [max(q_len + prefix, 0) for q_len, prefix in sequences],
        device="cpu",
        key_dim=key_dim,
        value_dim=value_dim,
    )
    q_starts, num_queries = starts([q_len for q_len, _ in sequences], "cpu"), sum(q for q, _ in sequences)
    q = torch.randn(num_queries + 2, 2 * group, key_dim) * (12.0 if extra == "steep" else 1.0)
    sink_logits = torch.linspace(-2.0, 5.0, 2 * group) if with_sinks else None
    slopes = torch.linspace(0.05, 0.6, 2 * group) if extra == "alibi" else None
    tree = None
    if extra == "tree":  # two words a row, of which the longest request needs both
        monkeypatch.setattr(sys.modules[__name__], "KEYS", 32)
        bits = torch.randint(-(2**31), 2**31, (len(q), 2), dtype=torch.int64).int()
        tree = TreeMask(bits)
    options = AttentionOptions(causal=causal).plus(
        Window(window) if window else None,
        Softcap(softcap) if softcap else None,
        Chunk(chunk) if chunk else None,
        None if sink_logits is None else SinkLogits(sink_logits),
        None if slopes is None else Alibi(slopes),
        tree,
        values_mask(extra, len(q), 2 * group),
    )
    features, score_scale = features_of(options.variants, options.scale_for(key_dim), causal)
    if kind != "prefill_hopper":
        features = features._replace(ADDS_COLUMNS=False)
    args = q, cache.kv, cache.rows, q_starts, cache.lengths
    # In a scratch in fp8, requests have their own order.
    rows = cache.rows if kind == "prefill_hopper" else torch.arange(len(sequences))
    shares = prefill_tuning.NO_SHARES
    if num_workers:
        shares = prefill_tuning.PrefillShares(num_workers, 8, 2 * KEYS, 1, -(2**30))
    device = "cuda" if torch.cuda.is_available() else "cpu"  # of Triton's kernels
    plan = prefill_plan(
        rows.to(device),
        q_starts.to(device),
        cache.lengths.to(device),
        HeadShape.of(q, cache.kv),
        num_tokens=len(q),
        dtype=q.dtype,
        limits=limits(options.variants),
        causal=causal,
        launch=tuning.Launch(members * ROWS, KEYS, 4, STAGES),
        shares=shares,
    )
    plan = plan._replace(items=plan.items.cpu(), counters=plan.counters.cpu())
    assert bool((plan.items[:, 8] >= 0).sum()) == bool(num_workers)
    out = torch.full((*q.shape[:2], value_dim), torch.nan)
    lse = torch.full(q.shape[:2], torch.nan)
    partial_lse = torch.full((2 * num_workers, 2, members * ROWS), torch.nan)
    partial_out = torch.full((*partial_lse.shape, value_dim), torch.nan)

    def pointer(tensor: torch.Tensor) -> Pointer:
        whole = torch.as_strided(
            tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0
        )
        return Pointer(whole.numpy(), tensor.storage_offset())

    def pointers(record: Any) -> Any:
        """Returns a record as a kernel gets it."""

        def given(one: Any) -> Any:
            if type(one) is tuple:
                return tuple(map(given, one))
            return pointer(one) if isinstance(one, torch.Tensor) else getattr(one, "value", one)

        return type(record)(*map(given, record))

    lists = pointer(plan.items), pointer(plan.counters)
    written = pointers(Outputs(out, *out.stride()[:2], lse, partial_out, partial_lse))
    shape = Shape(group, key_dim, value_dim, members * ROWS, key_dim, value_dim, KEYS, causal, 0, False)
    heads, of_call = pointers(Heads(q, *q.stride()[:2])), (pointers(features), shape, STAGES, num_workers > 0)
    tasks: list[Callable[[], None]] = []
    num_programs = 3
    for program in range(num_programs):
        names = numpy_gluon(program, num_programs, kind)
        if kind == "prefill_hopper":
            k, v, index = cache.kv.k, cache.kv.v, cache.kv.index
            strides = *k.stride()[:2], *v.stride()[:2], None, None
            records = pointers(Cache(k, v, None, None, *strides, 0))
            hooks = TOKEN_TABLE.hooks._replace(place=TOKEN_TABLE.hooks.place.value.fn)
            entries = pointers(Index(index, index.stride(0), 0, hooks, (), None))
            stages = 0 if features.added is None else 1 if extra.startswith("float32") else 2
            names["_hopper_kernel"](
                heads, records, entries, *lists, written, 2, score_scale, *of_call[:3], stages, of_call[3]
            )
        else:
            keys, scales = scratch_of(cache, names["Fp8Keys"], names["Fp8Scales"])
            names["_fp8_kernel"](
                heads, pointers(keys), *lists, written, 2, score_scale, pointers(scales), *of_call
            )
        tasks += names["tasks"]
    run_all(tasks)
    parts = (one.to(device) for one in (partial_out, partial_lse, plan.items))
    combined = out.to(device), lse.to(device)
    combine_tiles(*parts, *combined)
    out, lse = (one.cpu() for one in combined)
    expected = prefill_attention_reference(*args, options)
    torch.testing.assert_close(out[:num_queries], expected[:num_queries], atol=1e-5, rtol=1e-5)
    expected_lse = lse_reference(*args, options)
    torch.testing.assert_close(lse[:num_queries], expected_lse[:num_queries], atol=1e-5, rtol=1e-5)
    assert out[num_queries:].isnan().all()
    assert not plan.counters[:2].any()


@pytest.mark.parametrize(
    ("dims", "window", "num_workers", "causal", "extra"),
    [
        ((20, 20), 0, 9, True, ""),
        ((24, 24), 40, 0, True, ""),
        ((48, 32), 0, 60, False, "alibi"),
        ((28, 28), 0, 0, True, "tree"),
    ],
    ids=str,
)
def test_head_dims_of_several_pieces(
    dims: tuple[int, int],
    window: int,
    num_workers: int,
    causal: bool,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widths = [tiles.piece_width(dims[0], i) for i in range(tiles.num_pieces(dims[0]))]
    assert sum(widths) == dims[0]
    assert len(widths) > 1
    compare(Case(window, 0.0, num_workers, 0, True, causal, extra, 3, dims), monkeypatch)


@pytest.mark.parametrize(
    ("window", "softcap", "num_workers", "chunk", "with_sinks", "causal", "extra"),
    [
        (0, 5.0, 0, 0, True, True, ""),
        (40, 0.0, 7, 0, True, True, ""),
        *slow_cases((0, 0.0, 60, 48, False, True, "")),
        (0, 0.0, 60, 0, False, False, "alibi"),
    ],
    ids=str,
)
def test_fp8_kind(
    window: int,
    softcap: float,
    num_workers: int,
    chunk: int,
    with_sinks: bool,
    causal: bool,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(window, softcap, num_workers, chunk, with_sinks, causal, extra, 3)
    compare(case, monkeypatch, "prefill_fp8_hopper")


@pytest.mark.parametrize("num_kv_heads", [1, 2, 5, 8])
@pytest.mark.parametrize("section_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("num_entries", [0, 1, 7])
def test_the_order_of_items(num_kv_heads: int, section_heads: int, num_entries: int) -> None:
    """A section has all entries of its heads; of these, the first entries come first."""
    item_at = numpy_gluon(0, 1)["item_at"]
    order = tuple(array(value) for value in (num_entries, min(section_heads, num_kv_heads), num_kv_heads))
    found = [int(item_at(array(place), order)) for place in range(num_entries * num_kv_heads + 3)]
    assert found[num_entries * num_kv_heads :] == [-1] * 3
    items = [divmod(item, num_kv_heads) for item in found[: num_entries * num_kv_heads]]  # entry, head
    sections = [head // section_heads for _, head in items]
    assert items == sorted(items, key=lambda item: (item[1] // section_heads, item))
    assert len(set(items)) == len(items) == num_entries * num_kv_heads
    assert sections == sorted(sections)
