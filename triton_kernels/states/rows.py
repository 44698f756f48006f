"""The rows of a call: which slots they read and write, and where their tokens stand."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.checks import Tensors

_ROWS = Tensors(
    reads="contiguous int64 [n]",
    writes="contiguous int64 [n]",
    starts="contiguous int32 [n + 1]",
    places="contiguous int64 [packed]",
)


class StateRows(NamedTuple):
    """The rows of a call, of n sequences. A slot that one row writes must not be read by another.

    `reads`: int64 `[n]`, the slot that holds each row's state. `writes`: int64 `[n]`, the slot to which its new
    state goes; 0 for a row of padding, which writes none. `starts`: int32 `[n + 1]`: tokens `starts[i]` to
    `starts[i + 1]` are row i's, and may be none; None where token i is row i's. `places`: int64 `[packed]`,
    where the tokens that `starts` counts stand in the tensors of a call; None where they are packed there.
    """

    reads: Tensor
    writes: Tensor
    starts: Tensor | None
    places: Tensor | None = None

    def check(self) -> None:
        """Raises ValueError where the tensors do not fit each other."""
        _ROWS.check({}, **self._asdict())

    def bounds(self) -> Tensor:
        """Returns `starts`, also where they are not given."""
        if self.starts is not None:
            return self.starts
        return torch.arange(len(self.reads) + 1, dtype=torch.int32, device=self.reads.device)

    def recur_reference(
        self, states: Tensor, step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], out: Tensor
    ) -> None:
        """Computes one token of all rows after the other: `step(places, states)` returns the states of some
        rows after their tokens at `places`, and the outputs of these tokens."""
        starts, state = self.bounds(), states[self.reads]
        lengths = starts.diff()
        for number in range(int(lengths.max()) if len(lengths) else 0):
            running = lengths > number
            token = (starts[:-1] + number)[running]
            place = token if self.places is None else self.places[token]
            state[running], total = step(place, state[running])
            out[place] = total.masked_fill((self.writes[running] == 0)[:, None, None], 0.0).to(out.dtype)
        is_written = self.writes != 0
        states[self.writes[is_written]] = state[is_written]


@triton.jit
def tokens_of(starts):
    """Returns a row's first packed token, and where its tokens end, int64."""
    row = tl.program_id(2).to(tl.int64)
    first, end = row, row + 1
    if starts is not None:
        first, end = tl.load(starts + row).to(tl.int64), tl.load(starts + row + 1).to(tl.int64)
    return first, end


@triton.jit
def place_of(places, token, within):
    """Returns where a packed token, int64, stands."""
    if places is None:  # noqa: SIM108, of which Triton would compile both sides
        place = token
    else:
        place = tl.load(places + token, mask=within, other=0)
    return place
