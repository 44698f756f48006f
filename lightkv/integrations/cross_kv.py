"""The K/V of an encoder's output, of which every request of a batch has one cross sequence in the pool."""

from typing import Any, NamedTuple

import numpy as np
import torch

from lightkv.kv_cache import KVCache
from lightkv.ledger.crosses import CrossSequence
from lightkv.memory.staging import upload

from .cache_layers import write_tokens


class EncoderOutput(NamedTuple):
    """Which rows of a batch have the same encoder output, and which of its columns are no padding."""

    which: list[int]  # of each row, the request whose output it reads; rows of a request are neighbours
    first: list[int]  # the first row of each request
    real: np.ndarray  # bool [requests, columns]

    @classmethod
    def of_call(cls, arguments: dict[str, Any], held: "CrossKV | None") -> "EncoderOutput | None":
        """Reads the arguments of a decoder's call. `held` is what the batch reads, None for one that begins.

        Rows beside each other are one request if their output is the same to the bit, and their mask too. A
        mask that is not `[rows, columns]` is left to the model, and all columns are held. Returns None for a
        batch that continues. Synchronises for one that begins. Raises ValueError for a call without an
        encoder's output or with one of other columns, and for a row without a token.
        """
        hidden, mask = arguments.get("encoder_hidden_states"), arguments.get("encoder_attention_mask")
        if hidden is None:
            raise ValueError(
                "the decoder is called without an encoder's output: pass the encoder's input, or "
                "encoder_outputs, in every call of the model"
            )
        num_rows, width = hidden.shape[:2]
        if held is not None:
            if (num_rows, width) != (len(held.which), held.width):
                raise ValueError(
                    f"an encoder output of {num_rows} rows and {width} columns, where the batch reads one of "
                    f"{len(held.which)} rows and {held.width} columns: call reset() before another input"
                )
            return None
        real = np.ones((num_rows, width), dtype=bool)
        if mask is not None and mask.shape == real.shape:
            real = (mask != 0).cpu().numpy()
        if not (tokens := real.sum(1)).all():
            raise ValueError(
                f"the rows have {tokens.tolist()} tokens in the encoder's mask: give each row at least one"
            )
        differs = (hidden[1:] != hidden[:-1]).flatten(1).any(1).cpu().numpy()
        differs |= (real[1:] != real[:-1]).any(1)
        first = np.flatnonzero(np.concatenate(([True], differs)))
        which = np.searchsorted(first, np.arange(num_rows), side="right") - 1
        return cls(which.tolist(), first.tolist(), real[first])


class CrossKV:
    """The cross sequences of a batch, and which of them each row reads: `which`, one number for each row.

    `kv` gets one for each request of `output`, with as many tokens as it has columns that are no padding. The
    caller opens the rows' sequences as readers of `sequence(row)`, and then calls `release`: a cross sequence
    is freed with the last sequence that reads it. Raises OutOfTokens, OutOfRows, SequenceTooLong, with nothing
    open.
    """

    def __init__(self, kv: KVCache, output: EncoderOutput) -> None:
        self.which, self.width = output.which, output.real.shape[1]
        self._kv = kv
        self._lengths = output.real.sum(1).tolist()
        self._sequences: list[CrossSequence] = []
        try:
            for length in self._lengths:
                self._sequences.append(kv.open_cross(length))
        except BaseException:
            self.release()
            raise
        request, column = np.nonzero(output.real)
        source = np.array(output.first)[request] * self.width + column
        places = request * self.width + column
        # The tokens to write, as places among all columns of all rows, and their slots.
        self._source, places_there = upload([source, places], kv.memory.device)
        self._slots = torch.cat([kv.slots(sequence) for sequence in self._sequences]).long()
        shape = len(self._sequences), self.width
        padded = torch.zeros(shape, dtype=torch.int64, device=kv.memory.device)
        padded.view(-1)[places_there] = self._slots
        self._columns = padded  # the slot of every column of every request; 0 in padding
        self._seen: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all encoder outputs that are read."""
        return sum(self._lengths[request] for request in set(self.which))

    def sequence(self, row: int) -> CrossSequence:
        """Returns the cross sequence that a row reads."""
        return self._sequences[self.which[row]]

    def release(self) -> None:
        """Leaves the cross sequences to their readers; those without any are freed."""
        for sequence in self._sequences:
            self._kv.close(sequence)

    def reorder(self, order: list[int]) -> None:
        """Continues row `order[i]` as row i."""
        which = [self.which[row] for row in order]
        if which != self.which:
            self.which, self._seen = which, None

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes a layer's K/V, `[rows, heads, columns, dim]`, of the first row of each request."""
        write_tokens(self._kv.memory.pool, layer_idx, self._slots, self._source, (keys, values))

    def seen(self) -> torch.Tensor:
        """Returns the slots that the rows read, int64 `[rows, columns]`, or `[1, columns]` if all read the
        same."""
        if self._seen is None:
            requests = self.which if len(set(self.which)) > 1 else self.which[:1]
            (index,) = upload([np.array(requests, dtype=np.int64)], self._columns.device)
            self._seen = self._columns.index_select(0, index)
        return self._seen
