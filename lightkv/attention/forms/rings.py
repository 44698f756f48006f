"""Sequences whose rows are rings (`Ring`): a new token takes the entry of the oldest one.

A decode reads its ring where it is. The prompts of a step are read in order: their index has a row for each
sequence, with the sinks and then what its first query sees, so that to attention they are sequences that have
dropped tokens.

A query attends to the sinks as if the dropped tokens had never been there, and to all other tokens at their
true positions. So a prompt attends twice, once rotated back by the number of dropped tokens, and the results
are merged, which is one softmax over both.
"""

from dataclasses import dataclass, replace

import numpy as np

from lightkv.attention.backend import AttentionBackend
from lightkv.attention.batch import Batch
from lightkv.memory.staging import upload
from lightkv.memory.token_table import TokenTable, packed_ranges
from lightkv.triton_kernels.attention.lookups import Lookup, RingRows
from lightkv.triton_kernels.attention.lookups.ring_rows import check_held
from lightkv.triton_kernels.attention.variants.variant import Variant
from lightkv.triton_kernels.layout.ring import Ring

from .form import PLAIN, Form, Seen


def over_rings(batch: Batch, ring: Ring) -> Batch:
    """Returns a batch of the same sequences, whose rows are such rings; their `starts` are positions.

    All are decodes, or all are prefills, of which either each has dropped tokens before this step or none has.
    A prefill takes up to `ring.room` tokens. Raises ValueError otherwise, and where sequences have dropped
    tokens in another way or read prefixes together.
    """
    num_prefills, starts = batch.num_prefills, batch.starts.tolist()
    is_plain = batch.form == PLAIN and batch.shared is None
    if not is_plain or num_prefills not in (0, len(starts)):
        raise ValueError(
            f"{num_prefills} prefills among {len(starts)} rings, which are {batch.form} already, and read "
            f"{batch.shared} together: a step over rings has prefills or decodes only, and gets positions "
            "instead of dropped tokens; run the others in another step"
        )
    if not num_prefills:
        return replace(batch, form=Rings(ring))
    dropped = tuple(ring.dropped(start) for start in starts)
    rooms = [ring.room(start) for start in starts]
    if any(dropped) != all(dropped) or (batch.counts > rooms).any():
        raise ValueError(
            f"prefills of {batch.counts.tolist()} tokens at {starts} of {ring}: all have dropped tokens or "
            f"none has, and at most {rooms} are computed at once; cut them, or run them apart"
        )
    return replace(batch, form=RingPrompts(ring, dropped))


@dataclass(frozen=True)
class _OnRings(Form):
    """What decodes and prompts over rings have in common."""

    ring: Ring

    def check_mask(self, mask: Variant) -> None:
        raise ValueError(
            f"a mask in a step over {self.ring}: its columns are the positions of sequences that hold all "
            "their tokens; run the sequences with a mask in a step of their own"
        )

    def check_table(self, batch: Batch, table: TokenTable) -> None:
        if self.ring.capacity > table.max_entries:
            raise ValueError(
                f"{self.ring} takes {self.ring.capacity} entries of a row, and the table's rows have "
                f"{table.max_entries} entries; make the table longer, or the ring smaller"
            )

    def places(self, batch: Batch, table: TokenTable) -> np.ndarray:
        positions = packed_ranges(batch.starts, batch.counts)
        return table.places(np.repeat(batch.rows, batch.counts), self.ring.entries(positions))


@dataclass(frozen=True)
class Rings(_OnRings):
    """Decodes over rings. A query attends to its ring's window, and, rotated back by the tokens that were
    dropped, to its sinks; a layer with a window or chunks of its own sees what these let it see."""

    @property
    def lookup(self) -> Lookup:
        return RingRows(self.ring)

    def check_layer(self, layer: AttentionBackend) -> None:
        check_held(self.ring, layer.options.variants)
        if self.ring.sinks:
            _check_sinks(layer, self.ring.sinks)

    @property
    def num_sinks(self) -> int:
        return self.ring.sinks

    def dropped_by(self, sequence: int, length: int) -> int:
        return self.ring.dropped(length - 1)


@dataclass(frozen=True)
class RingPrompts(_OnRings):
    """Prefills over rings. `dropped`: how many tokens each had dropped before this step."""

    dropped: tuple[int, ...]

    @property
    def is_static(self) -> bool:
        return False

    @property
    def has_gaps(self) -> bool:
        """Whether they have dropped tokens, so that their entries are put in order."""
        return any(self.dropped)

    def check_layer(self, layer: AttentionBackend) -> None:
        if self.has_gaps:
            check_held(self.ring, layer.options.variants, self.ring.least_held)
            if self.ring.sinks:
                _check_sinks(layer, self.ring.sinks)

    def seen(self, batch: Batch, table: TokenTable) -> Seen:
        if not self.has_gaps:
            return super().seen(batch, table)
        ring, num_rows, gaps = self.ring, len(batch.rows), np.array(self.dropped, dtype=np.int64)
        # The slots of the sinks, then those of the tokens from the first one on that is not dropped.
        window = ring.sinks + (gaps[:, None] + np.arange(ring.size)) % ring.size
        sinks = np.broadcast_to(np.arange(ring.sinks), (num_rows, ring.sinks))
        entries = np.concatenate((sinks, window), 1) + batch.rows[:, None] * table.max_entries
        (on_device,) = upload([entries.reshape(-1)], table.device)
        index = table.read(on_device).view(num_rows, ring.capacity)
        return Seen(index, np.arange(len(gaps)), batch.starts - gaps)

    @property
    def num_sinks(self) -> int:
        return self.ring.sinks if self.has_gaps else 0

    def dropped_by(self, sequence: int, length: int) -> int:
        return self.dropped[sequence]


def _check_sinks(layer: AttentionBackend, num_sinks: int) -> None:
    """Raises ValueError for a layer that cannot attend to sinks from other positions."""
    if layer.rotary is None or layer.options.counts_positions:
        raise ValueError(
            f"a step with {num_sinks} sinks needs the rotary frequencies (rotary) and a causal layer in which "
            f"no window, chunk or bias counts positions; layer {layer.layer_idx} has {layer.options.variants}, "
            f"causal {layer.options.causal}"
        )
