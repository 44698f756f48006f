"""The objects that the runner and its CUDA graphs share, and what a step reads and returns: every step, eager
or captured, is `StepInputs.load`, `StepInputs.logits`, `StepInputs.sample`."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from lightkv.attention import AttentionBackend, AttentionMetadata
from lightkv.integrations.model.hf_model import forward, forward_slices
from lightkv.memory.kv_memory import KVMemory
from lightkv.memory.staging import packed_size, upload
from lightkv.router.engine.step import StepPlan
from lightkv.router.sampling_params import SamplerKind

from .sampler import PromptScores, Sampled, Sampler


class RunnerParts(NamedTuple):
    """The model, the attention backend of each layer, the memory and the sampler."""

    model: PreTrainedModel
    backends: Sequence[AttentionBackend]
    memory: KVMemory
    sampler: Sampler


class StepOutput(NamedTuple):
    """The results of a step on the device.

    `packed`: int64, the sampled tokens and then the memory's two counters, so that one copy brings them all.
    `scores`: one for each of the plan's `scored`.
    """

    sampled: Sampled
    packed: torch.Tensor
    scores: Sequence[PromptScores] = ()

    @classmethod
    def of(cls, sampled: Sampled, memory: KVMemory) -> "StepOutput":
        """Packs the results. Call it after all other work of the step has been launched."""
        return cls(sampled, torch.cat((sampled.tokens, memory.counters.long())))

    def to_host(self, with_logprobs: bool) -> "StepOutput":
        """Returns a copy in pinned memory, complete once the stream has reached this; on the CPU, itself."""
        if self.packed.device.type == "cpu":
            return self
        sampled = self.sampled
        if with_logprobs:
            sampled = Sampled._make(None if part is None else _pinned(part) for part in sampled)
        scores = [PromptScores._make(map(_pinned, one)) for one in self.scores]
        return StepOutput(sampled, _pinned(self.packed), scores)


class StepInputs(NamedTuple):
    """What a step reads on the device beside its metadata: the tokens of prompts, and what is sampled.

    In a static batch of T tokens and up to n samples all of them have fixed sizes; unused ones are 0, and
    sample for row 0.
    """

    token_ids: torch.Tensor | None  # int64 [T]; None if there are decodes only
    next_of: torch.Tensor  # int64 [T], the rows whose last sampled tokens are the inputs; 0 for token_ids
    last_tokens: torch.Tensor | None  # int64 [n], which tokens are sampled; None for all
    rows: torch.Tensor  # int64 [n], of the samples
    positions: torch.Tensor  # int64 [n], of the tokens that are drawn

    @staticmethod
    def bytes_for(num_tokens: int, num_samples: int) -> int:
        """Returns the bytes that `load` uploads beside the metadata of a static batch with prefill slots."""
        sizes = num_tokens, num_tokens, num_samples, num_samples, num_samples
        return packed_size([np.empty(size, dtype=np.int64) for size in sizes])

    @classmethod
    def load(
        cls,
        plan: StepPlan,
        metadata: AttentionMetadata,
        num_samples: int | None = None,
        shares_prefixes: bool = False,
    ) -> "StepInputs":
        """Loads a step into `metadata` and returns its inputs, all in one upload.

        num_samples: how many there are in a static batch; the plan's own number if None.
        shares_prefixes: the static batch is of a graph with shared prefixes, even if the plan has none.
        """
        num_prefills = plan.num_prefills
        rows, starts, count = (
            np.array(numbers, dtype=np.int64) for numbers in (plan.rows, plan.starts, plan.counts)
        )
        prompt_ids = np.frombuffer(plan.token_ids, dtype=np.int32).astype(np.int64)
        num_prompt, num_decodes = len(prompt_ids), len(rows) - num_prefills
        shape = metadata.shape
        ids = np.concatenate((prompt_ids, np.zeros(num_decodes, dtype=np.int64)))
        next_of = np.concatenate((np.zeros(num_prompt, dtype=np.int64), rows[num_prefills:]))
        ends = count.cumsum()
        if shape is not None:
            ids, next_of = (shape.place_tokens(numbers, num_prompt) for numbers in (ids, next_of))
            ends = np.where(np.arange(len(rows)) < num_prefills, ends + num_decodes, ends - num_prompt)
        sample = np.array(plan.sample, dtype=np.int64)
        sampled = np.zeros((3, len(sample) if num_samples is None else num_samples), dtype=np.int64)
        sampled[0, : len(sample)] = ends[sample] - 1
        sampled[1, : len(sample)] = rows[sample]
        sampled[2, : len(sample)] = starts[sample] + count[sample]
        uploaded = metadata.prepare(
            rows,
            starts,
            count,
            num_prefills,
            prefixes=plan.prefixes if plan.prefixes or shares_prefixes else None,
            also=[ids, next_of, *sampled],
        )
        return cls(uploaded[0] if num_prefills or shape is not None else None, *uploaded[1:])

    def logits(self, parts: RunnerParts, metadata: AttentionMetadata) -> torch.Tensor:
        """Runs the model over the step that `metadata` holds. Returns the logits of the samples, `[n, V]`."""
        return forward(parts.model, self._input_ids(parts), metadata, parts.backends, self.last_tokens)

    def logits_and_scores(
        self, parts: RunnerParts, metadata: AttentionMetadata, plan: StepPlan, at_once: int
    ) -> tuple[torch.Tensor, list[PromptScores]]:
        """Returns `logits`, and what the plan's `scored` asks for, of at most `at_once` tokens at a time."""
        begins = np.cumsum([0, *plan.counts])
        places, targets, num_tops = [], [], []
        for part, first, target_ids, num_top in (
            (one.part, one.first, one.targets, one.num_top) for one in plan.scored
        ):
            ids = np.frombuffer(target_ids, np.int32).astype(np.int64)
            at = begins[part] + first + np.arange(len(ids))
            cuts = range(at_once, len(ids), at_once)
            places += np.split(at, cuts)
            targets += np.split(ids, cuts)
            num_tops.append([num_top] * (len(cuts) + 1))
        device = parts.memory.device
        uploaded = upload([*places, *targets], device)
        slices, wanted = uploaded[: len(places)], iter(uploaded[len(places) :])
        sampled = self.last_tokens
        if sampled is None:
            sampled = torch.arange(begins[-1], device=device)
        found = forward_slices(
            parts.model, self._input_ids(parts), metadata, parts.backends, [sampled, *slices]
        )
        logits = next(found)
        scores = [
            PromptScores.joined([PromptScores.of(next(found), next(wanted), num) for num in nums])
            for nums in num_tops
        ]
        return logits, scores

    def _input_ids(self, parts: RunnerParts) -> torch.Tensor:
        input_ids = parts.sampler.next_token.index_select(0, self.next_of)
        if self.token_ids is not None:
            input_ids = torch.where(self.next_of > 0, input_ids, self.token_ids)
        return input_ids

    def sample(
        self,
        parts: RunnerParts,
        logits: torch.Tensor,
        kind: SamplerKind,
        masks: torch.Tensor | None = None,
    ) -> StepOutput:
        """Samples the first `len(logits)` samples. `masks`: as in `Sampler.sample`."""
        num = len(logits)
        sampled = parts.sampler.sample(logits, self.rows[:num], self.positions[:num], kind, masks)
        return StepOutput.of(sampled, parts.memory)


# Samples a step whose logits are being computed. It takes the masks of its samples, as in `Sampler.sample` but
# on the host, in pinned memory where there is a GPU.
MaskedSampling = Callable[[torch.Tensor], StepOutput]


class StepLogits(NamedTuple):
    """The logits of a step's samples, `[n, V]`, the inputs that say how they are sampled, and what the step's
    prompts score."""

    inputs: StepInputs
    logits: torch.Tensor
    scores: Sequence[PromptScores] = ()

    def first(self, num: int) -> "StepLogits":
        """Returns the first `num` samples; the others of a static batch are padding."""
        return self._replace(logits=self.logits[:num])

    def sample(self, parts: RunnerParts, kind: SamplerKind, masks: torch.Tensor) -> StepOutput:
        """Samples with masks, which are on the host as those of a `MaskedSampling`."""
        on_device = masks.to(self.logits.device, non_blocking=True)
        return self.inputs.sample(parts, self.logits, kind, on_device)._replace(scores=self.scores)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an asynchronous copy in pinned memory, which comes from torch's cache after the first steps."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
