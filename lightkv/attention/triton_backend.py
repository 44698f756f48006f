"""Attention by the Triton kernels."""

import math
from collections.abc import Hashable

import numpy as np
import torch

from lightkv.memory.kv_spec import KVSpec
from lightkv.memory.staging import upload
from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.decode import decode_tuning
from lightkv.triton_kernels.attention.decode.decode_attention import decode_attention
from lightkv.triton_kernels.attention.merge_states import merge_states
from lightkv.triton_kernels.attention.mixed_attention import MixedPlan, mixed_attention, mixed_plan
from lightkv.triton_kernels.attention.paged_kv import HeadShape, PagedKV
from lightkv.triton_kernels.attention.prefill.fp8_prefill import fp8_prefill_reason, unknown_in_fp8
from lightkv.triton_kernels.attention.prefill.prefill_combine import most_partial_bytes
from lightkv.triton_kernels.attention.prefill.restore_kv import ALIGNMENT, FP8
from lightkv.triton_kernels.attention.variants.sink_logits import SinkLogits
from lightkv.triton_kernels.attention.variants.variant import Variant, limits
from lightkv.triton_kernels.quantised.kv_format import KVFormat
from lightkv.triton_kernels.write.head_tiles import constants_of
from lightkv.triton_kernels.write.inputs import Changes, Rotation
from lightkv.triton_kernels.write.write_kv import write_kv

from .backend import AttentionBackend, LayerShape, NewHeads
from .restored_prefill import RestoredPrefill, scratch_tokens
from .rotary import Rotary, RotaryEmbedding
from .step import Step


class TritonAttention(AttentionBackend):
    """Attention of one layer on CUDA. A step of any form that `Form.is_static` can be captured in a CUDA
    graph."""

    supports_cuda_graph = True

    def __init__(self, layer_idx: int, shape: LayerShape, rotary: Rotary | None = None) -> None:
        super().__init__(layer_idx, shape, rotary)
        self._fp8_q_scale: float | None = None  # of queries, where prefill is computed in fp8

    @property
    def kind(self) -> tuple[Hashable, ...]:
        return *super().kind, self._fp8_q_scale is not None

    @property
    def prefix_members(self) -> int:
        if any(one.flags.is_short for one in self.options.variants):
            return 1
        return decode_tuning.prefix_members(1, self.num_heads // self.num_kv_heads)

    def scratch_bytes(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> int:
        return most_partial_bytes(tuning.device_class(device), self.heads, num_tokens, dtype.itemsize)

    def check_format(self, layer_format: KVFormat) -> None:
        for dim in (self.head_dim, self.v_dim):
            constants_of(layer_format.elements, dim)

    def use_fp8_prefill(self, q_scale: float, spec: KVSpec, device: torch.device) -> None:
        reason, layer_format = fp8_prefill_reason(device, self.heads), spec.format_of(self.layer_idx)
        if spec.dtype.itemsize != 2:
            reason = f"it is for models in 16 bits, and this one computes in {spec.dtype}"
        if not layer_format.is_static:
            reason = "it reads K and V in fp8 with static scales (fp8-static)"
        if not (math.isfinite(q_scale) and q_scale > 0):
            reason = f"the scale of queries is {q_scale}, and has to be finite and above 0"
        if unknown := unknown_in_fp8(self.options.variants):
            reason = f"it does not know {', '.join(unknown)}"
        if reason is not None:
            raise ValueError(f"layer {self.layer_idx} cannot compute prefill in fp8: {reason}")
        self._fp8_q_scale = q_scale

    @property
    def heads(self) -> HeadShape:
        """The layer's heads."""
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim, self.v_dim)

    def _write(self, new: NewHeads, step: Step, rotary: RotaryEmbedding | None) -> None:
        stored, slots = step.memory.pool.stored(self.layer_idx), step.slots_of(self.layer_idx)
        if rotary is None:
            write_kv(new.k, new.v, stored, slots)
        else:
            rotation = Rotation(rotary.cos, rotary.sin, rotary.interleaved)
            write_kv(new.k, new.v, stored, slots, new.q, Changes(rotation, norms=rotary.norms))

    def _attend(self, q: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        if step.form.num_sinks and step.lookup.is_plain:
            self._attend_apart(q, step, out)
            return
        kv, q_starts = self.paged_kv(step), step.q_starts[: step.host.num_prefills + 1]
        if step.form.num_sinks and not limits(self.options.variants):
            assert self.rotary is not None
            # Queries of decodes are rotated back for the sinks.
            plain, inverse, key = kv.lookup, self.rotary.inverse, ("rotated", self.head_dim)
            rotated = step.plans.get(key, self.layer_idx, lambda: plain.rotated(step.kv_lens, inverse))
            kv = kv._replace(lookup=rotated)
        q = self._as_stored(q, kv.format, step)
        restored = self._restored(q, kv, q_starts, step)
        if restored is not None:
            q_starts = restored.pool_starts
        mixed_attention(
            q,
            kv,
            step.rows,
            q_starts,
            step.kv_lens,
            self.options.plus(step.mask),
            plan=self.mixed_plan(q, q_starts, step.kv_lens, step),
            out=out,
            decodes_first=step.host.decodes_first,
        )
        if restored is not None:  # after the decodes: prefills write over the output of unused ones
            restored.attend(q, kv, self.options, out, self._fp8_q_scale)
        self._restore_heads(out, kv.format, step)

    def _attend_apart(self, q: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        """Attends from prefills twice: from q to the entries after the sinks, and, rotated back by what its
        sequence has dropped, to the sinks. The two are merged, which is one softmax over both."""
        assert self.rotary is not None
        form, kv, num_tokens = step.form, self.paged_kv(step), len(q)
        num_sinks, counts = form.num_sinks, step.host.counts
        partial_out = torch.empty((2, *out.shape), dtype=torch.float32, device=out.device)
        lse = torch.empty((2, *q.shape[:2]), dtype=torch.float32, device=q.device)

        # The index without its first columns: a row without its sinks.
        lengths = step.kv_lens - num_sinks
        mixed_attention(
            self._as_stored(q, kv.format, step),
            kv._replace(index=kv.index[:, num_sinks:]),
            step.rows,
            step.q_starts,
            lengths,
            self.options,
            plan=self.mixed_plan(q, step.q_starts, lengths, step),
            out=partial_out[0],
            lse=lse[0],
        )

        # Every query sees all sink tokens, so to the decode kernels it is a request of its own. Learned sinks
        # join one of the two parts only.
        def make() -> torch.Tensor:
            lengths = enumerate(step.host.kv_lens.tolist())
            dropped = np.array([form.dropped_by(idx, length) for idx, length in lengths])
            return upload([np.repeat(dropped, counts)], step.memory.device)[0]

        rotated = self.rotary.rotate_back(q, step.plans.get("dropped", self.layer_idx, make))
        decode_attention(
            self._as_stored(rotated, kv.format, step),
            kv,
            step.rows.repeat_interleave(step.q_lens, output_size=num_tokens),
            torch.full((num_tokens,), num_sinks, dtype=torch.int32, device=q.device),
            self.options.without(SinkLogits),
            out=partial_out[1],
            lse=lse[1],
        )
        merge_states(partial_out, lse, out=out)
        self._restore_heads(out, kv.format, step)

    def _as_stored(self, heads: torch.Tensor, layer_format: KVFormat, step: Step) -> torch.Tensor:
        """Returns heads as the layer's stored ones are: multiplied by a Hadamard matrix, where those are."""
        return step.memory.pool.apply_hadamard(heads) if layer_format.elements.has_hadamard else heads

    def _restore_heads(self, out: torch.Tensor, layer_format: KVFormat, step: Step) -> None:
        """Takes the Hadamard matrix out of the output of a layer whose V was multiplied by it."""
        if layer_format.elements.has_hadamard:
            out.copy_(step.memory.pool.apply_hadamard(out))

    def _restored(
        self, q: torch.Tensor, kv: PagedKV, q_starts: torch.Tensor, step: Step
    ) -> RestoredPrefill | None:
        """Returns how the step's prefills read restored keys; None if they read the pool."""
        num_prefills, heads = step.host.num_prefills, self.heads
        plain = step.mask is None and step.lookup.is_plain
        # On a GPU even a few queries read restored keys sooner: the general kernel unpacks them for each tile.
        if not (num_prefills and kv.format.is_quantised and plain and q.is_cuda and q.element_size() == 2):
            return None
        in_fp8 = self._fp8_q_scale is not None
        alignment = ALIGNMENT if in_fp8 else 1
        most = step.memory.capacity // alignment * alignment + num_prefills * alignment
        capacity = min(scratch_tokens(heads, FP8 if in_fp8 else q.dtype), most)

        def make() -> RestoredPrefill:
            return RestoredPrefill.make(
                step.rows[:num_prefills],
                step.kv_lens[:num_prefills],
                q_starts,
                heads,
                self.options,
                num_tokens=len(q),
                dtype=q.dtype,
                capacity=capacity,
                alignment=alignment,
            )

        return step.plans.get(("restored", *heads, self._limits, q.dtype, alignment), self.layer_idx, make)

    @property
    def _limits(self) -> tuple[bool, tuple[Variant, ...]]:
        """What the layer's plans depend on beside its heads."""
        return self.options.causal, limits(self.options.variants)

    def mixed_plan(
        self, q: torch.Tensor, q_starts: torch.Tensor, lengths: torch.Tensor, step: Step
    ) -> MixedPlan:
        """Returns the work list of the step for layers of this shape. `q_starts`: of the prefills; `lengths`:
        the keys of each sequence."""
        heads, layer_format = self.heads, step.memory.pool.format(self.layer_idx)
        shared_prefixes = step.shared_prefixes if self.prefix_members > 1 else None

        def make() -> MixedPlan:
            return mixed_plan(
                step.rows,
                q_starts,
                lengths,
                heads,
                num_tokens=len(q),
                dtype=q.dtype,
                options=self.options,
                shared_prefixes=shared_prefixes,
                decodes_first=step.host.decodes_first,
                layer_format=layer_format,
                lookup=step.lookup,
            )

        # Scratches in fp8 and in 16 bits have room for different numbers of keys, so q_starts may differ.
        in_fp8 = self._fp8_q_scale is not None
        shape = *heads, self._limits, q.dtype, shared_prefixes is not None, layer_format, in_fp8
        return step.plans.get(shape, self.layer_idx, make)
