"""Adds up the ranks' terms of a layer's output together with the residual and the norm that comes next.

A product writes this rank's term straight into memory that all ranks have mapped, and one kernel
(`summed_residual_norm`) does the rest: nothing is copied, and the sum is never written. A decoder layer has two
such sums, behind its attention and behind its MLP, and each has a place of its own, so that they take turns.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from triton.errors import TritonError

from lightkv.triton_kernels.layers.summed_residual_norm import MAX_PROGRAMS, Terms, summed_residual_norm
from lightkv.triton_kernels.norms import Norm

from .symmetric import Mapped, all_agree, map_memory

# Of a term, with two ranks: 4,096 tokens of 4,096 numbers in 16 bits. Up to here the kernel was the faster one
# (docs/measured.md).
_MOST_BYTES = 32 << 20


@dataclass(frozen=True)
class TermPlace:
    """Memory for one rank's term, and where the terms of the others are."""

    memory: Tensor  # uint8
    addresses: Tensor
    signals: Tensor
    own_signals: Tensor  # kept, since others write to it
    rank: int

    def rows(self, num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        """Returns the memory as `[num_rows, dim]`."""
        return self.memory[: num_rows * dim * dtype.itemsize].view(dtype).view(num_rows, dim)

    def add_and_norm(
        self,
        term: Tensor,
        residual: Tensor,
        norm: Norm | None,
        *,
        post: Norm | None = None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Returns what `residual_norm` returns of the sum of the terms, of which this rank's is in `rows`."""
        terms = Terms(term, self.addresses, self.signals, self.rank)
        return summed_residual_norm(terms, residual, norm, post=post, scale=scale)


@dataclass(frozen=True)
class TermRoom:
    """The two places of a rank, and up to how many bytes of a term they are used."""

    places: tuple[TermPlace, TermPlace]
    most_bytes: int

    @classmethod
    def on(cls, rank: int, device: torch.device) -> "TermRoom | None":
        """Makes the places; None, on all ranks, where they do not work.

        Each rank reads the terms of all others, so they are for smaller terms where there are more ranks.
        """
        if device.type != "cuda":
            return None
        size = dist.get_world_size()
        most = _MOST_BYTES // max(size - 1, 1)
        mapped = [map_memory(num, device) for num in (most, most, 4 * MAX_PROGRAMS * size)]
        if any(one is None for one in mapped):
            return None
        first, second, signals = (one for one in mapped if one is not None)

        def place(memory: Mapped) -> TermPlace:
            addresses, pads = (torch.tensor(one.addresses, device=device) for one in (memory, signals))
            return TermPlace(memory.own, addresses, pads, signals.own, rank)

        room = cls((place(first), place(second)), most)
        return room if all_agree(room._is_right(device)) else None

    @property
    def lines(self) -> list[str]:
        """What to report."""
        return [f"sums with residual and norm in one kernel: up to {self.most_bytes / 2**20:g} MiB"]

    def place(self, turn: int, x: Tensor, dim: int) -> TermPlace | None:
        """Returns the place of the first or the second sum of a layer for a term of x's rows of `dim`; None
        where it is larger than a place."""
        num_bytes = x.numel() // x.shape[-1] * dim * x.element_size()
        return self.places[turn] if num_bytes <= self.most_bytes else None

    def _is_right(self, device: torch.device) -> bool:
        """Returns whether both places add up small whole numbers, several times in turns."""
        try:
            for turn in range(4):
                place = self.places[turn % 2]
                term = place.rows(3, 64, torch.bfloat16)
                term.fill_(place.rank + 1 + turn)
                residual = torch.ones(3, 64, dtype=torch.bfloat16, device=device)
                hidden, _ = place.add_and_norm(term, residual, None)
                size = dist.get_world_size()
                if not bool((hidden == 1 + size * turn + size * (size + 1) // 2).all()):
                    return False
        except (RuntimeError, TritonError):  # the links, or this version of Triton
            return False
        return True
