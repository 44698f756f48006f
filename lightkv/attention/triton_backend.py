"""Attention by the Triton kernels. Knows their arguments, and nothing of how they work."""

from collections.abc import Callable, Hashable

import torch

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.attention_scores import attention_scores
from lightkv.triton_kernels.attention.decode_attention import decode_attention
from lightkv.triton_kernels.attention.merge_states import merge_states
from lightkv.triton_kernels.attention.mixed_attention import MixedPlan, mixed_attention, mixed_plan
from lightkv.triton_kernels.write_kv import write_kv

from .backend import AttentionBackend
from .metadata import AttentionMetadata
from .rotary import RotaryEmbedding


class _StepPlans:
    """The work lists of a step, each made by the first layer that needs it: by what it depends on of a layer.

    When that layer comes again, another step has begun, be it a replay's: so a list is made within each pass,
    and a graph that captures a pass has it too.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[int, int, MixedPlan]] = {}

    def get(self, key: Hashable, step: int, layer_idx: int, make: Callable[[], MixedPlan]) -> MixedPlan:
        """The lists for `layer_idx` in a step."""
        made = self._made.get(key)
        if made is None or made[0] != step or made[1] == layer_idx:
            made = self._made[key] = step, layer_idx, make()
        return made[2]

    @staticmethod
    def of(metadata: AttentionMetadata) -> "_StepPlans":
        """Those of `metadata`'s steps."""
        if not isinstance(metadata.plan, _StepPlans):
            metadata.plan = _StepPlans()
        return metadata.plan


class TritonAttention(AttentionBackend):
    """One layer's attention on CUDA. The decode path can be captured in a CUDA graph."""

    supports_cuda_graph = True

    @property
    def group_members(self) -> int:
        return 1 if self.window else tuning.group_members(1, self.num_heads // self.num_kv_heads)

    def _write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        rotary: RotaryEmbedding | None,
    ) -> None:
        pool = metadata.kv_cache_manager.pool
        k_cache, v_cache, slots = pool.k(self.layer_idx), pool.v(self.layer_idx), metadata.slot_mapping
        if rotary is None:
            write_kv(k, v, k_cache, v_cache, slots)
        else:
            cos, sin, interleaved = rotary.cos, rotary.sin, rotary.interleaved
            write_kv(k, v, k_cache, v_cache, slots, q=q, cos=cos, sin=sin, interleaved=interleaved)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        memory = metadata.kv_cache_manager
        q_starts = metadata.q_starts[: metadata.num_prefills + 1]
        mixed_attention(
            q,
            memory.pool.k(self.layer_idx),
            memory.pool.v(self.layer_idx),
            memory.table.req_to_token,
            metadata.rows,
            q_starts,
            metadata.kv_lens,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            plan=self._plan(q, q_starts, metadata.kv_lens, metadata),
            out=out,
        )

    def _plan(
        self, q: torch.Tensor, q_starts: torch.Tensor, lengths: torch.Tensor, metadata: AttentionMetadata
    ) -> MixedPlan:
        groups = metadata.groups if self.group_members > 1 else None

        def make() -> MixedPlan:
            return mixed_plan(
                metadata.rows,
                q_starts,
                lengths,
                num_tokens=len(q),
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                key_dim=self.head_dim,
                value_dim=self.v_dim,
                dtype=q.dtype,
                window=self.window,
                groups=groups,
            )

        heads = self.num_heads, self.num_kv_heads, self.head_dim, self.v_dim
        shape = *heads, self.window, q.dtype, groups is not None
        return _StepPlans.of(metadata).get(shape, metadata.step, self.layer_idx, make)

    def _attend_with_sinks(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        memory, num_sinks, dropped = metadata.kv_cache_manager, metadata.num_sinks, metadata.dropped
        assert self.rotary is not None
        assert dropped is not None
        k, v = memory.pool.k(self.layer_idx), memory.pool.v(self.layer_idx)
        table = memory.table.req_to_token
        num_tokens = len(q)
        scale, softcap = self.scale, self.softcap
        partial_out = torch.empty((2, *out.shape), dtype=torch.float32, device=out.device)

        # A row without its sinks is the row, read from there on.
        q_starts, lengths = metadata.q_starts, metadata.kv_lens - num_sinks
        lse = torch.empty((2, *q.shape[:2]), dtype=torch.float32, device=q.device)
        mixed_attention(
            q,
            k,
            v,
            table[:, num_sinks:],
            metadata.rows,
            q_starts,
            lengths,
            scale=scale,
            softcap=softcap,
            plan=self._plan(q, q_starts, lengths, metadata),
            out=partial_out[0],
            lse=lse[0],
        )

        # Every query sees all the sinks: to the kernels, a request of its own.
        turned = self.rotary.rotate_back(q, dropped)
        rows = metadata.rows.repeat_interleave(metadata.seq_lens_cuda, output_size=num_tokens)
        lengths = torch.full((num_tokens,), num_sinks, dtype=torch.int32, device=q.device)
        decode_attention(
            turned, k, v, table, rows, lengths, out=partial_out[1], lse=lse[1], scale=scale, softcap=softcap
        )
        merge_states(partial_out, lse, out=out)

    def _entry_scores(
        self, q: torch.Tensor, entries: torch.Tensor, width: int, metadata: AttentionMetadata
    ) -> torch.Tensor:
        memory = metadata.kv_cache_manager
        return attention_scores(
            q,
            memory.pool.k(self.layer_idx),
            memory.table.req_to_token,
            metadata.rows,
            metadata.q_starts,
            entries,
            metadata.kv_lens,
            max_q_len=int(metadata.seq_lens.max()),
            width=width,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )
