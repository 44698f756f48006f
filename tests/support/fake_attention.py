"""Rows and a FlashInfer in plain torch, for tests of `bench/kernels/attention.py`."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from bench.kernels import attention_batches as batches
from bench.kernels import attention_peers as peers
from bench.kernels import attention_rows as rows
from lightkv.triton_kernels.attention.merge_states import merge_states_reference
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions
from lightkv.triton_kernels.attention.variants.hooks import LOG2_E
from lightkv.triton_kernels.attention.variants.variant import Scored

UNEVEN = rows.Row("uneven", (1, 40, 16), (1, 1, 1), 4, 2, 16, torch.float16)
EVEN = UNEVEN._replace(name="even", lengths=(20, 20), q_lens=(1, 1), num_heads=2, num_kv_heads=1)
FRESH = UNEVEN._replace(name="fresh", lengths=(20, 20), q_lens=(20, 20))
RAGGED = UNEVEN._replace(name="ragged", lengths=(20, 33, 5), q_lens=(20, 3, 1))
MIXED = UNEVEN._replace(name="mixed", lengths=(20, 33, 5, 40), q_lens=(20, 3, 1, 1))
SHARING = UNEVEN._replace(name="sharing", lengths=(30, 27, 40), shared=21)


class PagedWrapper:
    """FlashInfer's paged wrappers in plain torch; checks that arguments are as FlashInfer documents them."""

    causal = False

    def __init__(self, workspace: Tensor, kv_layout: str, **options: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.options = options

    def _plan(self, q_starts: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor,
              num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, *, sm_scale: float,
              q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:  # fmt: skip
        for numbers in (q_starts, indptr, indices, last_page_len):
            assert numbers.dtype == torch.int32
            assert numbers.is_contiguous()
        assert len(indptr) == len(q_starts) == len(last_page_len) + 1
        assert len(indices) == indptr[-1]
        assert 1 <= last_page_len.min() <= last_page_len.max() <= page_size
        self.planned = q_starts, indptr, indices, last_page_len, page_size, sm_scale
        self.heads, self.dtypes = (num_heads, num_kv_heads, head_dim), (q_data_type, kv_data_type)

    def run(
        self, q: Tensor, pages: tuple[Tensor, Tensor], *, out: Tensor, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        q_starts, indptr, indices, last_page_len, page_size, sm_scale = self.planned
        assert self.heads == (q.shape[1], pages[0].shape[2], q.shape[2])
        assert self.dtypes == (q.dtype, pages[0].dtype)
        assert pages[0].shape[1] == page_size
        assert pages[0].stride() == pages[1].stride()
        lse = torch.full(q.shape[:2], torch.nan, device=q.device)
        for request in range(len(last_page_len)):
            own = indices[indptr[request] : indptr[request + 1]].long()
            length = (len(own) - 1) * page_size + int(last_page_len[request])
            k, v = (half[own].flatten(0, 1)[:length] for half in pages)
            queries = slice(int(q_starts[request]), int(q_starts[request + 1]))
            options = AttentionOptions(sm_scale, self.causal)
            scored = Scored.of_last(queries, request, length, q.device)
            out[queries] = batches.attend_reference(q[queries], k, v, options, scored).to(out.dtype)
            if return_lse:  # in base 2, as FlashInfer's is
                keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
                scores = torch.einsum("qhd,khd->qhk", q[queries].float(), keys) * sm_scale
                lse[queries] = scores.logsumexp(2) * LOG2_E
        return (out, lse) if return_lse else out


class DecodeWrapper(PagedWrapper):
    def plan(self, indptr: Tensor, *lists_and_sizes: Any, **options: Any) -> None:
        assert self.options["use_cuda_graph"]
        buffers = [self.options[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")]
        for given, buffer in zip((indptr, *lists_and_sizes[:2]), buffers, strict=True):
            buffer.copy_(given)
        self._plan(torch.arange(len(indptr), dtype=torch.int32), indptr, *lists_and_sizes, **options)


class PrefillWrapper(PagedWrapper):
    def plan(self, *lists_and_sizes: Any, causal: bool, **options: Any) -> None:
        self.causal = causal
        assert self.options["backend"] in ("fa2", "fa3")
        self._plan(*lists_and_sizes, **options)


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor) -> None:
    merged, lse = merge_states_reference(torch.stack((v, v_other)).float(), torch.stack((s, s_other)))
    v.copy_(merged)
    s.copy_(lse)


def flashinfer_in_torch(
    device: torch.device, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> peers.FlashInfer:
    module = SimpleNamespace(
        __version__="0",
        BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper,
        BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper,
        merge_state_in_place=merge_state_in_place,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", cast(Any, module))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "")  # monkeypatch restores it
    monkeypatch.setattr(peers.FlashInfer, "WORKSPACE", 1024)
    return peers.FlashInfer(device, cache)
