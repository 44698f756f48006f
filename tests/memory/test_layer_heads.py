"""Layers of one model whose K/V heads, dims or formats differ, and layers that read the K/V of another one: the
bytes of their slots, how they are cut into groups, and what the pool keeps of each."""

import random
from array import array

import pytest
import torch

from lightkv import KVCache, KVSpec
from lightkv.layer_groups import FULL, LayerGroups, Lifetime
from lightkv.memory.kv_pool import KVPool
from lightkv.memory.kv_spec import KVHeads
from lightkv.triton_kernels.quantised.kv_format import KVFormat

WINDOW = Lifetime("window", 4)
WIDE, NARROW = KVHeads(4, 32, 32), KVHeads(2, 32, 32)


def spec_of(
    pattern: str, wide: str = "W", format: str | KVFormat = "auto", dtype: torch.dtype = torch.float32
) -> KVSpec:
    """Returns layers in the order of the letters of `pattern`: F sees all, W a window, and those of `wide` have
    twice the heads. None have groups where `pattern` is in small letters."""
    heads = [WIDE if letter == wide else NARROW for letter in pattern.upper()]
    lifetimes = [FULL if letter == "F" else WINDOW for letter in pattern]
    return KVSpec(
        len(pattern),
        *heads[0],
        dtype,
        format,
        lifetimes=None if pattern.islower() else lifetimes,
        layer_heads=heads,
    )


# The rows of a model's layers that see everything, and of those with a window; the lanes, and what a token
# takes of slots in both classes; and how many of the bytes are unused, as a share of those that are used.
SHAPES = {
    "Gemma-4-E2B": ([1] * 12, [2] * 3, 3, (1, 2), 0),
    "Gemma-4-26B-A4B": ([2] * 25, [1] * 5, 3, (1, 9), 5 / 55),
    "Gemma-4-31B": ([2] * 50, [1] * 10, 5, (1, 10), 0),
    "MiMo-V2-Flash": ([2] * 39, [1] * 9, 5, (1, 8), 3 / 87),
}


@pytest.mark.parametrize("name", SHAPES)
def test_narrow_rows_share_a_lane(name: str) -> None:
    windowed, full, num_lanes, widths, waste = SHAPES[name]
    rows = [*windowed, *full]
    lifetimes = [WINDOW] * len(windowed) + [FULL] * len(full)
    groups = LayerGroups.of(lifetimes, rows)
    assert (groups.num_lanes, groups.widths) == (num_lanes, widths)
    assert groups.waste(rows) == pytest.approx(waste)
    check_lanes(groups, rows)


def check_lanes(groups: LayerGroups, rows: list[int]) -> None:
    """Each layer that holds K/V has one place, and no lane is wider than the widest row."""
    assert sorted(groups.places) == [layer for layer, row in enumerate(rows) if row]
    assert max(groups.lane_sizes(rows)) == max(rows)
    for group in groups.groups:
        assert len(group) <= groups.num_lanes


def test_layers_of_random_rows_are_cut_or_stay_together() -> None:
    """A token that stays takes fewer bytes in groups than in one."""
    rng = random.Random(0)
    for _ in range(300):
        rows = [rng.choice([0, 16, 32, 48, 64, 80]) for _ in range(rng.randint(2, 12))] + [16, 16]
        lifetimes = [rng.choice([FULL, WINDOW, Lifetime("chunk", 8)]) for _ in rows[2:]] + [FULL, WINDOW]
        groups = LayerGroups.of(lifetimes, rows)
        check_lanes(groups, rows)
        if not groups.is_uniform:
            assert groups.widths[0] * sum(groups.lane_sizes(rows)) < sum(rows)
            for one in groups.classes:
                assert {lifetimes[layer] for layer in one.layers} == {one.lifetime}


def test_layers_stay_together_where_groups_would_save_nothing() -> None:
    """The best cut has slots of ten lanes: a token that stays would take 30, as many as there are layers."""
    assert LayerGroups.of([FULL] * 28 + [WINDOW] * 2).widths == (7, 1)
    assert LayerGroups.of([FULL] * 29 + [WINDOW]).is_uniform


FORMATS = ["auto", "int8", "int4-g16", "fp8-static", KVFormat.parse("int8", [0, 3])]
PATTERNS = {"uniform": ("wwfww", "W"), "narrow full layers": ("WWFWWF", "W"), "wide": ("WWFWWF", "F")}


def test_a_lane_is_as_wide_as_its_widest_layer() -> None:
    groups = LayerGroups.of([FULL] * 3 + [WINDOW], [6, 6, 6, 10])
    assert (groups.widths, groups.lane_sizes([6, 6, 6, 10])) == ((1, 1), [10, 6, 6])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_layer_keeps_its_own_rows(format: str | KVFormat, pattern: str, device: torch.device) -> None:
    """A slot of one group is read back from each of its layers, whatever other slots and layers were written;
    and as by a pool of that layer alone."""
    spec = spec_of(*PATTERNS[pattern], format, dtype=torch.float16)
    assert spec.groups.is_uniform == (pattern == "uniform")
    pool = KVPool(spec, 20, device)
    assert pool.num_bytes == sum(buffer.nbytes for buffer in pool.buffers) == 20 * spec.bytes_per_slot
    assert spec.groups.num_groups * spec.bytes_per_slot >= spec.bytes_per_token
    group_of = {layer: group for layer, (group, _) in spec.groups.places.items()}
    torch.manual_seed(0)
    expected = []
    for layer in range(spec.num_layers):
        heads, of_layer = spec.heads(layer), spec.format_of(layer)
        alone = KVPool(KVSpec(1, *heads, torch.float16, of_layer), 20, device)
        slots = torch.tensor([1 + group_of[layer], 10 + group_of[layer]], device=device)  # no two groups' own
        k, v = torch.randn(2, 2, heads.num_kv_heads, 32, device=device, dtype=torch.float16)
        for one, number in ((pool, layer), (alone, 0)):
            if of_layer.is_static:
                one.set_static_scales(number, torch.tensor([0.02 + layer]), torch.tensor([0.03]))
            one.write(number, slots, k, v)
        assert pool.k(layer).shape[1] == heads.num_kv_heads
        expected.append((slots, alone.read(0, slots)))
    for layer, (slots, kv) in enumerate(expected):
        for found, one in zip(pool.read(layer, slots), kv, strict=True):
            assert torch.equal(found, one)


def test_a_layer_that_reads_another_ones_holds_nothing(device: torch.device) -> None:
    heads = [NARROW, WIDE, NARROW, WIDE, NARROW]
    lifetimes = [WINDOW, FULL, WINDOW, FULL, WINDOW]
    spec = KVSpec(5, *NARROW, torch.float32, "int8", lifetimes, heads, holders=[0, 1, 2, 1, 2])
    assert sorted(spec.groups.places) == [0, 1, 2]
    assert spec.bytes_per_token == (2 * 2 + 4) * (64 + 2 * 4)
    cache = KVCache(spec, 40, 2, 20, device)
    memory, pool = cache.memory, cache.memory.pool
    assert memory.group_of_layer == [memory.group_of_layer[one] for one in (0, 1, 2, 1, 2)]
    assert sum(buffer.nbytes for buffer in pool.buffers) == 41 * spec.bytes_per_slot
    slots = torch.tensor([3, 5], device=device)
    pool.write(1, slots, *torch.randn(2, 2, 4, 32, device=device))
    for found, one in zip(pool.read(3, slots), pool.read(1, slots), strict=True):
        assert torch.equal(found, one)
    assert pool.k(4).data_ptr() == pool.k(2).data_ptr()


def test_layers_of_several_shapes_are_exported_and_imported(device: torch.device) -> None:
    spec = spec_of("wfwfw")
    caches = [KVCache(spec, 30, 2, 20, device) for _ in range(2)]
    sequence = caches[0].open(array("i", range(9)))
    slots = caches[0].extend([sequence], [9])
    pool = caches[0].memory.pool
    for layer in range(spec.num_layers):
        pool.write(layer, slots, *torch.randn(2, 9, *spec.heads(layer)[:2], device=device))
    exported = caches[0].export(sequence)
    taken = caches[1].import_sequence(array("i", range(9)), exported)
    for layer in range(spec.num_layers):
        ours = caches[1].memory.pool.read(layer, caches[1].slots(taken).long())
        for found, one in zip(ours, pool.read(layer, slots), strict=True):
            assert torch.equal(found, one)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"layer_heads": [NARROW]}, ValueError, "1 layer_heads for 2 layers"),
        ({"layer_heads": [WIDE, NARROW]}, ValueError, "of layer 0 are"),
        ({"layer_heads": [NARROW, (2, 32, 32)]}, TypeError, "give a KVHeads"),
        ({"layer_heads": [NARROW, NARROW._replace(v_dim=0)]}, ValueError, "v_dim"),
        ({"layer_heads": [NARROW, NARROW._replace(v_dim=6)], "format": "int4"}, ValueError, "6 V dims"),
        ({"holders": [0]}, ValueError, "1 holders for 2 layers"),
        ({"holders": [1, 1]}, ValueError, "layer 0 reads the K/V of layer 1"),
        ({"holders": [0, 0], "layer_heads": [NARROW, WIDE]}, ValueError, "other heads"),
        ({"holders": [0, 0], "lifetimes": [WINDOW, FULL]}, ValueError, "another lifetime"),
        ({"holders": [0, 0], "format": KVFormat.parse("int8", [1])}, ValueError, "holds no K/V"),
    ],
)
def test_a_spec_refuses_heads_and_holders_that_are_none(
    arguments: dict[str, object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        KVSpec(2, *NARROW, torch.float32, **arguments)  # type: ignore[arg-type]
