"""The rows that `attention.py` measures, and the work of each: its bytes and its operations.

A row is a batch of requests. Rows are grouped into the parts that the command line names; `QUICK` names those
that a short run measures.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch


class Row(NamedTuple):
    """Requests with `lengths` tokens in the cache, the last `q_lens` of which are queries. All requests have
    the first `shared` tokens in common. `value_dim` is the head dim of V where it is not that of q and K."""

    name: str
    lengths: tuple[int, ...]
    q_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    shared: int = 0
    value_dim: int | None = None

    @property
    def dims(self) -> int:
        """The head dims of K and of V together."""
        return self.head_dim + (self.head_dim if self.value_dim is None else self.value_dim)

    @property
    def is_prefill(self) -> bool:
        return max(self.q_lens) > 1

    @property
    def bytes(self) -> int:
        """The bytes of K/V, read once, and for a prefill also those of the queries and the output."""
        num_tokens = sum(self.lengths) - (len(self.lengths) - 1) * self.shared
        heads = num_tokens * self.num_kv_heads
        if self.is_prefill:
            heads += sum(self.q_lens) * self.num_heads
        return heads * self.dims * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """The operations for the visible pairs of a query and a key."""
        pairs = 0
        for length, q_len in zip(self.lengths, self.q_lens, strict=True):
            pairs += q_len * (length - q_len) + q_len * (q_len + 1) // 2
        return 2 * self.dims * self.num_heads * pairs


def even(name: str, batch: int, length: int, num_heads: int = 32, num_kv_heads: int = 8) -> Row:
    return Row(name, (length,) * batch, (1,) * batch, num_heads, num_kv_heads)


def skewed(name: str, batch: int, mean: int, seed: int) -> Row:
    rng = Random(seed)
    lengths = tuple(max(16, int(rng.lognormvariate(0, 1.2) * mean / 2.05)) for _ in range(batch))
    return Row(name, lengths, (1,) * batch)


def chunks(name: str, fresh: Sequence[int], prefixes: Sequence[int]) -> Row:
    lengths = tuple(new + before for new, before in zip(fresh, prefixes, strict=True))
    return Row(name, lengths, tuple(fresh))


def mixed(name: str, fresh: Sequence[int], prefixes: Sequence[int], batch: int, length: int) -> Row:
    """Returns a row of chunks, followed by the decodes of a batch."""
    prefill = chunks(name, fresh, prefixes)
    return Row(name, prefill.lengths + (length,) * batch, prefill.q_lens + (1,) * batch)


def sharing(name: str, batch: int, shared: int, own: int) -> Row:
    return even(name, batch, shared + own)._replace(shared=shared)


def with_heads(
    row: Row, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int | None = None
) -> Row:
    """Returns the row with other heads, which its name begins with: `heads/K/V heads/dim`, where the dim is
    `key-value` if those differ."""
    dim = str(head_dim) if value_dim is None else f"{head_dim}-{value_dim}"
    return row._replace(
        name=f"{num_heads}/{num_kv_heads}/{dim}, {row.name}",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
    )


DECODE = (
    even("B1 × 1k", 1, 1024),
    even("B1 × 8k", 1, 8192),
    even("B1 × 128k", 1, 131072),
    even("B8 × 4k", 8, 4096),
    even("B32 × 1k", 32, 1024),
    even("B64 × 8k", 64, 8192),
    even("B96 × 4k", 96, 4096),
    even("B128 × 4k", 128, 4096),
    even("B256 × 2k", 256, 2048),
    skewed("B64 skewed", 64, 4096, 1),
    skewed("B16 skewed", 16, 8192, 3),
    even("64/8 heads, B64 × 4k", 64, 4096, 64),
    even("32/32 heads, B32 × 4k", 32, 4096, 32, 32),
    even("8/1 heads, B64 × 8k", 64, 8192, 8, 1),
)
PREFILL = (
    chunks("4 × 4k fresh", [4096] * 4, [0] * 4),
    chunks("1 × 16k fresh", [16384], [0]),
    chunks("16 × 1k fresh", [1024] * 16, [0] * 16),
    chunks("chunk 2k after 30k", [2048], [30720]),
    chunks("8 × (chunk 512 after 4k)", [512] * 8, [4096] * 8),
    chunks("ragged", [37, 900, 2500, 64, 1200, 333, 4096, 18], [0, 512, 0, 8000, 128, 3000, 0, 16000]),
)
MIXED = (
    mixed("chunk 2k after 6k + 64 × 4k", [2048], [6144], 64, 4096),
    mixed("chunk 512 after 3.5k + 32 × 2k", [512], [3584], 32, 2048),
    mixed("4 × 512 fresh + 256 × 2k", [512] * 4, [0] * 4, 256, 2048),
)
GROUPS = (
    sharing("64 × 512 after the same 16k", 64, 16384, 512),
    sharing("32 × 1k after the same 2k", 32, 2048, 1024),
)

# The next turn of a long chat, and the verification of drafted tokens: a few queries after a long prefix.
TURNS = (
    chunks("64 after 32k", [64], [32768]),
    chunks("256 after 100k", [256], [102400]),
    chunks("4 × 512 after 32k", [512] * 4, [32768] * 4),
    chunks("32 × 8 after 2k", [8] * 32, [2048] * 32),
)
CURVE_PREFIX = 32768
CURVE_QUERIES = tuple(2**power for power in range(10))
CURVE = tuple(chunks(f"{count} after 32k", [count], [CURVE_PREFIX]) for count in CURVE_QUERIES)

# Other heads: Llama-3.2-1B and gpt-oss (64), Phi-2 and Phi-3-mini (80 and 96), DeepSeek's expanded latent
# attention (192 for K, 128 for V), Gemma-2-9B (256), Falcon-7B (71 query heads for one K/V head).
# Learned sinks and chunked masks: `Row` gets the layer's `AttentionOptions`, and their rows stand here.
DECODE_DIMS = (
    with_heads(even("B64 × 4k", 64, 4096), 64, 8, 64),
    with_heads(even("B64 × 4k", 64, 4096), 32, 8, 80),
    with_heads(even("B64 × 4k", 64, 4096), 32, 8, 96),
    with_heads(even("B32 × 4k", 32, 4096), 16, 16, 192, 128),
    with_heads(even("B64 × 4k", 64, 4096), 16, 8, 256),
    with_heads(even("B64 × 4k", 64, 4096), 128, 8, 128),
    with_heads(even("B64 × 4k", 64, 4096), 71, 1, 64),
)
HEAD_DIMS = tuple(
    with_heads(row, num_heads, 8, dim)
    for num_heads, dim in ((32, 64), (16, 256))
    for row in (PREFILL[0], PREFILL[4])
)
PREFILL_DIMS = (
    *HEAD_DIMS,
    with_heads(PREFILL[0], 32, 8, 80),
    with_heads(PREFILL[0], 32, 8, 96),
    with_heads(PREFILL[0], 16, 16, 192, 128),
    with_heads(PREFILL[0], 71, 1, 64),
)

# The parts of the benchmark, by the names of their options.
ROWS = {
    "decode": DECODE,
    "decode_dims": DECODE_DIMS,
    "prefill": PREFILL,
    "prefill_dims": PREFILL_DIMS,
    "turns": TURNS,
    "curve": CURVE,
    "mixed": MIXED,
    "groups": GROUPS,
}
QUICK = {
    "decode": ("B64 × 8k", "B96 × 4k", "B128 × 4k", "64/8 heads, B64 × 4k"),
    "decode_dims": ("64/8/64, B64 × 4k", "16/8/256, B64 × 4k"),
    "prefill": tuple(row.name for row in PREFILL if row.name != "ragged"),
    "prefill_dims": ("32/8/64, 4 × 4k fresh", "16/8/256, 4 × 4k fresh"),
    "turns": tuple(row.name for row in TURNS[1:]),  # the first is in the curve, too
    "curve": tuple(row.name for row in CURVE),
}

# Rows of decode that are also measured with several queries, and with writing K/V.
SEVERAL_QUERIES = dict.fromkeys(("B1 × 8k", "B32 × 1k", "B64 × 8k"), 8)
WRITTEN = ("B1 × 1k", "B32 × 1k", "B256 × 2k")


def chosen(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Returns the rows whose names contain one of the texts, where x stands for ×; all rows if there are no
    texts."""
    texts = [name.replace("×", "x").lower() for name in names]
    return [
        row for row in rows if not texts or any(text in row.name.replace("×", "x").lower() for text in texts)
    ]


def rows_to_measure(parts: Sequence[str], names: Sequence[str], quick: bool) -> dict[str, list[Row]]:
    """Returns the rows of each part that `names` choose, with `quick` those of `QUICK` alone. Without `parts`,
    all parts are meant. A part without a row is left out."""
    found = {}
    for part in parts or ROWS:
        rows = chosen(ROWS[part], names)
        if quick:
            rows = [row for row in rows if row.name in QUICK.get(part, ())]
        if rows:
            found[part] = rows
    return found
