"""Attention by the Triton kernels. Knows their arguments, and nothing of how they work."""

import torch

from lightkv.triton_kernels.decode_attention import decode_attention
from lightkv.triton_kernels.prefill_attention import prefill_attention
from lightkv.triton_kernels.write_kv import write_kv

from .backend import AttentionBackend
from .metadata import AttentionMetadata


class TritonAttention(AttentionBackend):
    """One layer's attention on CUDA. The decode path can be captured in a CUDA graph."""

    supports_cuda_graph = True

    def _write(self, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> None:
        pool = metadata.kv_cache_manager.pool
        write_kv(k, v, pool.k(self.layer_idx), pool.v(self.layer_idx), metadata.slot_mapping)

    def _prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        memory, num_contexts = metadata.kv_cache_manager, metadata.num_contexts
        prefill_attention(
            q,
            memory.pool.k(self.layer_idx),
            memory.pool.v(self.layer_idx),
            memory.table.req_to_token,
            metadata.rows[:num_contexts],
            metadata.q_starts[: num_contexts + 1],
            metadata.kv_lens[:num_contexts],
            max_q_len=metadata.max_q_len,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            out=out,
        )

    def _decode(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        memory, num_contexts = metadata.kv_cache_manager, metadata.num_contexts
        decode_attention(
            q,
            memory.pool.k(self.layer_idx),
            memory.pool.v(self.layer_idx),
            memory.table.req_to_token,
            metadata.rows[num_contexts:],
            metadata.kv_lens[num_contexts:],
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            out=out,
        )
