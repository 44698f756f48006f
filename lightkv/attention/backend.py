"""What every attention backend does in a layer: write this step's K/V to the pool, then attend."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from lightkv.memory.kv_spec import KVSpec
from lightkv.triton_kernels.attention.lookups.ring_rows import check_held
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, AttentionOptions, PagedKV
from lightkv.triton_kernels.attention.variants.variant import limits
from lightkv.triton_kernels.quantised.kv_format import KVFormat

from .cross import CrossMetadata
from .metadata import AttentionMetadata
from .rotary import Rotary, RotaryEmbedding


@dataclass(frozen=True)
class LayerShape:
    """The heads of one layer's attention and how it attends. `head_dim` is the dim of q and k per head, `v_dim`
    that of v (None: the same)."""

    num_heads: int
    head_dim: int
    num_kv_heads: int
    options: AttentionOptions = DEFAULT_OPTIONS
    v_dim: int | None = None

    def __post_init__(self) -> None:
        if min(self.num_heads, self.head_dim, self.num_kv_heads) < 1:
            raise ValueError(
                f"heads and head dim must be positive; got {self.num_heads} heads of {self.head_dim} dims and "
                f"{self.num_kv_heads} K/V heads"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads do not share {self.num_kv_heads} K/V heads evenly")


class AttentionBackend(ABC):
    """Attention of one layer over the pool, for packed batches of prefills and decodes.

    `layer_idx` is the layer's number in the pool. `rotary` holds the frequencies that q and k are rotated by;
    only steps with sinks need it.
    """

    supports_cuda_graph = False  # True: decode reads lengths on the device, so a captured step follows them

    def __init__(self, layer_idx: int, shape: LayerShape, rotary: Rotary | None = None) -> None:
        self.layer_idx = layer_idx
        self.num_heads = shape.num_heads
        self.head_dim = shape.head_dim
        self.num_kv_heads = shape.num_kv_heads
        self.v_dim = shape.v_dim or shape.head_dim
        self.scale = shape.options.scale_for(shape.head_dim)
        self.options = shape.options._replace(scale=self.scale)
        self.rotary = rotary

    @property
    def prefix_members(self) -> int:
        """How many decodes that share a prefix are attended with one reading of it; 1 if the backend never
        reads a prefix for several decodes."""
        return 1

    def scratch_bytes(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> int:
        """Returns how many bytes, beside `out`, the layer's attention needs on `device` while it computes up to
        `num_tokens` queries of `dtype`, as far as they are worth counting. The next layer uses the same."""
        return 0

    def check_format(self, layer_format: KVFormat) -> None:  # noqa: B027 - a backend may take every format
        """Raises ValueError for a format of the layer's K/V that this backend cannot attend to."""

    def use_fp8_prefill(self, q_scale: float, spec: KVSpec, device: torch.device) -> None:
        """Has the layer compute prefill in fp8 over a pool of `spec` on `device`, with queries in units of
        `q_scale`. Raises ValueError if it cannot."""
        raise ValueError(
            f"{type(self).__name__} has no prefill in fp8; the triton backend has, on Hopper GPUs"
        )

    def paged_kv(self, metadata: AttentionMetadata) -> PagedKV:
        """Returns the layer's K/V in the pool, with the step's index."""
        kv = self.cross_kv(metadata)
        return kv._replace(index=metadata.index, lookup=metadata.lookup)

    def cross_kv(self, metadata: AttentionMetadata) -> PagedKV:
        """Returns the layer's K/V in the pool, with the token table, in which cross sequences have rows."""
        pool, layer_idx = metadata.memory.pool, self.layer_idx
        return PagedKV(
            pool.k(layer_idx),
            pool.v(layer_idx),
            metadata.memory.table.req_to_token,
            scales=pool.scales(layer_idx),
            format=pool.format(layer_idx),
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        rotary: RotaryEmbedding | None = None,
    ) -> torch.Tensor:
        """Writes k and v to the slots `metadata.slot_mapping`, then attends from q.

        Args:
            q: `[num_tokens, num_heads * head_dim]` on the pool's device, or with the heads as a dimension of
                its own; likewise k and v.
            k: `[num_tokens, num_kv_heads * head_dim]`.
            v: `[num_tokens, num_kv_heads * v_dim]`.
            metadata: the step's.
            rotary: rotates q and k, where they arrive without positions; None where positions are applied
                already. q is then rotated in place, so that it is what `entry_scores` takes, and k may be, too.

        Returns:
            `[num_tokens, num_heads * v_dim]` of q's type.

        Raises:
            ValueError: the step has sink tokens, and the layer has windows, chunks or ALiBi, is not causal, or
                was made without `rotary`; or it is over rings that are smaller than the layer's window (for
                prefills, `Ring.least_held` is), or the layer has chunks. Nothing is written then.
        """
        options, ring = self.options, metadata.ring
        num_sink_tokens = metadata.num_sink_tokens if ring is None else ring.sinks
        if ring is not None:
            check_held(ring, options.variants)
        if metadata.ring_in_order is not None:
            check_held(metadata.ring_in_order, options.variants, metadata.ring_in_order.least_held)
        if num_sink_tokens and (self.rotary is None or options.counts_positions):
            raise ValueError(
                f"a step with {num_sink_tokens} sinks needs the rotary frequencies (rotary) and a "
                f"causal layer without a window, chunks or ALiBi; layer {self.layer_idx} has "
                f"{options.variants}, causal {options.causal}"
            )
        num_tokens = metadata.num_tokens
        q = q.view(num_tokens, self.num_heads, self.head_dim)
        k = k.view(num_tokens, self.num_kv_heads, self.head_dim)
        v = v.view(num_tokens, self.num_kv_heads, self.v_dim)
        out = q.new_empty(num_tokens, self.num_heads, self.v_dim)
        self._write(q, k, v, metadata, rotary)
        if ring is not None and not limits(options.variants):
            self._attend_to_rings(q, metadata, out)
        elif metadata.num_sink_tokens:
            self._attend_with_sinks(q, metadata, out)
        else:
            self._attend(q, k, v, metadata, out)
        return out.flatten(1)

    def write_cross(
        self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, metadata: AttentionMetadata
    ) -> None:
        """Writes a cross sequence's K and V, `[n, num_kv_heads * head_dim]` and `[n, num_kv_heads * v_dim]`, to
        its slots, int `[n]` on the pool's device (`KVCache.open_cross`). Later steps only read them. Raises
        ValueError for other numbers of tokens or dims; nothing is written then."""
        pool, num_tokens, heads = metadata.memory.pool, len(slots), self.num_kv_heads
        for name, new, dim in (("k", k, self.head_dim), ("v", v, self.v_dim)):
            if len(new) != num_tokens or new.numel() != num_tokens * heads * dim:
                raise ValueError(
                    f"{name} of {num_tokens} slots must be [{num_tokens}, {heads * dim}], got "
                    f"{tuple(new.shape)}"
                )
        k, v = k.reshape(num_tokens, heads, self.head_dim), v.reshape(num_tokens, heads, self.v_dim)
        pool.write(self.layer_idx, slots.long(), k, v)

    def cross(self, q: torch.Tensor, cross: CrossMetadata) -> torch.Tensor:
        """Attends from q, `[num_tokens, num_heads * head_dim]`, to all tokens of the cross sequence that each
        sequence reads. Their K/V is in the slots of `KVCache.open_cross` already. Returns `[num_tokens,
        num_heads * v_dim]`. Raises ValueError for a layer that is causal or has a window."""
        options = self.options
        if options.causal or options._replace(causal=True).counts_positions:
            raise ValueError(
                f"layer {self.layer_idx} attends to another sequence, so it sees all of its tokens, which have "
                f"no distance: make it with causal=False, and no windows, chunks or ALiBi; it has {options}"
            )
        q = q.view(cross.metadata.num_tokens, self.num_heads, self.head_dim)
        out = q.new_empty(len(q), self.num_heads, self.v_dim)
        self._attend_cross(q, cross, out)
        return out.flatten(1)

    def entry_scores(self, q: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Computes how much this step's queries attend to each entry: probabilities, summed over queries and
        heads.

        q is as for `forward`, which has to run first because it writes the keys. Returns float32 `[B,
        longest]`, zero past a sequence's entries. Raises ValueError for a step with sinks, over rings, or with
        an indirection.
        """
        if not metadata.lookup.is_plain:
            raise ValueError(
                f"a step whose tokens {type(metadata.lookup).__name__} finds is not scored by entries; use "
                "rows that hold their own tokens in order"
            )
        if metadata.num_sink_tokens:
            raise ValueError(
                f"a step with {metadata.num_sink_tokens} sinks attends to them from other positions, which are "
                "not scored; evict by the window alone"
            )
        entries = metadata.position_ids
        if metadata.dropped is not None:
            entries = entries - metadata.dropped
        width = int(metadata.kv_lens_host.max(initial=0))
        q = q.view(metadata.num_tokens, self.num_heads, self.head_dim)
        return self._entry_scores(q, entries.int(), width, metadata)

    @abstractmethod
    def _write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        rotary: RotaryEmbedding | None,
    ) -> None:
        """Writes this step's K/V to its slots, k rotated by `rotary`, and rotates q in place.

        `_attend` gets k as `_write` leaves it: a backend that reads k there has to rotate it in place, too.
        """

    @abstractmethod
    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Writes the attention of all tokens to `out`. k and v are this step's, and are in the pool already."""

    @abstractmethod
    def _attend_with_sinks(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        """Writes the attention of all tokens, which belong to prefills, to `out`, in a step with sinks.

        Two results are merged: q's over the entries after the sinks, causally, and that of q, rotated back by
        the number of dropped tokens, over the sinks.
        """

    @abstractmethod
    def _attend_to_rings(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        """Writes the attention of all tokens, decodes whose rows are rings, to `out`: q attends to a ring's
        window, and, rotated back by the tokens that were dropped, to its sinks."""

    @abstractmethod
    def _attend_cross(self, q: torch.Tensor, cross: CrossMetadata, out: torch.Tensor) -> None:
        """Writes the attention of all tokens to their cross sequences to `out`."""

    @abstractmethod
    def _entry_scores(
        self, q: torch.Tensor, entries: torch.Tensor, width: int, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Computes the scores of q `[num_tokens, num_heads, head_dim]` at `entries` int32 `[num_tokens]`:
        float32 `[B, width]`."""
