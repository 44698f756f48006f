"""The batch of a LightKVCache: the sequences, the padding and the token ids of its rows."""

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq

import torch

from lightkv.errors import OutOfRows
from lightkv.kv_cache import KVCache
from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.ledger.sequence import Sequence

from .batch_call import ModelCall, Part, select


class TextBatch:
    """The rows of a batch, none at first, and the verbs that change them.

    sequences: one for each row; while a batch begins, rows with the same text have the same one. padding: the
    columns of padding that each row begins with. ids: int64 `[rows, columns so far]` on the cache's device.
    """

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self.sequences: list[Sequence] = []
        self.padding: list[int] = []
        self.ids = torch.empty(0, 0, dtype=torch.int64, device=kv.memory.device)

    @property
    def rows(self) -> list[int]:
        """The row of the token table that each row of the batch has."""
        return [sequence.row for sequence in self.sequences]

    def begin(
        self, call: ModelCall, kinds: Seq[Hashable], open_row: Callable[[int, list[int]], Sequence]
    ) -> list[Part]:
        """Opens a sequence for every row, but for those with the text and kind of an earlier row, which become
        forks once it is computed (`confirm`).

        `open_row` opens that of a row and the part of its text that may be hit. Tokens that are not cached have
        to be computed, and the last `num_logits` tokens in any case. Returns what is to be computed. Raises
        what `KVCache.open` and `extend` raise; no sequence is open then.
        """
        if self._kv.num_open + len(call.padding) > self._kv.max_sequences:
            raise OutOfRows(self._kv.max_sequences)
        sequences: list[Sequence] = []
        parts = []
        first_with: dict[Hashable, int] = {}
        try:
            texts = zip(call.input_ids.tolist(), call.padding, kinds, strict=True)
            for row, (columns, padding, kind) in enumerate(texts):
                text = columns[padding:]
                first = first_with.setdefault((kind, *text), row)
                if first < row:
                    sequences.append(sequences[first])
                    continue
                # `open` leaves at least the last token of its prompt to be computed. The prompt is cut here, so
                # that it leaves as many tokens as get logits.
                sequence = open_row(row, text[: max(len(text) - call.num_logits + 1, 1)])
                sequences.append(sequence)
                parts.append(Part(row, sequence.length, len(text) - sequence.length))
                self._kv.extend([sequence], [parts[-1].num_tokens])
                # Later rows of this very step may hit it: every layer writes its K/V before it attends.
                self._kv.publish(sequence)
        except BaseException:
            self._drop(sequences)
            raise
        self.sequences, self.padding = sequences, call.padding
        return parts

    def extend(self, num_new: int) -> list[Part]:
        """Allocates slots for `num_new` more columns of every row. Returns the same as `begin`. Raises what
        `KVCache.extend` raises."""
        parts = [Part(row, sequence.length, num_new) for row, sequence in enumerate(self.sequences)]
        self._kv.extend(self.sequences, [num_new] * len(parts))
        return parts

    def confirm(self, input_ids: torch.Tensor) -> None:
        """Notes that the columns `input_ids`, for which slots were allocated, have their K/V."""
        self._kv.confirm()
        if not len(self.ids):  # only now: a fork gives up what windows have passed
            found = self.sequences
            self.sequences = [
                one if found.index(one) == row else self._kv.fork(one) for row, one in enumerate(found)
            ]
        self.ids = torch.cat((self.ids, input_ids), 1) if len(self.ids) else input_ids

    def reorder(self, order: list[int]) -> None:
        """Continues row `order[i]` as row i, by forks. Raises OutOfRows, with nothing changed."""
        self.sequences = select(self._kv, self.sequences, order)
        self.padding = [self.padding[row] for row in order]
        self.ids = self.ids[order]

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens of every row, as `LightKVCache.crop` says."""
        shortest = min((sequence.length for sequence in self.sequences), default=0)
        if not -shortest <= tokens_to_remove <= 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative one; "
                f"the shortest row has {shortest} tokens"
            )
        try:
            for sequence in self.sequences:
                sequence.require_truncate(sequence.length + tokens_to_remove)
        except ValueError as error:
            raise ValueError(
                f"crop({tokens_to_remove}): {error}: call reset(), and the model with the shorter texts"
            ) from error
        if tokens_to_remove:
            for sequence in self.sequences:
                self._kv.truncate(sequence, sequence.length + tokens_to_remove)
            self.ids = self.ids[:, :tokens_to_remove]

    def end(self, failed: bool) -> None:
        """Closes all rows, whose tokens stay cached; with `failed` those that no call has confirmed are
        dropped."""
        if failed:  # some layers have no K/V of the last tokens
            self._drop(self.sequences)
        else:
            for sequence, padding, ids in zip(self.sequences, self.padding, self.ids.tolist(), strict=True):
                known = padding + len(sequence.prompt) // TOKEN_BYTES
                self._kv.close(sequence, ids[known:])
        self.sequences, self.padding = [], []
        self.ids = self.ids[:0, :0]

    def _drop(self, sequences: list[Sequence]) -> None:
        """Closes sequences, of which rows may have the same one, with nothing cached that is not confirmed."""
        for sequence in dict.fromkeys(sequences):
            self._kv.close(sequence, cache=False)
        self._kv.retract()
