"""Which sides a row of `attention.py` is measured on, by the part that the row belongs to."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch.nn.attention import SDPBackend

from bench.common.device_clock import Ceiling, Clock

from .attention_batches import CONTIGUOUS, Batch, scatter
from .attention_fa3 import FlashAttention3
from .attention_peers import (
    CLASSIC_FORMS,
    FlashInfer,
    Side,
    classic_blocks,
    classic_decode,
    ours_decode,
    ours_mixed,
    ours_prefill,
    sdpa_decode,
    sdpa_prefill,
)

SHIFTS = (0, 4)  # pages of 1 and of 16
PEERS = ("fa3", "flashinfer", "sdpa", "v1")
SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
UNGROUPED = "lightkv p1 ungrouped"

Make = Callable[[], Side]


class Bench(NamedTuple):
    """The tools that measure every row. A peer that is None is not there."""

    clock: Clock
    ceiling: Ceiling
    peers: Sequence[str]  # of PEERS
    flashinfer: FlashInfer | None
    fa3: FlashAttention3 | None = None
    shifts: Sequence[int] = SHIFTS  # of `sides_beside_fa3`
    quick: bool = False


def sides_beside_fa3(batch: Batch, bench: Bench) -> dict[str, Make]:
    """Returns the sides of lightkv and of FlashAttention 3 alone, for any heads, decode or prefill."""
    ours = ours_decode if max(batch.q_lens) == 1 else ours_prefill
    made: dict[str, Make] = {}
    for shift in bench.shifts:
        paged, name = scatter(batch, shift), f"p{1 << shift}"
        made[f"lightkv {name}"] = partial(ours, batch, paged)
        if bench.fa3 is not None:
            made[f"FA3 {name}"] = partial(bench.fa3.best, batch, paged, bench.clock)
    return made


def curve_sides(batch: Batch, bench: Bench) -> dict[str, Make]:
    """Returns the sides for a few queries after a long prefix, with pages of 1 only."""
    made = sides_beside_fa3(batch, bench._replace(shifts=(0,)))
    if bench.flashinfer is not None:
        made["FlashInfer fa2 p1"] = partial(bench.flashinfer.prefill, batch, scatter(batch, 0), "fa2")
    return made


def decode_sides(batch: Batch, bench: Bench) -> dict[str, Make]:
    made: dict[str, Make] = {}
    for shift in SHIFTS:
        paged, name = scatter(batch, shift), f"p{1 << shift}"
        made[f"lightkv {name}"] = partial(ours_decode, batch, paged)
        if bench.fa3 is not None:
            made[f"FA3 {name}"] = partial(bench.fa3.best, batch, paged, bench.clock)
        if bench.flashinfer is not None:
            made[f"FlashInfer {name}"] = partial(bench.flashinfer.decode, batch, paged, False)
            made[f"FlashInfer tc {name}"] = partial(bench.flashinfer.decode, batch, paged, True)
        if "v1" in bench.peers and shift == 4:
            blocks = classic_blocks(paged)
            for form in CLASSIC_FORMS:
                made[f"v1 {name} {form}"] = partial(classic_decode, batch, paged, form, blocks)
    made["lightkv contiguous"] = partial(ours_decode, batch, scatter(batch, CONTIGUOUS))
    if "sdpa" in bench.peers and batch.is_even():
        for name, backend in SDPA.items():
            made[f"SDPA {name}"] = partial(sdpa_decode, batch, backend)
    return made


def prefill_sides(batch: Batch, bench: Bench) -> dict[str, Make]:
    made: dict[str, Make] = {}
    for shift in SHIFTS:
        paged, name = scatter(batch, shift), f"p{1 << shift}"
        made[f"lightkv {name}"] = partial(ours_prefill, batch, paged)
        if bench.fa3 is not None:
            made[f"FA3 {name}"] = partial(bench.fa3.best, batch, paged, bench.clock)
        if bench.flashinfer is not None:
            for backend in ("fa2", "fa3"):
                made[f"FlashInfer {backend} {name}"] = partial(
                    bench.flashinfer.prefill, batch, paged, backend
                )
    made["lightkv contiguous"] = partial(ours_prefill, batch, scatter(batch, CONTIGUOUS))
    if "sdpa" in bench.peers and batch.is_even() and batch.lengths == batch.q_lens:
        for name, backend in SDPA.items():
            made[f"SDPA {name}"] = partial(sdpa_prefill, batch, backend)
    return made


def mixed_sides(batch: Batch, bench: Bench) -> dict[str, Make]:
    """Returns the sides of a mixed step, with pages of 1 only; for the peers a decode is a prefill of one
    token."""
    paged = scatter(batch, 0)
    made: dict[str, Make] = {"lightkv p1": partial(ours_mixed, batch, paged)}
    if bench.fa3 is not None:
        made["FA3 p1"] = partial(bench.fa3.best, batch, paged, bench.clock)
    if bench.flashinfer is not None:
        for backend in ("fa2", "fa3"):
            made[f"FlashInfer {backend} p1"] = partial(bench.flashinfer.prefill, batch, paged, backend)
    return made


def group_sides(batch: Batch, bench: Bench) -> dict[str, Make]:
    """Returns the sides for a shared prefix, with pages of 1 only: each request reads it, or it is read
    once."""
    paged = scatter(batch, 0)
    made: dict[str, Make] = {
        UNGROUPED: partial(ours_decode, batch, paged),
        "lightkv p1": partial(ours_decode, batch, paged, share=True),
    }
    if bench.flashinfer is not None:
        made["FlashInfer tc p1"] = partial(bench.flashinfer.decode, batch, paged, True)
        for backend in ("fa2", "fa3"):
            made[f"FlashInfer cascade {backend} p1"] = partial(
                bench.flashinfer.cascade, batch, paged, backend
            )
    return made


SIDES: dict[str, Callable[[Batch, Bench], dict[str, Make]]] = {
    "decode": decode_sides,
    "decode_dims": sides_beside_fa3,
    "prefill": prefill_sides,
    "prefill_dims": sides_beside_fa3,
    "turns": prefill_sides,
    "curve": curve_sides,
    "mixed": mixed_sides,
    "groups": group_sides,
}
