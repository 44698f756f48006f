"""The sides that `attention.py` compares: kernels of lightkv, of FlashInfer and of torch, and the classic
kernel.

All get the K/V values of one batch: scattered over the pages of a pool, which lightkv reads through an index of
slots and FlashInfer through lists of pages, or one contiguous copy per request. A side is a call that a CUDA
graph can capture; its plan is made before.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lightkv.triton_kernels.attention.decode import decode_tuning
from lightkv.triton_kernels.attention.decode.decode_attention import decode_attention
from lightkv.triton_kernels.attention.decode.decode_plan import SharedPrefixGroups, decode_plan
from lightkv.triton_kernels.attention.mixed_attention import MixedPlan, mixed_attention, mixed_plan
from lightkv.triton_kernels.attention.prefill.prefill_attention import prefill_attention
from lightkv.triton_kernels.attention.prefill.prefill_plan import prefill_plan
from lightkv.triton_kernels.classic.paged_attention_v1 import paged_attention_v1

from .attention_batches import Batch, Paged, copy_to_blocks, offsets, scatter

CLASSIC_FORMS = ("one partition", "partitions")


class Side(NamedTuple):
    """One implementation of attention. `run()` writes the output and returns it, always in the same tensor when
    it is captured; `tokens` brings it into the form `[T, H, D]`; `plan()` is the work of a step that serves all
    layers."""

    run: Callable[[], Tensor]
    tokens: Callable[[Tensor], Tensor] = lambda out: out
    plan: Callable[[], object] | None = None
    setting: Mapping[str, Any] | None = None


# --------------------------------------------------------------------------------
# lightkv

# The functions that choose a launch, by module and name, and their replacements.
Functions = Mapping[tuple[ModuleType, str], Callable[..., Any]]


@contextmanager
def replaced(functions: Functions) -> Iterator[None]:
    """Replaces these functions within the context."""
    with ExitStack() as stack:
        for (module, name), function in functions.items():
            stack.enter_context(mock.patch.object(module, name, function))
        yield


def _one_prefix(batch: Batch, num_queries: int) -> SharedPrefixGroups:
    """Makes the shared prefix of all requests, cut into sets of as many members as a tile holds."""
    num_requests, device = len(batch.lengths), batch.q.device
    size = decode_tuning.prefix_members(num_queries, batch.q.shape[1] // batch.num_kv_heads)
    members = torch.arange(-(-num_requests // size) * size, dtype=torch.int32, device=device)
    place = members[:num_requests].clone()
    members[num_requests:] = -1
    keys = torch.full((len(members) // size,), batch.shared, dtype=torch.int32, device=device)
    return SharedPrefixGroups(members.view(-1, size), keys, place)


def ours_decode(batch: Batch, paged: Paged, share: bool = False) -> Side:
    """Attends with lightkv's decode kernels; every request has the same number of queries. With `share`, the
    shared prefix is read once."""
    device, num_queries = batch.q.device, batch.q_lens[0]
    rows = torch.arange(len(batch.lengths), device=device)
    lengths = torch.tensor(batch.lengths, dtype=torch.int32, device=device)
    kv, out = paged.kv, batch.empty_out()
    prefixes = _one_prefix(batch, num_queries) if share else None

    def make_plan() -> Any:
        return decode_plan(
            rows,
            lengths,
            batch.heads,
            dtype=batch.q.dtype,
            num_queries=num_queries,
            shared_prefixes=prefixes,
        )

    plan = make_plan()

    def run() -> Tensor:
        return decode_attention(batch.q, kv, rows, lengths, num_queries=num_queries, plan=plan, out=out)

    return Side(run, plan=make_plan)


def ours_prefill(batch: Batch, paged: Paged) -> Side:
    device = batch.q.device
    rows = torch.arange(len(batch.lengths), device=device)
    lengths = torch.tensor(batch.lengths, dtype=torch.int32, device=device)
    kv, q_starts, out = paged.kv, offsets(batch.q_lens).to(device), batch.empty_out()

    def make_plan() -> Any:
        return prefill_plan(
            rows,
            q_starts,
            lengths,
            batch.heads,
            num_tokens=len(batch.q),
            dtype=batch.q.dtype,
        )

    plan = make_plan()

    def run() -> Tensor:
        return prefill_attention(batch.q, kv, rows, q_starts, lengths, plan=plan, out=out)

    return Side(run, plan=make_plan)


class _Mixed(NamedTuple):
    """The tensors of a step whose first requests are prefills, and all others decodes with one query."""

    rows: Tensor
    q_starts: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, batch: Batch) -> "_Mixed":
        device = batch.q.device
        return cls(
            torch.arange(len(batch.lengths), device=device),
            offsets(batch.q_lens[: batch.num_prefills]).to(device),
            torch.tensor(batch.lengths, dtype=torch.int32, device=device),
        )

    def plan(self, batch: Batch) -> MixedPlan:
        return mixed_plan(
            *self,
            batch.heads,
            num_tokens=len(batch.q),
            dtype=batch.q.dtype,
        )


def ours_mixed(batch: Batch, paged: Paged) -> Side:
    """Attends from prefills and decodes in one call of lightkv."""
    step, kv, out = _Mixed.of(batch), paged.kv, batch.empty_out()
    plan = step.plan(batch)

    def run() -> Tensor:
        return mixed_attention(batch.q, kv, *step, plan=plan, out=out)

    return Side(run, plan=partial(step.plan, batch))


# --------------------------------------------------------------------------------
# The classic kernel


def classic_blocks(paged: Paged) -> tuple[Tensor, Tensor]:
    """Returns a copy of the pages in the classic layout."""
    slots = torch.arange(len(paged.pool), device=paged.pool.device).view(-1, 1 << paged.shift)
    return copy_to_blocks(*paged.caches, slots)


def classic_decode(
    batch: Batch, paged: Paged, form: str, blocks: tuple[Tensor, Tensor] | None = None
) -> Side:
    """Attends with the classic kernel in one of `CLASSIC_FORMS`, on `blocks` or a copy of the pages in its
    layout."""
    lengths = torch.tensor(batch.lengths, dtype=torch.int32, device=batch.q.device)
    arguments = (batch.q, *(blocks or classic_blocks(paged)), paged.table, lengths)
    out, longest = torch.empty_like(batch.q), max(batch.lengths)
    settings = {"scale": batch.scale, "out": out, "max_seq_len": longest}
    size = 0 if form == "one partition" else None
    return Side(lambda: paged_attention_v1(*arguments, **settings, partition_size=size))


# --------------------------------------------------------------------------------
# torch


def _dense(batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns K and V as `[B, num_kv_heads, L, D]`, contiguous."""
    k, v = (
        half.unflatten(0, (len(batch.lengths), -1)).transpose(1, 2).contiguous() for half in batch.keys_values
    )
    return k, v


def sdpa_decode(batch: Batch, backend: SDPBackend) -> Side:
    """Decodes an even batch. Query heads that share a K/V head are passed as its queries, so K/V is read
    once."""
    k, v = _dense(batch)
    q = batch.q.unflatten(1, (batch.num_kv_heads, -1))  # [B, num_kv_heads, group, D]

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v)

    return Side(run, lambda out: out.flatten(1, 2))


def sdpa_prefill(batch: Batch, backend: SDPBackend) -> Side:
    """Prefills an even batch without cached prefixes."""
    k, v = _dense(batch)
    q = batch.q.unflatten(0, (len(batch.lengths), -1)).transpose(1, 2).contiguous()  # [B, H, L, D]

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return Side(run, lambda out: out.transpose(1, 2).flatten(0, 1))


# --------------------------------------------------------------------------------
# FlashInfer


class FlashInfer:
    """FlashInfer's wrappers over pages of K/V in layout NHD; K and V are views of lightkv's pool.

    Decode is planned for CUDA graphs, as an engine needs it, so its work may change between replays. Prefill is
    not, because its plans are better without, so its graph is right for this batch only.
    """

    WORKSPACE = 512 * 2**20  # bytes; split prefills of 16 k tokens need more than the usual 128 MiB

    def __init__(self, device: torch.device, cache: Path | None = None) -> None:
        """Imports FlashInfer, which compiles kernels at their first plan, with nvcc and ninja, and keeps them
        in `cache` or in the home directory. Raises ImportError if it, or something it needs, is not
        installed."""
        if cache is not None:
            os.environ["FLASHINFER_WORKSPACE_BASE"] = str(cache.resolve())  # read at its import
        import flashinfer

        self._flashinfer: Any = flashinfer
        self.version: str = flashinfer.__version__
        self._broken: dict[str, str] = {}  # kernels that did not compile, and why
        self._workspace = torch.zeros(self.WORKSPACE, dtype=torch.uint8, device=device)

    def compile(self, kernels: Sequence[str], batch: Batch) -> dict[str, str]:
        """Compiles some of `decode`, `fa2` and `fa3` in parallel, for the dtype and head dim of `batch`.

        Returns those that do not compile, and why. Sides that need them are refused from then on, since
        compiling them again would take as long again.
        """
        paged = scatter(batch, 0)
        with ThreadPoolExecutor() as threads:
            jobs = {
                kernel: threads.submit(self.decode, batch, paged, False)
                if kernel == "decode"
                else threads.submit(self.prefill, batch, paged, kernel)
                for kernel in kernels
            }
        self._broken = {kernel: str(job.exception()) for kernel, job in jobs.items() if job.exception()}
        return self._broken

    def _need(self, kernel: str) -> None:
        if kernel in self._broken:
            raise RuntimeError(f"its kernel {kernel} did not compile")

    def decode(self, batch: Batch, paged: Paged, tensor_cores: bool) -> Side:
        """Decodes one query per request. With tensor cores its kernel is fa2; without, only 1 to 4, 6, 8 or 16
        query heads may share a K/V head."""
        self._need("fa2" if tensor_cores else "decode")
        device, num_requests = batch.q.device, len(batch.lengths)
        indptr, indices, last_page_len = _page_lists(batch, paged)
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=torch.empty(num_requests + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=torch.empty_like(indices),
            paged_kv_last_page_len_buffer=torch.empty(num_requests, dtype=torch.int32, device=device),
        )

        def plan() -> None:
            wrapper.plan(
                indptr,
                indices,
                last_page_len,
                batch.q.shape[1],
                batch.num_kv_heads,
                batch.q.shape[2],
                1 << paged.shift,
                q_data_type=batch.q.dtype,
                kv_data_type=batch.kv.dtype,
                sm_scale=batch.scale,
            )

        plan()
        pages, out = paged.pages, torch.empty_like(batch.q)
        return Side(lambda: wrapper.run(batch.q, pages, out=out), plan=plan)

    def prefill(self, batch: Batch, paged: Paged, backend: str) -> Side:
        """Prefills with the backend fa2, or fa3 (on Hopper only)."""
        self._need(backend)
        indptr, indices, last_page_len = _page_lists(batch, paged)
        q_starts = offsets(batch.q_lens)
        wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "NHD", backend=backend
        )

        def plan() -> None:
            wrapper.plan(
                q_starts,
                indptr,
                indices,
                last_page_len,
                batch.q.shape[1],
                batch.num_kv_heads,
                batch.q.shape[2],
                1 << paged.shift,
                causal=True,
                sm_scale=batch.scale,
                q_data_type=batch.q.dtype,
                kv_data_type=batch.kv.dtype,
            )

        plan()
        pages, out = paged.pages, torch.empty_like(batch.q)
        # It is planned only once, since a plan after the capture could move buffers that the graph reads.
        return Side(lambda: wrapper.run(batch.q, pages, out=out))

    def cascade(self, batch: Batch, paged: Paged, backend: str) -> Side:
        """Decodes one query per request, over the shared tokens once for all requests and over each request's
        own, and merges both, as FlashInfer's multi-level wrapper does with the backend that it picks."""
        self._need(backend)
        num_requests, num_shared = len(batch.lengths), batch.shared >> paged.shift
        shared = paged._replace(first_slots=paged.first_slots[:1, :num_shared], num_pages=[num_shared])
        own = paged._replace(
            first_slots=paged.first_slots[:, num_shared:],
            num_pages=[count - num_shared for count in paged.num_pages],
        )
        own_batch = batch._replace(lengths=[length - batch.shared for length in batch.lengths])
        levels = [
            (offsets([num_requests]), _page_lists(batch._replace(lengths=[batch.shared]), shared)),
            (offsets([1] * num_requests), _page_lists(own_batch, own)),
        ]
        wrappers = [
            self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=backend)
            for _ in levels
        ]

        def plan() -> None:
            for wrapper, (q_starts, lists) in zip(wrappers, levels, strict=True):
                wrapper.plan(
                    q_starts,
                    *lists,
                    batch.q.shape[1],
                    batch.num_kv_heads,
                    batch.q.shape[2],
                    1 << paged.shift,
                    causal=False,
                    sm_scale=batch.scale,
                    q_data_type=batch.q.dtype,
                    kv_data_type=batch.kv.dtype,
                )

        plan()
        pages, outs = paged.pages, [torch.empty_like(batch.q) for _ in levels]

        def run() -> Tensor:
            states = [
                wrapper.run(batch.q, pages, out=out, return_lse=True)
                for wrapper, out in zip(wrappers, outs, strict=True)
            ]
            (out, lse), (own_out, own_lse) = states
            self._flashinfer.merge_state_in_place(out, lse, own_out, own_lse)
            return out

        return Side(run)


def _page_lists(batch: Batch, paged: Paged) -> tuple[Tensor, Tensor, Tensor]:
    """Returns int32 tensors: where each request's pages begin (on the host, where plans read it), the pages,
    request after request (on the device), and how many tokens each request's last page holds (on the host)."""
    counts = torch.tensor(paged.num_pages, device=paged.table.device)
    indices = paged.table[torch.arange(paged.table.shape[1], device=counts.device) < counts[:, None]]
    last_page_len = [(length - 1) % (1 << paged.shift) + 1 for length in batch.lengths]
    return offsets(paged.num_pages), indices, torch.tensor(last_page_len, dtype=torch.int32)
