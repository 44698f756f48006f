"""The token buckets of prompt graphs: their sizes, and the shapes of each."""

from itertools import pairwise

import pytest

from lightkv.router.model.step_graphs import batch_sizes, graphs_bytes
from lightkv.router.model.token_buckets import (
    FEW_PREFILLS,
    MOST_TOKENS,
    most_buckets,
    prompt_shapes,
    token_buckets,
)
from tests.support.combinations import slow

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


def fits_rule(size: int, smaller: int) -> bool:
    return 10 * size <= (15 if size <= 512 else 12) * smaller


@pytest.mark.parametrize(
    "most", [1, 15, 16, 64, 76, 193, 256, 257, 300, 511, 600, 1000, 2304, 2305, 2560, 3333, 10_000]
)
def test_buckets_grow_in_small_steps(most: int) -> None:
    for chunk in (0, 1, 100, 300, most, most + 1):
        buckets = token_buckets(most, chunk)
        assert buckets[-1] == min(most, MOST_TOKENS)
        assert buckets == sorted(set(buckets))
        assert buckets[0] == min(most, 16) or buckets[0] == chunk
        assert all(fits_rule(larger, size) or size < 16 for size, larger in pairwise(buckets))
        assert len(buckets) <= most_buckets(most)


@pytest.mark.parametrize("chunk", [256, 300, 1000, 2047, 2048, 3333, 4096])
def test_the_chunk_of_long_prompts_is_never_padded(chunk: int) -> None:
    assert set(token_buckets(chunk + 256, chunk)) - set(token_buckets(chunk + 256, 0)) <= {chunk}
    assert chunk in token_buckets(chunk + 256, chunk)
    assert token_buckets(4096, 5000) == token_buckets(4096, 0)


def test_padding_costs_little_on_hopper() -> None:
    """No bucket is slower than the next one, and padding costs a step under 1 % in the mean, by the table."""
    buckets = token_buckets(MOST_TOKENS, 0)
    assert all(on_hopper(size) < on_hopper(larger) for size, larger in pairwise(buckets) if size > 256)
    lost = []
    for size in range(385, MOST_TOKENS + 1):
        bucket = next(one for one in buckets if one >= size)
        lost.append(on_hopper(bucket) / min(time for known, time in HOPPER.items() if known >= size) - 1)
    assert sum(lost) / len(lost) < 0.01


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, *slow(7, 48, 256)])
def test_a_shape_fits_every_step(max_num_seqs: int) -> None:
    """Padded to at most 1.5 times its tokens, above 512 to at most 1.2 times; a step of few prompts even to the
    next bucket, without slots for decodes if it has none."""
    sizes = token_buckets(2200, 2000)
    buckets = prompt_shapes(sizes, max_num_seqs)
    assert list(buckets) == sizes
    shapes = [shape for shapes in buckets.values() for shape in shapes]
    for size, smaller in zip(buckets, [0, *buckets], strict=False):
        assert all(shape.num_tokens == size for shape in buckets[size])
        for num_prefills in range(1, min(size, max_num_seqs) + 1):
            for num_decodes in {0, min(size, max_num_seqs) - num_prefills}:
                shape = next(shape for shape in shapes if shape.fits(smaller + 1, num_prefills, num_decodes))
                assert shape.num_tokens == size or fits_rule(shape.num_tokens, smaller)
                if num_prefills < FEW_PREFILLS:
                    assert shape.num_tokens == size
                    assert num_decodes or not shape.num_decodes
    assert not any(shape.fits(2201, 1, 0) for shape in shapes)


def test_there_are_not_too_many_graphs() -> None:
    assert sum(map(len, prompt_shapes(token_buckets(MOST_TOKENS, 0), 256).values())) <= 115


def test_there_is_memory_for_every_chunk() -> None:
    """At most three shapes a bucket, and two of them also with shared prefixes."""
    for most in (20, 300, 2304, 4352):
        few, many = graphs_bytes(1, most, 0, 0, 0), graphs_bytes(256, most, 0, 0, 0)
        buckets = prompt_shapes(token_buckets(most, most // 2 + 3), 256)
        shapes = [shape for shapes in buckets.values() for shape in shapes]
        num_graphs = len(shapes) + sum(shape.num_decodes > 0 for shape in shapes)
        assert num_graphs << 21 <= few < many
    assert graphs_bytes(1, 10_000, 7, 0, 0) - graphs_bytes(1, 10_000, 0, 0, 0) == 7 * MOST_TOKENS


def test_the_memory_to_keep_has_room_for_the_graphs_of_rows_with_grammars() -> None:
    """Each size of decode batches has up to five graphs, and the masks are kept once. Beside the weights that
    are drawn from, in float32, there are logits in 16 bits twice: the graph's, and those of prompt graphs."""
    sizes = len(batch_sizes(256))
    least = graphs_bytes(256, 20, 0, 0, 0) - graphs_bytes(1, 20, 0, 0, 0)
    assert least >= (5 * (sizes - 1)) << 21
    vocab_size = 128_000
    logits = graphs_bytes(256, 20, 0, 4 * vocab_size, 0) - graphs_bytes(256, 20, 0, 0, 0)
    assert logits >= 256 * (2 * 4 * vocab_size + vocab_size // 8)
