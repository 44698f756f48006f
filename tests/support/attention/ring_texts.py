"""Texts in rings, beams that read the slots of one another, and the attention of both in float64."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.decode.decode_attention import (
    decode_attention,
    decode_attention_reference,
)
from lightkv.triton_kernels.attention.lookups import RingRows
from lightkv.triton_kernels.attention.lookups.ring_rows import SinkRotation
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, AttentionOptions, PagedKV
from lightkv.triton_kernels.attention.variants import SinkLogits, Softcap
from lightkv.triton_kernels.attention.variants.hooks import LOG2_E
from lightkv.triton_kernels.layout.ring import Ring
from tests.support.attention.caches import TOLERANCE, assert_close

RINGS = {
    "sinks": Ring(4, 90, 16),
    "one-by-one": Ring(3, 64),
    "no-sinks": Ring(0, 70, 70),
    "many-sinks": Ring(19, 20, 5),
}


class Texts(NamedTuple):
    """Rings, and what was written to them: K and V of the last positions of each text, by position."""

    kv: PagedKV
    rows: Tensor
    lengths: Tensor
    keys: list[dict[int, Tensor]]
    values: list[dict[int, Tensor]]


def written(
    ring: Ring,
    lengths: list[int],
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    *,
    key_dim: int = 64,
    value_dim: int = 64,
) -> Texts:
    """Writes texts to rings, position after position (only the last of each entry, in fact)."""
    columns = ring.capacity
    slots = 1 + torch.randperm(len(lengths) * columns + 5)
    index = torch.zeros(len(lengths) + 1, columns, dtype=torch.int32)
    rows = 1 + torch.randperm(len(lengths))
    index[rows] = slots[: len(lengths) * columns].view(-1, columns).int()
    num_slots = len(slots) + 1
    k, v = torch.full((num_slots, 2, key_dim), torch.nan), torch.full((num_slots, 2, value_dim), torch.nan)
    k[0] = v[0] = 1e4
    all_keys, all_values = [], []
    for row, length in zip(rows.tolist(), lengths, strict=True):
        held = [p for p in range(length) if p < ring.sinks or p >= length - ring.size]
        new_k, new_v = (torch.randn(len(held), 2, dim).to(dtype) for dim in (key_dim, value_dim))
        for i, position in enumerate(held):
            entry = position if position < ring.sinks else ring.sinks + (position - ring.sinks) % ring.size
            slot = int(index[row, entry])
            k[slot], v[slot] = new_k[i], new_v[i]
        all_keys.append(dict(zip(held, new_k.double(), strict=True)))
        all_values.append(dict(zip(held, new_v.double(), strict=True)))
    kv = PagedKV(k.to(device, dtype), v.to(device, dtype), index.to(device), RingRows(ring))
    return Texts(
        kv, rows.to(device), torch.tensor(lengths, dtype=torch.int32, device=device), all_keys, all_values
    )


def rotation_of(ring: Ring, lengths: list[int], num_pairs: int, device: torch.device | str) -> SinkRotation:
    """The angles by which queries at the end of texts are rotated back."""
    dropped = torch.tensor([ring.dropped(length - 1) for length in lengths], dtype=torch.float64)
    angles = dropped[:, None] * 10.0 ** -torch.linspace(0, 3, num_pairs, dtype=torch.float64)
    return SinkRotation(angles.cos().float().to(device), angles.sin().float().to(device))


def dense(
    q: Tensor, keys: list[Tensor], queries: list[Tensor], values: list[Tensor], options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """One query, `[H, Dk]` in `queries` once for each of its keys: the output and the log-sum-exp, base 2."""
    group = q.shape[0] // 2
    scores = torch.full((q.shape[0], len(keys) + 1), -torch.inf, dtype=torch.float64)
    for i, (key, query) in enumerate(zip(keys, queries, strict=True)):
        scores[:, i] = (query * key.repeat_interleave(group, 0)).sum(1) * options.scale_for(q.shape[1])
    softcap, sinks = options.of(Softcap), options.of(SinkLogits)
    if softcap is not None:
        scores[:, :-1] = softcap.cap * torch.tanh(scores[:, :-1] / softcap.cap)
    if sinks is not None:
        scores[:, -1] = sinks.logits.double().cpu()
    weights = scores.softmax(1).nan_to_num(0.0)
    out = torch.zeros(q.shape[0], values[0].shape[1] if values else 1, dtype=torch.float64)
    for i, value in enumerate(values):
        out += weights[:, i, None] * value.repeat_interleave(group, 0)
    return out, scores.logsumexp(1) * LOG2_E


def rotated_back(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """q `[H, D]` times the complex numbers of these angles, conjugated."""
    n = len(cos)
    turned = torch.complex(q[:, :n], q[:, n : 2 * n]) * torch.complex(cos, -sin)
    return torch.cat((turned.real, turned.imag, q[:, 2 * n :]), 1)


def check_stream(
    texts: Texts,
    chosen: AttentionOptions = DEFAULT_OPTIONS,
    *,
    group: int = 2,
    num_pairs: int = 24,
) -> None:
    """Compares a decode step, whose queries see a ring's sinks and window, with the definition."""
    assert isinstance(texts.kv.lookup, RingRows)
    ring, lengths = texts.kv.lookup.ring, texts.lengths.tolist()
    device, dtype = texts.kv.k.device, texts.kv.k.dtype
    q = torch.randn(len(lengths), 2 * group, texts.kv.k.shape[2]).to(device, dtype)
    out = torch.full((*q.shape[:2], texts.kv.v.shape[2]), torch.nan, dtype=dtype, device=device)
    lse = torch.full(q.shape[:2], torch.nan, device=device)
    rotation = rotation_of(ring, lengths, num_pairs, device) if num_pairs and ring.sinks else None
    kv = texts.kv._replace(lookup=RingRows(ring, rotation))
    arguments = q, kv, texts.rows, texts.lengths, chosen
    decode_attention(*arguments, out=out, lse=lse)
    assert_close(decode_attention_reference(*arguments), out)
    tolerance = TOLERANCE[dtype]
    for request, length in enumerate(lengths):
        query = q[request].double().cpu()
        sinks = list(range(min(ring.sinks, length)))
        window = [p for p in range(length) if p >= ring.sinks + ring.dropped(length - 1)]
        turned = query
        if rotation is not None:
            cos, sin = (angles[request].double().cpu() for angles in rotation)
            turned = rotated_back(query, cos, sin).to(dtype).double()
        keys, values = ([held[request][p] for p in sinks + window] for held in (texts.keys, texts.values))
        expected, expected_lse = dense(
            query, keys, [turned] * len(sinks) + [query] * len(window), values, chosen
        )
        actual = out[request].double().cpu()
        torch.testing.assert_close(actual, expected.expand_as(actual), atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[request].double().cpu(), expected_lse, atol=2e-2, rtol=1e-3)


def beams_of(kv: PagedKV, rows: Tensor, length: int) -> Tensor:
    """Returns a table by which every row reads each position from a random one of `rows`, which all have
    `length` tokens."""
    chosen = rows[torch.randint(len(rows), (len(kv.index), length), device=rows.device)]
    return chosen.int()
