"""Beam search: which beam's K/V each beam reads at each position, from TensorRT-LLM's table of beams."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch

from lightkv.memory.staging import upload
from lightkv.triton_kernels.checks import Tensors

_TABLE = Tensors(cache_indirection="int32 [requests, beams, positions]")


@dataclass(frozen=True)
class Beams:
    """The sequences of a batch in beam search. A request in the context phase has one; behind them each request
    in the generation phase has as many as it has beams, one after the other.

    `widths`: int64 `[requests in the generation phase]`, the beams of each. `num_contexts`: requests before.
    """

    widths: np.ndarray
    num_contexts: int

    @classmethod
    def of(cls, beam_width: int | Sequence[int], num_contexts: int, num_sequences: int) -> "Beams | None":
        """Returns the beams of a batch: `beam_width` for each request in the generation phase, or a number for
        all; None if each has 1. Raises ValueError for anything but positive integers, and where the sequences
        are not so many."""
        num_generations = num_sequences - num_contexts
        if isinstance(beam_width, Integral):
            width = int(beam_width)
            if width == 1 or (width > 1 and not num_generations):
                return None
            # Of one request at least, so that a width that is none is refused without generations, too.
            widths = np.full(max(num_generations // max(width, 1), 1), width)
        else:
            widths = np.array(beam_width)
        is_of_integers = np.issubdtype(widths.dtype, np.integer) or not widths.size
        if (
            widths.ndim != 1
            or not is_of_integers
            or (widths < 1).any()
            or int(widths.sum()) != num_generations
        ):
            raise ValueError(
                f"beam_width is {beam_width}, and {num_generations} of {num_sequences} sequences come after "
                f"{num_contexts} contexts: each request in the generation phase has one sequence for each of "
                "its beams, at least one"
            )
        return None if (widths == 1).all() else cls(widths.astype(np.int64), num_contexts)

    @property
    def widths_of_requests(self) -> list[int]:
        """Sequences of each request of the batch, one for those in the context phase."""
        return [1] * self.num_contexts + self.widths.tolist()

    @property
    def firsts(self) -> np.ndarray:
        """The number of the sequence that is the first beam of each request in the generation phase."""
        return self.num_contexts + np.cumsum(self.widths) - self.widths

    def check_lengths(self, q_lens: np.ndarray, cached: np.ndarray) -> None:
        """Raises ValueError unless each beam has one token in this step, and a request's beams have as many
        cached ones. Both are int64, one number for each sequence of the batch."""
        firsts = np.repeat(self.firsts, self.widths)
        own_q_lens, own_cached = q_lens[self.num_contexts :], cached[self.num_contexts :]
        if (own_q_lens != 1).any() or (own_cached != cached[firsts]).any():
            raise ValueError(
                f"beams of requests with {self.widths.tolist()} beams have {own_q_lens.tolist()} tokens in "
                f"this step and {own_cached.tolist()} cached ones: each has one, and the beams of a request "
                "are of one length"
            )

    def check_table(self, table: torch.Tensor | None, cached: np.ndarray, device: torch.device) -> None:
        """Raises ValueError unless `table` is what `rows` takes. Its numbers are not checked."""
        widest, longest = int(self.widths.max()), int(cached[self.firsts].max())
        wanted = f"int32 [{len(self.widths)} or more, {widest} or more, {longest} or more] on {device}"
        if table is None:
            raise ValueError(
                f"requests have {self.widths.tolist()} beams, and cache_indirection is not set: give a table "
                f"of the beams that they read, {wanted}"
            )
        _TABLE.check({}, cache_indirection=table)
        least = len(self.widths), widest, longest
        fits = all(have >= needed for have, needed in zip(table.shape, least, strict=True))
        if table.device != device or not fits:
            raise ValueError(
                "cache_indirection must have a beam for each request in the generation phase, each of its "
                f"beams and each cached position, {wanted}; got {tuple(table.shape)} on {table.device}"
            )

    def rows(self, table: torch.Tensor, cached: np.ndarray, prompts: np.ndarray, out: torch.Tensor) -> None:
        """Writes which sequence's K/V each sequence reads at each position to `out`, int32 `[sequences,
        positions]`, without waiting for the device. Sequences in the context phase keep their rows.

        A beam reads the prompt of its request's first beam, its own newest token, and in between what `table`
        says, int32 `[requests, beams, positions]`, in which request 0 is the first in the generation phase. A
        number that is not one of the request's beams stands for the nearest that is.

        `cached`, `prompts`: int64, a number for each sequence: its cached tokens, and those of the prompt.
        """
        firsts, positions = self.firsts, out.shape[1]
        on_device = upload([firsts, self.widths, cached[firsts], prompts[firsts]], out.device)
        first, width, known, prompt = (numbers[:, None, None] for numbers in on_device)
        position = torch.arange(positions, device=out.device)
        beam = torch.arange(int(self.widths.max()), device=out.device)[None, :, None]
        beam = beam.where(beam < width, 0)  # beams that a request does not have repeat its first one
        shown = table[: len(firsts), :, :positions]
        if shown.shape[2] < positions:  # the newest token may be beyond the table
            shown = torch.nn.functional.pad(shown, (0, positions - shown.shape[2]))
        read = shown.gather(1, beam.expand(-1, -1, positions))
        read = torch.minimum(read.clamp(min=0), width - 1)
        read = read.where(position >= prompt, 0)
        read = read.where(position < known, beam)
        out.index_copy_(0, (first + beam).flatten(), (first + read).flatten(0, 1).int())
