"""Sequences that have dropped tokens and hold their first ones, StreamingLLM's sinks.

A query attends to the sinks as if the dropped tokens had never been there, and to all other entries at their
true positions. So it attends twice, once rotated back by the number of dropped tokens, and the results are
merged, which is one softmax over both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightkv.attention.backend import AttentionBackend
from lightkv.attention.batch import Batch
from lightkv.triton_kernels.attention.variants.variant import Variant

from .gaps import Gaps, with_gaps


@dataclass(frozen=True)
class Sinks(Gaps):
    """`num_sinks`: how many first entries every sequence holds still."""

    num_sinks: int = 0

    def check_mask(self, mask: Variant) -> None:
        raise ValueError(
            f"a mask in a step with {self.num_sinks} sinks: its columns are the positions of sequences that "
            "hold all their tokens; run the sequences with a mask in a step of their own"
        )

    def check_layer(self, layer: AttentionBackend) -> None:
        check_sinks(layer, self.num_sinks)

    def check_scores(self) -> None:
        raise ValueError(
            f"a step with {self.num_sinks} sinks attends to them from other positions, which are not scored; "
            "evict by the window alone"
        )

    def dropped_by(self, sequence: int, length: int) -> int:
        return self.dropped[sequence]


def with_sinks(batch: Batch, dropped: Sequence[int], num_sinks: int) -> Batch:
    """Returns a batch of the same sequences, which have dropped so many tokens each (`with_gaps`) after the
    first `num_sinks`, which each holds still.

    With sinks every sequence has dropped tokens, and is a prefill, even if of one token. Raises ValueError
    otherwise.
    """
    if num_sinks < 0:
        raise ValueError(f"{num_sinks} sinks of {len(batch.rows)} sequences: give 0 or more")
    made = with_gaps(batch, dropped)
    if not num_sinks:
        return made
    is_gapped = isinstance(made.form, Gaps) and all(made.form.dropped)
    if batch.num_prefills < len(batch.rows) or not is_gapped or (batch.starts < num_sinks).any():
        raise ValueError(
            f"{num_sinks} sinks: in such a step every sequence is a prefill, has dropped tokens and holds the "
            f"sinks; here {batch.num_prefills} of {len(batch.rows)} are prefills, they have dropped "
            f"{list(dropped)} and hold {batch.starts.tolist()}. Run the others in a step of their own"
        )
    assert isinstance(made.form, Gaps)
    return replace(made, form=Sinks(made.form.dropped, num_sinks))


def check_sinks(layer: AttentionBackend, num_sinks: int) -> None:
    """Raises ValueError for a layer that cannot attend to sinks from other positions."""
    if layer.rotary is None or layer.options.counts_positions:
        raise ValueError(
            f"a step with {num_sinks} sinks needs the rotary frequencies (rotary) and a causal layer in which "
            f"no window, chunk or bias counts positions; layer {layer.layer_idx} has {layer.options.variants}, "
            f"causal {layer.options.causal}"
        )
