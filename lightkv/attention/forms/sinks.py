"""Sequences that have dropped tokens and hold their first ones, StreamingLLM's sinks.

A query attends to the sinks as if the dropped tokens had never been there, and to all other entries at their
true positions. So it attends twice, once rotated back by the number of dropped tokens, and the results are
merged, which is one softmax over both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lightkv.attention.backend import AttentionBackend
from lightkv.attention.batch import Batch
from lightkv.attention.step import Step
from lightkv.attention.torch_backend import TorchAttention
from lightkv.attention.triton_backend import TritonAttention
from lightkv.memory.staging import upload
from lightkv.triton_kernels.attention.attention_reference import attend_request
from lightkv.triton_kernels.attention.decode.decode_attention import decode_attention
from lightkv.triton_kernels.attention.merge_states import merge_states
from lightkv.triton_kernels.attention.mixed_attention import mixed_attention
from lightkv.triton_kernels.attention.variants.sink_logits import SinkLogits
from lightkv.triton_kernels.attention.variants.variant import Scored, Variant

from .gaps import Gaps, with_gaps


@dataclass(frozen=True)
class Sinks(Gaps):
    """`num_sinks`: how many first entries every sequence holds still."""

    num_sinks: int

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

    def attend_by_kernels(
        self, layer: TritonAttention, q: torch.Tensor, step: Step, out: torch.Tensor
    ) -> None:
        attend_apart_by_kernels(layer, q, step, out, self.num_sinks, self.dropped)

    def attend_in_torch(self, layer: TorchAttention, q: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        attend_apart_in_torch(layer, q, step, out, self.num_sinks, self.dropped)


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


def attend_apart_by_kernels(
    layer: TritonAttention,
    q: torch.Tensor,
    step: Step,
    out: torch.Tensor,
    num_sinks: int,
    dropped: tuple[int, ...],
) -> None:
    """Writes the attention of prefills to `out`: q's over the entries after the sinks, merged with that of q,
    rotated back by what its sequence has `dropped`, over the sinks."""
    assert layer.rotary is not None
    kv, num_tokens = layer.paged_kv(step), len(q)
    partial_out = torch.empty((2, *out.shape), dtype=torch.float32, device=out.device)
    lse = torch.empty((2, *q.shape[:2]), dtype=torch.float32, device=q.device)

    # The index without its first columns: a row without its sinks.
    lengths = step.kv_lens - num_sinks
    mixed_attention(
        layer.as_stored(q, kv.format, step),
        kv._replace(index=kv.index[:, num_sinks:]),
        step.rows,
        step.q_starts,
        lengths,
        layer.options,
        plan=layer.mixed_plan(q, step.q_starts, lengths, step),
        out=partial_out[0],
        lse=lse[0],
    )

    # Every query sees all sink tokens, so to the decode kernels it is a request of its own. Learned sinks
    # join one of the two parts only.
    by_token = step.plans.get(
        "dropped",
        layer.layer_idx,
        lambda: upload([np.repeat(np.array(dropped), step.host.counts)], step.memory.device)[0],
    )
    rotated = layer.rotary.rotate_back(q, by_token)
    decode_attention(
        layer.as_stored(rotated, kv.format, step),
        kv,
        step.rows.repeat_interleave(step.q_lens, output_size=num_tokens),
        torch.full((num_tokens,), num_sinks, dtype=torch.int32, device=q.device),
        layer.options.without(SinkLogits),
        out=partial_out[1],
        lse=lse[1],
    )
    merge_states(partial_out, lse, out=out)
    layer.restore_heads(out, kv.format, step)


def attend_apart_in_torch(
    layer: TorchAttention,
    q: torch.Tensor,
    step: Step,
    out: torch.Tensor,
    num_sinks: int,
    dropped: tuple[int, ...],
) -> None:
    """Does the same in plain torch, sequence by sequence."""
    host = step.host
    ends = np.cumsum(host.counts)
    for idx, by in enumerate(dropped):
        queries = slice(int(ends[idx] - host.counts[idx]), int(ends[idx]))
        slots = step.index[int(host.rows[idx]), : int(host.kv_lens[idx])].long()
        out[queries] = attend_past_sinks(layer, q, queries, step, slots, num_sinks, by)


def attend_past_sinks(
    layer: TorchAttention,
    q: torch.Tensor,
    queries: slice,
    step: Step,
    slots: torch.Tensor,
    num_sinks: int,
    dropped: int,
) -> torch.Tensor:
    """Returns the attention of a sequence's `queries` in q to `slots`, of which the first `num_sinks` are those
    of its sinks. The sinks' keys are rotated on by what it has `dropped`, which gives the same scores as to
    rotate its queries back by as much."""
    keys, values = layer.read(step, slots)
    keys = keys.to(q.dtype)
    if num_sinks:
        assert layer.rotary is not None
        sinks = layer.rotary.rotate_back(keys[:num_sinks], torch.tensor([-dropped], device=q.device))
        keys = torch.cat((sinks, keys[num_sinks:]))
    scored = Scored.of_last(queries, 0, len(keys), q.device)
    return attend_request(q[queries], keys, values, layer.options, scored)
