"""What the attention operators share: where a layer's K/V is, its heads, and how the layer attends."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightkv.triton_kernels.quantised.kv_format import AS_COMPUTED, KVFormat
from lightkv.triton_kernels.quantised.quantise_reference import dequantise, split_columns
from lightkv.triton_kernels.quantised.unpack import format_code

from .ring import Ring


class PagedKV(NamedTuple):
    """K/V of one layer, and the index that finds a token in it: `index[row, pos >> shift] + (pos & mask)` is
    the slot of the token at position `pos` of a row, where `mask` is `2**shift - 1`.

    `k`: `[num_slots, num_kv_heads, Dk]`, `v`: `[num_slots, num_kv_heads, Dv]`, with any strides except that the
    last one is 1; both may be views of one buffer. Two elements of 4 bits share a byte, so there the last dim
    is half of Dk or Dv.
    `index`: int32 `[num_rows, num_entries]`, the first slot of each `2**shift` tokens of a row.
    `shift`: 0 for a token table, log2(page) for a page table, 31 for one contiguous run per row.
    `ring`: the rows are rings, so `pos` above is the entry of a position. None: they are not.
    `indirection`: int32 `[num_rows, positions]`: the token at a position of row r is found in row
    `indirection[r, position]` of the index instead (`beam_indirection` makes it). None for r itself.
    `format`: how K and V are stored. Where K is rotated, queries have to be, too, and where V is rotated, so is
    the output (`rotate_heads`).
    `scales`: `[num_slots, num_kv_heads, columns]` of `format.scale_dtype`, the last stride 1: the scales and
    middles of K, and those of V. A stride of 0 for slots stands for static scales. None if nothing is
    quantised.
    `v_scales`: where V's stand apart from K's, those of V, with the strides of `scales`, which has K's alone
    then; both are float32 or float16, whatever `format.scale_dtype` says. None where they stand beside K's.
    """

    k: Tensor
    v: Tensor
    index: Tensor  # type: ignore[assignment]  # hides the method of tuples
    shift: int = 0
    ring: Ring | None = None
    indirection: Tensor | None = None
    scales: Tensor | None = None
    format: KVFormat = AS_COMPUTED
    v_scales: Tensor | None = None

    @property
    def key_dim(self) -> int:
        """The dims of a head of K."""
        return self.k.shape[2] * (2 if self.format.k.bits == 4 else 1)

    @property
    def value_dim(self) -> int:
        """The dims of a head of V."""
        return self.v.shape[2] * (2 if self.format.v.bits == 4 else 1)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns K and V of slots, int64 `[n]`, `[n, num_kv_heads, Dk]` and `[n, num_kv_heads, Dv]`, in plain
        torch: float32 where quantised, and rotated heads as they are stored."""
        k, v = self.k[slots], self.v[slots]
        if self.scales is None:
            return k, v
        if self.v_scales is None:
            of_k, of_v = split_columns(self.scales[slots], self.format, self.key_dim)
        else:
            of_k, of_v = self.scales[slots], self.v_scales[slots]
        if self.format.k.is_quantised:
            k = dequantise(k, of_k, self.format.k)
        if self.format.v.is_quantised:
            v = dequantise(v, of_v, self.format.v)
        return k, v

    @property
    def format_code(self) -> int:
        """The number that kernels are compiled for, `unpack.format_code`."""
        return format_code(self.format, self.key_dim, self.value_dim, apart=self.v_scales is not None)

    @property
    def ring_sizes(self) -> list[int]:
        """Sinks and size of the ring, as the operators take them; zeros without a ring."""
        return [0, 0] if self.ring is None else [self.ring.sinks, self.ring.size]


class HeadShape(NamedTuple):
    """The heads of a layer: their numbers, and the dims of a head of q and K, and of V."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, q: Tensor, kv: PagedKV) -> "HeadShape":
        """Returns the heads of q `[T, num_heads, key_dim]` and of `kv`."""
        return cls(q.shape[1], kv.k.shape[1], q.shape[2], kv.value_dim)

    def key_bytes(self, dtype: torch.dtype, layer_format: KVFormat = AS_COMPUTED) -> int:
        """Returns the bytes of K and V of a token for one K/V head, computed in `dtype`."""
        return layer_format.k.head_bytes(self.key_dim, dtype) + layer_format.v.head_bytes(
            self.value_dim, dtype
        )


def beam_indirection(cache_indirection: Tensor, rows: Tensor, out: Tensor) -> None:
    """Writes the indirection of beams' rows to `out`, from a table of beams as TensorRT-LLM's decode takes it.

    Everything is read on the device, so a captured call may be replayed.

    Args:
        cache_indirection: int32 `[batch, beams, positions]`, the beam of the same request whose K/V a beam has
            at each position. Unlike in TensorRT-LLM, this holds for a beam's newest token, too: its K/V is the
            beam's own, so its number is that of the beam.
        rows: int64 `[batch, beams]`, the row of the index that each beam writes to.
        out: int32 `[num_rows, positions]`, `PagedKV.indirection`, of which the rows in `rows` are written.

    Raises:
        ValueError: shapes or dtypes do not fit. Nothing is written then. The numbers are not checked.
    """
    if (
        cache_indirection.dim() != 3
        or cache_indirection.dtype != torch.int32
        or rows.shape != cache_indirection.shape[:2]
        or rows.dtype != torch.int64
        or out.dim() != 2
        or out.dtype != torch.int32
        or out.shape[1] != cache_indirection.shape[2]
    ):
        raise ValueError(
            "cache_indirection must be int32 [batch, beams, positions], rows int64 [batch, beams] and out "
            f"int32 [num_rows, positions]; got {cache_indirection.dtype} {tuple(cache_indirection.shape)}, "
            f"{rows.dtype} {tuple(rows.shape)} and {out.dtype} {tuple(out.shape)}"
        )
    batch, beams, positions = cache_indirection.shape
    chosen = rows[:, None].expand(batch, beams, beams).gather(2, cache_indirection.long())
    out.index_copy_(0, rows.flatten(), chosen.view(batch * beams, positions).int())


ALL_AFTER = 2**30  # more tokens than a request has; positions plus this fit in int32


class AttentionOptions(NamedTuple):
    """How a layer attends.

    `scale`: multiplies q·k, positive; None stands for head_dim ** -0.5.
    `window`: a query attends to itself and to the `window - 1` tokens before it; 0 for all tokens before it.
    `softcap`: scores become softcap * tanh(score / softcap); 0 for no cap.
    `chunk`: a query at position p attends to the tokens from p // chunk * chunk to p, as in Llama-4; 0 for all
    tokens before it. A layer has no window and chunks at once.
    `sink_logits`: float32 `[num_heads]`, contiguous, a score of each query head that joins the softmax's sum
    and has no value, as in gpt-oss: it is neither scaled nor capped. None for no sinks. A log-sum-exp contains
    it, so of several results that are merged, only one may have sinks.
    `alibi_slopes`: float32 `[num_heads]`, contiguous: slope * (key position - query position) is added to the
    scaled and capped score, as in ALiBi (`alibi.alibi_slopes`), also for keys after the query. None for none.
    `causal`: whether a query sees no key after itself. False: it sees all keys of its request, as in an
    encoder, or as with the keys of another sequence (cross attention), where positions mean nothing.
    `window_after`: with `causal` False, how many tokens after itself a query sees; 0 for all.
    """

    scale: float | None = None
    window: int = 0
    softcap: float = 0.0
    chunk: int = 0
    sink_logits: Tensor | None = None
    alibi_slopes: Tensor | None = None
    causal: bool = True
    window_after: int = 0

    @property
    def after(self) -> int:
        """How many tokens after itself a query sees: 0 if causal, `ALL_AFTER` for all."""
        return 0 if self.causal else self.window_after or ALL_AFTER

    def scale_for(self, head_dim: int) -> float:
        """Returns `scale`, or its default for heads of `head_dim`."""
        return head_dim**-0.5 if self.scale is None else self.scale


DEFAULT_OPTIONS = AttentionOptions()
