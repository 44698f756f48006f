"""Attention by the Triton kernels."""

import math
from typing import NamedTuple

import torch

from lightkv.memory.kv_spec import KVSpec
from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.attention_scores import attention_scores
from lightkv.triton_kernels.attention.decode.decode_attention import decode_attention
from lightkv.triton_kernels.attention.decode.decode_plan import DecodePlan, decode_plan, num_programs_for
from lightkv.triton_kernels.attention.lookups import TOKEN_TABLE, Lookup, RingRows
from lightkv.triton_kernels.attention.lookups.ring_sinks import dropped_tokens
from lightkv.triton_kernels.attention.merge_states import merge_states
from lightkv.triton_kernels.attention.mixed_attention import MixedPlan, mixed_attention, mixed_plan
from lightkv.triton_kernels.attention.paged_kv import HeadShape, PagedKV
from lightkv.triton_kernels.attention.prefill.fp8_prefill import fp8_prefill_reason, unknown_in_fp8
from lightkv.triton_kernels.attention.prefill.fp8_scratch import ALIGNMENT
from lightkv.triton_kernels.attention.prefill.prefill_combine import most_part_bytes
from lightkv.triton_kernels.attention.variants.sink_logits import SinkLogits
from lightkv.triton_kernels.attention.variants.variant import Variant, limits
from lightkv.triton_kernels.layout.ring import Ring
from lightkv.triton_kernels.quantised.kv_format import Elements, KVFormat
from lightkv.triton_kernels.write.head_tiles import constants_of
from lightkv.triton_kernels.write.write_kv import write_kv
from lightkv.triton_kernels.write.write_quantised import write_quantised_kv

from .backend import AttentionBackend, LayerShape
from .cross import CrossMetadata
from .metadata import AttentionMetadata
from .restored_prefill import RestoredPrefill, scratch_tokens
from .rotary import Rotary, RotaryEmbedding
from .step_plans import StepPlans


class _RingPlan(NamedTuple):
    """What the layers of a decode step over rings share."""

    decode: DecodePlan
    lookup: RingRows


class _RingParts(NamedTuple):
    """What they share where the sinks are attended to apart from the window: the keys of each part, and by how
    many positions queries are rotated back for the sinks."""

    sinks: DecodePlan
    sink_lengths: torch.Tensor
    window: DecodePlan
    window_lengths: torch.Tensor
    dropped: torch.Tensor


class TritonAttention(AttentionBackend):
    """Attention of one layer on CUDA. Any step can be captured in a CUDA graph, except prefills with
    sinks."""

    supports_cuda_graph = True

    def __init__(self, layer_idx: int, shape: LayerShape, rotary: Rotary | None = None) -> None:
        super().__init__(layer_idx, shape, rotary)
        self._fp8_q_scale: float | None = None  # of queries, where prefill is computed in fp8

    @property
    def prefix_members(self) -> int:
        if any(one.flags.is_short for one in self.options.variants):
            return 1
        return tuning.prefix_members(1, self.num_heads // self.num_kv_heads)

    def scratch_bytes(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> int:
        return most_part_bytes(tuning.device_class(device), self._heads, num_tokens, dtype.itemsize)

    def check_format(self, layer_format: KVFormat) -> None:
        constants_of(layer_format.k, self.head_dim)
        constants_of(layer_format.v, self.v_dim)

    def use_fp8_prefill(self, q_scale: float, spec: KVSpec, device: torch.device) -> None:
        reason, layer_format = fp8_prefill_reason(device, self._heads), spec.format.of_layer(self.layer_idx)
        if spec.dtype.itemsize != 2:
            reason = f"it is for models in 16 bits, and this one computes in {spec.dtype}"
        if not (layer_format.k.is_static and layer_format.v.is_static):
            reason = "it reads K and V in fp8 with static scales (fp8-static)"
        if not (math.isfinite(q_scale) and q_scale > 0):
            reason = f"the scale of queries is {q_scale}, and has to be finite and above 0"
        if unknown := unknown_in_fp8(self.options.variants):
            reason = f"it does not know {', '.join(unknown)}"
        if reason is not None:
            raise ValueError(f"layer {self.layer_idx} cannot compute prefill in fp8: {reason}")
        self._fp8_q_scale = q_scale

    @property
    def _heads(self) -> HeadShape:
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim, self.v_dim)

    def _write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        rotary: RotaryEmbedding | None,
    ) -> None:
        pool, slots = metadata.memory.pool, metadata.slot_mapping
        k_cache, v_cache = pool.k(self.layer_idx), pool.v(self.layer_idx)
        scales, layer_format = pool.scales(self.layer_idx), pool.format(self.layer_idx)
        if rotary is None:
            if scales is None:
                write_kv(k, v, k_cache, v_cache, slots)
            else:
                write_quantised_kv(k, v, k_cache, v_cache, scales, layer_format, slots)
            return
        cos, sin, interleaved = rotary.cos, rotary.sin, rotary.interleaved
        if scales is None:
            write_kv(k, v, k_cache, v_cache, slots, q=q, cos=cos, sin=sin, interleaved=interleaved)
        else:
            write_quantised_kv(
                k,
                v,
                k_cache,
                v_cache,
                scales,
                layer_format,
                slots,
                q=q,
                cos=cos,
                sin=sin,
                interleaved=interleaved,
            )

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        kv, q_starts = self.paged_kv(metadata), metadata.q_starts[: metadata.num_prefills + 1]
        q = self._rotated(q, kv.format.k, metadata)
        restored = self._restored(q, kv, q_starts, metadata)
        if restored is not None:
            q_starts = restored.pool_starts
        mixed_attention(
            q,
            kv,
            metadata.rows,
            q_starts,
            metadata.kv_lens,
            self.options.plus(metadata.mask),
            plan=self._plan(q, q_starts, metadata.kv_lens, metadata),
            out=out,
            decodes_first=metadata.decodes_first,
        )
        if restored is not None:  # after the decodes: prefills write over the output of unused ones
            if self._fp8_q_scale is None:
                restored.attend(q, kv, self.options, out)
            else:
                restored.attend_in_fp8(q, kv, self.options, out, self._fp8_q_scale)
        self._rotate_back(out, kv.format.v, metadata)

    def _rotated(self, heads: torch.Tensor, elements: Elements, metadata: AttentionMetadata) -> torch.Tensor:
        """Returns heads as the layer's stored ones are: rotated, where those are."""
        return metadata.memory.pool.rotate(heads) if elements.is_rotated else heads

    def _rotate_back(self, out: torch.Tensor, elements: Elements, metadata: AttentionMetadata) -> None:
        """Rotates the output of a layer back, where its V is rotated."""
        if elements.is_rotated:
            out.copy_(metadata.memory.pool.rotate(out))

    def _restored(
        self, q: torch.Tensor, kv: PagedKV, q_starts: torch.Tensor, metadata: AttentionMetadata
    ) -> RestoredPrefill | None:
        """Returns how the step's prefills read restored keys; None if they read the pool."""
        num_prefills, heads = metadata.num_prefills, self._heads
        plain = metadata.mask is None and kv.lookup.is_plain
        # On a GPU even a few queries read restored keys sooner: the general kernel unpacks them for each tile.
        if not (num_prefills and kv.format.is_quantised and plain and q.is_cuda and q.element_size() == 2):
            return None
        in_fp8 = self._fp8_q_scale is not None
        alignment = ALIGNMENT if in_fp8 else 1
        most = metadata.memory.capacity // alignment * alignment + num_prefills * alignment
        capacity = min(scratch_tokens(heads, torch.float8_e4m3fn if in_fp8 else q.dtype), most)

        def make() -> RestoredPrefill:
            return RestoredPrefill.make(
                metadata.rows[:num_prefills],
                metadata.kv_lens[:num_prefills],
                q_starts,
                heads,
                self.options,
                num_tokens=len(q),
                dtype=q.dtype,
                capacity=capacity,
                alignment=alignment,
            )

        key = "restored", *heads, self._limits, q.dtype, alignment
        return StepPlans.of(metadata).get(key, metadata.step, self.layer_idx, make)

    @property
    def _limits(self) -> tuple[bool, tuple[Variant, ...]]:
        """What the layer's plans depend on beside its heads."""
        return self.options.causal, limits(self.options.variants)

    def _format(self, metadata: AttentionMetadata) -> KVFormat:
        return metadata.memory.pool.format(self.layer_idx)

    def _plan(
        self, q: torch.Tensor, q_starts: torch.Tensor, lengths: torch.Tensor, metadata: AttentionMetadata
    ) -> MixedPlan:
        heads, layer_format = self._heads, self._format(metadata)
        shared_prefixes = metadata.shared_prefixes if self.prefix_members > 1 else None

        def make() -> MixedPlan:
            return mixed_plan(
                metadata.rows,
                q_starts,
                lengths,
                heads,
                num_tokens=len(q),
                dtype=q.dtype,
                options=self.options,
                shared_prefixes=shared_prefixes,
                decodes_first=metadata.decodes_first,
                layer_format=layer_format,
            )

        # Scratches in fp8 and in 16 bits have room for different numbers of keys, so q_starts may differ.
        in_fp8 = self._fp8_q_scale is not None
        shape = *heads, self._limits, q.dtype, shared_prefixes is not None, layer_format, in_fp8
        return StepPlans.of(metadata).get(shape, metadata.step, self.layer_idx, make)

    def _attend_with_sinks(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        num_sink_tokens, dropped = metadata.num_sink_tokens, metadata.dropped
        assert self.rotary is not None
        assert dropped is not None
        kv, num_tokens = self.paged_kv(metadata), len(q)
        partial_out = torch.empty((2, *out.shape), dtype=torch.float32, device=out.device)

        q_of_keys = self._rotated(q, kv.format.k, metadata)

        # The index without its first columns: a row without its sinks.
        q_starts, lengths = metadata.q_starts, metadata.kv_lens - num_sink_tokens
        lse = torch.empty((2, *q.shape[:2]), dtype=torch.float32, device=q.device)
        mixed_attention(
            q_of_keys,
            kv._replace(index=kv.index[:, num_sink_tokens:]),
            metadata.rows,
            q_starts,
            lengths,
            self.options,
            plan=self._plan(q, q_starts, lengths, metadata),
            out=partial_out[0],
            lse=lse[0],
        )

        # Every query sees all sink tokens, so to the decode kernels it is a request of its own. Learned sinks
        # join one of the two parts only.
        rotated = self._rotated(self.rotary.rotate_back(q, dropped), kv.format.k, metadata)
        rows = metadata.rows.repeat_interleave(metadata.q_lens_on_device, output_size=num_tokens)
        lengths = torch.full((num_tokens,), num_sink_tokens, dtype=torch.int32, device=q.device)
        options = self.options.without(SinkLogits)
        decode_attention(rotated, kv, rows, lengths, options, out=partial_out[1], lse=lse[1])
        merge_states(partial_out, lse, out=out)
        self._rotate_back(out, kv.format.v, metadata)

    def _attend_to_rings(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        kv, heads = self.paged_kv(metadata), self._heads
        ring, lengths = metadata.ring, metadata.kv_lens
        assert ring is not None
        rows = RingRows(ring)
        if ring.sinks and kv.format.k.is_rotated:
            self._attend_to_ring_parts(q, kv, ring, metadata, out)
            return

        def make() -> _RingPlan:
            plan = decode_plan(
                metadata.rows,
                lengths,
                num_kv_heads=heads.num_kv_heads,
                key_bytes=heads.key_bytes(q.dtype),
                num_programs=num_programs_for(heads, kv.format),
                limits=rows.limits(()),
            )
            if not ring.sinks:
                return _RingPlan(plan, rows)
            assert self.rotary is not None
            return _RingPlan(plan, rows.rotated(lengths, self.rotary.inverse))

        key = *heads, ring, q.dtype, kv.format
        plan = StepPlans.of(metadata).get(key, metadata.step, self.layer_idx, make)
        decode_attention(
            self._rotated(q, kv.format.k, metadata),
            kv._replace(lookup=plan.lookup),
            metadata.rows,
            lengths,
            self.options,
            plan=plan.decode,
            out=out,
        )
        self._rotate_back(out, kv.format.v, metadata)

    def _attend_to_ring_parts(
        self, q: torch.Tensor, kv: PagedKV, ring: Ring, metadata: AttentionMetadata, out: torch.Tensor
    ) -> None:
        """Attends to rings with sinks whose keys are stored rotated. A query is rotated back for the sinks
        before it is rotated as the keys are, which the kernel cannot do, so the two parts are merged here."""
        assert self.rotary is not None
        heads, lengths = self._heads, metadata.kv_lens
        # Without the columns of the sinks, a row is a ring without sinks.
        window = RingRows(Ring(0, ring.size, ring.stride))

        def plan_for(part_lengths: torch.Tensor, part: Lookup) -> DecodePlan:
            return decode_plan(
                metadata.rows,
                part_lengths,
                num_kv_heads=heads.num_kv_heads,
                key_bytes=heads.key_bytes(q.dtype),
                num_programs=num_programs_for(heads, kv.format),
                limits=part.limits(()),
            )

        def make() -> _RingParts:
            sink_lengths, window_lengths = lengths.clamp(max=ring.sinks), (lengths - ring.sinks).clamp(min=0)
            return _RingParts(
                plan_for(sink_lengths, TOKEN_TABLE),
                sink_lengths,
                plan_for(window_lengths, window),
                window_lengths,
                dropped_tokens(lengths, ring),
            )

        key = "parts", *heads, ring, q.dtype, kv.format
        parts = StepPlans.of(metadata).get(key, metadata.step, self.layer_idx, make)
        partial_out = torch.empty((2, *out.shape), dtype=torch.float32, device=out.device)
        lse = torch.empty((2, *q.shape[:2]), dtype=torch.float32, device=q.device)
        # Learned sinks join the part that always has keys.
        decode_attention(
            self._rotated(self.rotary.rotate_back(q, parts.dropped), kv.format.k, metadata),
            kv._replace(lookup=TOKEN_TABLE),
            metadata.rows,
            parts.sink_lengths,
            self.options,
            plan=parts.sinks,
            out=partial_out[0],
            lse=lse[0],
        )
        decode_attention(
            self._rotated(q, kv.format.k, metadata),
            kv._replace(index=kv.index[:, ring.sinks :], lookup=window),
            metadata.rows,
            parts.window_lengths,
            self.options.without(SinkLogits),
            plan=parts.window,
            out=partial_out[1],
            lse=lse[1],
        )
        merge_states(partial_out, lse, out=out)
        self._rotate_back(out, kv.format.v, metadata)

    def _attend_cross(self, q: torch.Tensor, cross: CrossMetadata, out: torch.Tensor) -> None:
        metadata, heads = cross.metadata, self._heads
        kv = self.cross_kv(metadata)
        q_starts = metadata.q_starts[: metadata.num_prefills + 1]

        def make() -> MixedPlan:
            return mixed_plan(
                cross.rows,
                q_starts,
                cross.kv_lens,
                heads,
                num_tokens=len(q),
                dtype=q.dtype,
                options=self.options,
                decodes_first=metadata.decodes_first,
                layer_format=kv.format,
            )

        plans = cross.plan if isinstance(cross.plan, StepPlans) else StepPlans()
        cross.plan = plans
        mixed_attention(
            self._rotated(q, kv.format.k, metadata),
            kv,
            cross.rows,
            q_starts,
            cross.kv_lens,
            self.options,
            plan=plans.get((*heads, q.dtype, kv.format), metadata.step, self.layer_idx, make),
            out=out,
            decodes_first=metadata.decodes_first,
        )
        self._rotate_back(out, kv.format.v, metadata)

    def _entry_scores(
        self, q: torch.Tensor, entries: torch.Tensor, width: int, metadata: AttentionMetadata
    ) -> torch.Tensor:
        kv = self.paged_kv(metadata)
        return attention_scores(
            self._rotated(q, kv.format.k, metadata),
            kv,
            metadata.rows,
            metadata.q_starts,
            entries,
            metadata.kv_lens,
            self.options.plus(metadata.mask),
            max_q_len=int(metadata.q_lens.max()),
            width=width,
        )
