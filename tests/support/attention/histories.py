"""Shapes of layers, and all K/V of some sequences in a dense cache, with attention over it in float64."""

from dataclasses import replace

import torch

from lightkv import KVSpec
from lightkv.attention import (
    AttentionOptions,
    LayerShape,
)
from lightkv.memory.kv_memory import KVMemory
from lightkv.triton_kernels.attention.variants import Alibi, Chunk, SinkLogits, Softcap, Window
from lightkv.triton_kernels.attention.variants.alibi import alibi_slopes

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


MAX_SEQUENCES = 8


CASES = {
    "mha": LayerShape(2, 16, 2),
    "gqa-3": LayerShape(6, 16, 2),
    "mqa": LayerShape(4, 16, 1),
    "v-narrower": LayerShape(4, 24, 2, v_dim=16),
    "scale": LayerShape(2, 16, 1, AttentionOptions(scale=0.5)),
    "window-1": LayerShape(2, 16, 1, AttentionOptions().plus(Window(1))),
    "window-5": LayerShape(2, 16, 1, AttentionOptions().plus(Window(5))),
    "softcap": LayerShape(2, 16, 1, AttentionOptions(scale=1.0).plus(Softcap(2.0))),
    "softcap-window": LayerShape(4, 16, 2, AttentionOptions(scale=1.0).plus(Softcap(2.0), Window(7))),
    "chunk-5": LayerShape(2, 16, 1, AttentionOptions().plus(Chunk(5))),
    "chunk-8-softcap": LayerShape(4, 16, 2, AttentionOptions().plus(Chunk(8), Softcap(2.0))),
    "sinks": LayerShape(6, 16, 2, AttentionOptions().plus(SinkLogits(torch.linspace(-3.0, 4.0, 6)))),
    "sinks-window": LayerShape(
        4, 16, 2, AttentionOptions().plus(Window(7), SinkLogits(torch.linspace(-3.0, 4.0, 4)))
    ),
    "alibi": LayerShape(6, 16, 2, AttentionOptions().plus(Alibi(alibi_slopes(6)), Softcap(2.0))),
    "full": LayerShape(
        4, 16, 2, AttentionOptions(causal=False).plus(SinkLogits(torch.linspace(-3.0, 4.0, 4)))
    ),
    "window-full": LayerShape(2, 16, 1, AttentionOptions(causal=False).plus(Window(5))),
}


def on(shape: LayerShape, device: torch.device) -> LayerShape:
    """Returns `shape` with its sinks and slopes on `device`."""
    sinks, alibi = shape.options.of(SinkLogits), shape.options.of(Alibi)
    moved = shape.options.without(SinkLogits, Alibi).plus(
        None if sinks is None else SinkLogits(sinks.logits.to(device)),
        None if alibi is None else Alibi(alibi.slopes.to(device)),
    )
    return replace(shape, options=moved)


class History:
    """Every K and V so far, by row, as a dense cache would hold them."""

    def __init__(self, shape: LayerShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.v_dim = shape.v_dim or shape.head_dim
        spec = KVSpec(2, shape.num_kv_heads, shape.head_dim, self.v_dim, dtype)
        self.memory = KVMemory(spec, 400, MAX_SEQUENCES, 64, device)
        for layer_idx in range(2):
            self.memory.pool.kv(layer_idx)[1:] = float("nan")
        # Entries past a sequence's length are stale: here they name a slot that is never allocated.
        self.memory.table.req_to_token[1:] = 399
        self._free = (1 + torch.randperm(398)).to(device, torch.int32)
        self.k: dict[int, torch.Tensor] = {}
        self.v: dict[int, torch.Tensor] = {}

    def length(self, row: int) -> int:
        return len(self.k[row]) if row in self.k else 0

    def place(self, rows: list[int], counts: list[int]) -> list[int]:
        """Puts random slots for the step's tokens into the table. Returns where each row starts."""
        starts = [self.length(row) for row in rows]
        slots, self._free = self._free[: sum(counts)], self._free[sum(counts) :]
        entries = self.memory.table.entries(rows, starts, counts)
        self.memory.table.req_to_token.view(-1).index_copy_(
            0, torch.from_numpy(entries).to(slots.device), slots
        )
        return starts

    def append(self, rows: list[int], counts: list[int], k: torch.Tensor, v: torch.Tensor) -> None:
        for row, new_k, new_v in zip(rows, k.split(counts), v.split(counts), strict=True):
            self.k[row] = torch.cat([self.k[row], new_k]) if row in self.k else new_k
            self.v[row] = torch.cat([self.v[row], new_v]) if row in self.v else new_v

    def attend(self, row: int, q: torch.Tensor) -> torch.Tensor:
        """Computes attention of the last `len(q)` tokens of `row` in float64: `[n, num_heads, v_dim]`."""
        group = self.shape.num_heads // self.shape.num_kv_heads
        v = self.v[row].double().repeat_interleave(group, dim=1)
        return torch.einsum("hqk,khd->qhd", self.weights(row, q), v)

    def weights(self, row: int, q: torch.Tensor) -> torch.Tensor:
        """Computes how much each of these tokens attends to each entry: `[num_heads, n, entries]`."""
        options = self.shape.options
        group = self.shape.num_heads // self.shape.num_kv_heads
        k = self.k[row].double().repeat_interleave(group, dim=1)
        scale = self.shape.head_dim**-0.5 if options.scale is None else options.scale
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
        softcap, alibi, window, chunk, learned = (
            options.of(kind) for kind in (Softcap, Alibi, Window, Chunk, SinkLogits)
        )
        if softcap is not None:
            scores = softcap.cap * torch.tanh(scores / softcap.cap)
        key = torch.arange(len(k), device=k.device)
        query = key[-len(q) :, None]
        if alibi is not None:
            scores = scores + alibi.slopes.double()[:, None, None] * (key - query)
        hidden = (key > query) & options.causal
        if window is not None:
            hidden |= query - key >= window.size
        if chunk is not None:
            hidden |= query // chunk.size != key // chunk.size
        scores = scores.masked_fill(hidden, float("-inf"))
        if learned is None:
            return scores.softmax(-1)
        sinks = learned.logits.double()[:, None, None].expand(*scores.shape[:2], 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
