"""Adds up the ranks' terms of a layer's output, adds the sum to the residual, and normalises it, in one pass.

    terms of all ranks ─► sum ─► (post norm) ─► · scale ─► + residual ─► hidden ─► norm ─► normed

It is `residual_norm` of a sum. Each rank's term stands in memory that all ranks have mapped, and each rank
reads all of them, in the order of the ranks, so that the sum has the same bits on all. Before a program
reads, it tells the same program of every other rank that this rank's term is complete, and waits for theirs:

    signals of a rank   int32 [programs, ranks]   1: the rank in this column has written its term

A signal is set by the other rank and cleared by its owner, so that it is ready for the next sum. A rank
writes its next term to other memory: it comes to write here again two sums later, and has then heard, in the
sum between, that all have read this one. So memory for two terms, used in turns, is enough.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.norms import Norm

from .residual_norm import _bound, _normalise, launch_of, residual_norm_reference

MAX_PROGRAMS = 128  # a rank's programs all run at once, since each may wait for that of another rank


class Terms(NamedTuple):
    """Where every rank's term of one sum stands.

    `own`: `[T, C]`, contiguous, this rank's. `addresses`: int64 `[ranks]`, of the term of each rank, its own
    too. `signals`: int64 `[ranks]`, the address of each rank's signals, int32 `[MAX_PROGRAMS, ranks]`, 0 at
    first.
    """

    own: Tensor
    addresses: Tensor
    signals: Tensor
    rank: int


class _Mapped(NamedTuple):
    """`Terms` as the kernel takes them."""

    own: Tensor
    addresses: Tensor
    signals: Tensor
    RANK: Any
    NUM_RANKS: Any


@triton.jit
def _meet(terms, program):
    """Returns once every rank's term is complete."""
    own = tl.load(terms.signals + terms.RANK).to(tl.pointer_type(tl.int32)) + program * terms.NUM_RANKS
    for other in tl.static_range(terms.NUM_RANKS):
        if other != terms.RANK:
            theirs = tl.load(terms.signals + other).to(tl.pointer_type(tl.int32))
            theirs += program * terms.NUM_RANKS + terms.RANK
            while tl.atomic_cas(theirs, 0, 1, sem="release", scope="sys") != 0:
                pass  # it has not met this rank for the sum before yet
    for other in tl.static_range(terms.NUM_RANKS):
        if other != terms.RANK:
            while tl.atomic_cas(own + other, 1, 0, sem="acquire", scope="sys") != 1:
                pass


@triton.jit
def _summed_residual_norm_kernel(
    terms,  # a `_Mapped`
    residual,  # [T, C]
    hidden,  # [T, C], written
    normed,  # [T, C], written; None without a norm
    norm,  # a `_Bound`, or None
    post,  # likewise
    scale,  # None for 1
    num_rows,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_POST: tl.constexpr,  # as in `residual_norm`
):
    program = tl.program_id(0)
    dims = tl.arange(0, BLOCK)
    in_row = dims < C
    DTYPE: tl.constexpr = residual.dtype.element_ty
    _meet(terms, program)
    num_programs = tl.num_programs(0)
    for turn in range(tl.cdiv(num_rows - program, num_programs)):
        at = (program + turn * num_programs).to(tl.int64) * C + dims
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(terms.NUM_RANKS):
            term = tl.load(terms.addresses + rank).to(tl.pointer_type(DTYPE))
            term = tl.multiple_of(term, 16)  # not known of an address in memory; so whole vectors are read
            total += tl.load(term + at, mask=in_row, other=0.0, cache_modifier=".cg").to(tl.float32)
        value = total.to(DTYPE).to(tl.float32)
        if HAS_POST:
            value = _normalise(value, post, dims, in_row, C, DTYPE).to(tl.float32)
        if scale is not None:
            value = (value * scale).to(DTYPE).to(tl.float32)
        before = tl.load(residual + at, mask=in_row, other=0.0).to(tl.float32)
        value = (before + value).to(DTYPE).to(tl.float32)
        tl.store(hidden + at, value.to(DTYPE), mask=in_row)
        if normed is not None:
            tl.store(normed + at, _normalise(value, norm, dims, in_row, C, DTYPE), mask=in_row)


def summed_residual_norm(
    terms: Terms, residual: Tensor, norm: Norm | None, *, post: Norm | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns hidden = residual + scale · post(sum of the terms) and norm(hidden), shaped as the residual.

    Every rank calls this for the same sum, in the same order, with a residual of the same shape. Nothing
    synchronises with the host, so a CUDA graph can capture it.

    Args:
        terms: where the terms stand, of the dtype of the residual and with its rows.
        residual: `[..., C]` of any floating type, contiguous.
        norm: the norm of what is returned first; None to return it twice.
        post: a norm of the sum before it is added; None for none.
        scale: a factor of the sum before it is added.

    Raises:
        ValueError: the own term does not fit the residual, or C is above 32,768.
    """
    dim = residual.shape[-1]
    rows = residual.view(-1, dim)
    if terms.own.shape != rows.shape or terms.own.dtype != rows.dtype or not terms.own.is_contiguous():
        raise ValueError(
            f"a term of {terms.own.dtype} {tuple(terms.own.shape)} for a residual of {rows.dtype} "
            f"{tuple(rows.shape)}; give contiguous ones that are alike"
        )
    launch = launch_of(dim, post)
    hidden = torch.empty_like(residual)
    normed = hidden if norm is None else torch.empty_like(residual)
    if len(rows):
        ranks = map(tl.constexpr, (terms.rank, len(terms.addresses)))
        mapped = _Mapped(terms.own, terms.addresses, terms.signals, *ranks)
        _summed_residual_norm_kernel[(min(len(rows), MAX_PROGRAMS),)](
            mapped,
            rows,
            hidden,
            None if norm is None else normed,
            _bound(norm),
            _bound(post),
            None if scale == 1.0 else scale,
            len(rows),
            **launch,
        )
    return hidden, normed


def summed_residual_norm_reference(
    terms: list[Tensor], residual: Tensor, norm: Norm | None, *, post: Norm | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Computes `summed_residual_norm` in plain torch, from the terms of all ranks."""
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    summed = total.to(residual.dtype).view_as(residual)
    return residual_norm_reference(summed, residual, norm, post=post, scale=scale)
