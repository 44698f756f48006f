"""Says for which numbers of tokens steps with prompts have CUDA graphs, and the shapes of each one's graphs.

cuBLAS picks the tiles of a matrix product by its sizes, so a step of more tokens can be faster than one of
fewer. A graph whose products are slower than those of a larger one would only cost memory, and slow down the
steps that are padded to it.
"""

from collections.abc import Sequence

from lightkv.attention import BatchShape

# Larger steps run eagerly, since a graph's memory grows with its tokens. The device does not wait for the host,
# but the tokens of the step before such a step are sent only once it is launched.
MOST_TOKENS = 4352
# The prefill slots of most prompt graphs, the one for padding included. With more slots the general kernel of
# prefill would have smaller tiles, as for prefills of few tokens each (`prefill_tuning.prefill_launch`).
FEW_PREFILLS = 8

# These sizes were chosen by the times of an 8B model's products on an H200 (docs/decisions.md). A step of up to
# 512 tokens is padded to at most 1.5 times its tokens, a larger one to at most 1.2 times.
_SIZES = (
    16, 24, 32, 48, 64, 96, 128, 192, 256, 288, 320, 384, 512, 572, 640, 700, 768, 800, 864, 928, 1024, 1056,
    1152, 1212, 1344, 1536, 1568, 1664, 1792, 1824, 2048, 2144, 2304, 2432, 2560, 2816, 2944, 3072, 3132, 3456,
    3648, 3840, 4064, 4224, MOST_TOKENS,
)  # fmt: skip


def token_buckets(most: int, chunk: int) -> list[int]:
    """Returns the numbers of tokens to capture prompt graphs for, where steps have up to `most` tokens, in
    ascending order.

    `chunk` is one of them if a graph can have as many: long prompts are cut into steps of so many tokens, so it
    is by far the most frequent size.
    """
    most = min(most, MOST_TOKENS)
    return sorted({size for size in (*_SIZES, chunk) if 0 < size < most} | {most})


def most_buckets(most: int) -> int:
    """Returns how many buckets `token_buckets` may return for steps of up to `most` tokens."""
    return len(token_buckets(most, 0)) + 1


def _may_follow(size: int, smaller: int) -> bool:
    """Returns whether steps of more than `smaller` tokens may be padded to `size`."""
    return 10 * size <= (15 if size <= 512 else 12) * smaller


def prompt_shapes(buckets: Sequence[int], max_num_seqs: int) -> dict[int, list[BatchShape]]:
    """Returns the shapes of the prompt graphs of each of the ascending `buckets`, the cheapest first.

    They are for a few prompts alone, for a few beside decodes, and for as many of both as a step can have. The
    last is rarely needed, so a bucket lacks it where its steps may be padded to the next one that has it. The
    last bucket has all of them.
    """
    found: dict[int, list[BatchShape]] = {}
    next_with_many = None
    for size, smaller in zip(reversed(buckets), reversed([0, *buckets[:-1]]), strict=True):
        num_seqs = min(size, max_num_seqs)
        few, many = min(FEW_PREFILLS, num_seqs + 1), num_seqs + 1
        shapes = [(few, 0), (few, num_seqs)]
        if next_with_many is None or not _may_follow(next_with_many, smaller):
            shapes.append((many, num_seqs))
            next_with_many = size
        found[size] = [BatchShape(size, *shape) for shape in dict.fromkeys(shapes)]
    return dict(reversed(found.items()))
