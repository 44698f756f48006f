"""The objects that the runner and its CUDA graphs share, and what a step reads and returns: every step, eager
or captured, is `StepInputs.of` or `load`, `StepInputs.logits`, `StepInputs.sample`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from lightkv.attention import Batch, StaticStep, Step
from lightkv.integrations.model.hf_model import Backends, forward, forward_slices
from lightkv.memory.kv_memory import KVMemory
from lightkv.memory.staging import packed_size, upload
from lightkv.memory.state_passes import Earlier, state_passes
from lightkv.router.engine.step import StepPlan
from lightkv.router.sampling_params import SamplerKind

from .sampler import PromptScores, Sampled, Sampler


class RunnerParts(NamedTuple):
    """The model, the attention backend of each layer, the memory and the sampler."""

    model: PreTrainedModel
    backends: Backends
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
        return cls(sampled, torch.cat((sampled.tokens, memory.allocator.counters.long())))

    def to_host(self, with_logprobs: bool) -> "StepOutput":
        """Returns a copy in pinned memory, complete once the stream has reached this; on the CPU, itself."""
        if self.packed.device.type == "cpu":
            return self
        sampled = self.sampled
        if with_logprobs:
            sampled = Sampled._make(None if part is None else _pinned(part) for part in sampled)
        scores = [PromptScores._make(map(_pinned, one)) for one in self.scores]
        return StepOutput(sampled, _pinned(self.packed), scores)


class AppliedPlan(NamedTuple):
    """A plan whose edits the memory has applied. `earlier`: the states that its `pieces` read and write, by
    their index into the batch."""

    plan: StepPlan
    earlier: Earlier


class StepInputs(NamedTuple):
    """What a step reads on the device: the step itself, the tokens of prompts, and what is sampled.

    In a static batch of T tokens and up to n samples all of them have fixed sizes; unused ones are 0, and
    sample for row 0.
    """

    step: Step
    token_ids: torch.Tensor | None  # int64 [T]; None if there are decodes only
    next_of: torch.Tensor  # int64 [T], the rows whose last sampled tokens are the inputs; 0 for token_ids
    last_tokens: torch.Tensor | None  # int64 [n], which tokens are sampled; None for all
    rows: torch.Tensor  # int64 [n], of the samples
    positions: torch.Tensor  # int64 [n], of the tokens that are drawn

    @staticmethod
    def bytes_for(num_tokens: int, num_samples: int) -> int:
        """Returns the bytes that `load` uploads beside a static batch with places for prefills."""
        sizes = num_tokens, num_tokens, num_samples, num_samples, num_samples
        return packed_size([np.empty(size, dtype=np.int64) for size in sizes])

    @classmethod
    def of(cls, applied: AppliedPlan, memory: KVMemory, most_members: int) -> "StepInputs":
        """Makes the step of a plan and its inputs, in one upload, and one more where layers have states.
        `most_members`: as in `Batch.sharing`."""
        plan = applied.plan
        packed = _PackedPlan.of(plan)
        batch = packed.batch
        if plan.prefixes:
            batch = batch.sharing(plan.prefixes, most_members)
        samples = packed.samples(plan, batch.counts.cumsum(), len(plan.sample))
        step = Step.of(batch, memory, also=[packed.ids, packed.next_of, *samples])
        if memory.states is not None:
            parts = plan.rows, plan.counts, plan.num_prefills
            passes = state_passes(memory.states, *parts, applied.earlier)
            step = replace(step, states=passes)
        token_ids, *others = step.also
        return cls(step, token_ids if plan.num_prefills else None, *others)

    @classmethod
    def load(
        cls, plan: StepPlan, static: StaticStep, num_samples: int, shares_prefixes: bool
    ) -> "StepInputs":
        """Loads a plan into static tensors with room for `num_samples`, and returns its inputs there, all in
        one upload. `shares_prefixes`: they are those of a graph with shared prefixes, even if the plan has
        none.
        """
        packed, shape = _PackedPlan.of(plan), static.shape
        batch, num_prefills = packed.batch, plan.num_prefills
        if shares_prefixes:
            batch = batch.sharing(plan.prefixes, static.prefix_members)
        num_decodes = len(plan.rows) - num_prefills
        num_prompt = len(packed.ids) - num_decodes
        ends = batch.counts.cumsum()
        ends = np.where(np.arange(len(ends)) < num_prefills, ends + num_decodes, ends - num_prompt)
        tokens = [shape.place_tokens(numbers, num_prompt) for numbers in (packed.ids, packed.next_of)]
        step = static.load(batch, also=[*tokens, *packed.samples(plan, ends, num_samples)])
        return cls(step, *step.also)

    def logits(self, parts: RunnerParts) -> torch.Tensor:
        """Runs the model over the step. Returns the logits of the samples, `[n, V]`."""
        return forward(parts.model, self._input_ids(parts), self.step, parts.backends, self.last_tokens)

    def logits_and_scores(
        self, parts: RunnerParts, plan: StepPlan, at_once: int
    ) -> tuple[torch.Tensor, list[PromptScores]]:
        """Returns `logits`, and what the plan's `scored` asks for, of at most `at_once` tokens at a time."""
        begins = np.cumsum([0, *plan.counts])
        places, targets, num_tops = [], [], []
        for one in plan.scored:
            ids = np.frombuffer(one.targets, np.int32).astype(np.int64)
            at = begins[one.part] + one.first + np.arange(len(ids))
            cuts = range(at_once, len(ids), at_once)
            places += np.split(at, cuts)
            targets += np.split(ids, cuts)
            num_tops.append([one.num_top] * (len(cuts) + 1))
        device = parts.memory.device
        uploaded = upload([*places, *targets], device)
        slices, wanted = uploaded[: len(places)], iter(uploaded[len(places) :])
        sampled = self.last_tokens
        if sampled is None:
            sampled = torch.arange(begins[-1], device=device)
        found = forward_slices(
            parts.model, self._input_ids(parts), self.step, parts.backends, [sampled, *slices]
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
        self, parts: RunnerParts, logits: torch.Tensor, kind: SamplerKind, masks: torch.Tensor | None = None
    ) -> StepOutput:
        """Samples the first `len(logits)` samples. `masks`: as in `Sampler.sample`."""
        num = len(logits)
        sampled = parts.sampler.sample(logits, self.rows[:num], self.positions[:num], kind, masks)
        return StepOutput.of(sampled, parts.memory)


class _PackedPlan(NamedTuple):
    """A plan's numbers on the host: the batch, and for each token its id if it is a prompt's, else the row
    whose last sampled token it is, int64 `[T]`; 0 in the others."""

    batch: Batch
    ids: np.ndarray
    next_of: np.ndarray

    @classmethod
    def of(cls, plan: StepPlan) -> "_PackedPlan":
        """Packs a plan."""
        batch = Batch.of(plan.rows, plan.starts, plan.counts, plan.num_prefills)
        prompt_ids = np.frombuffer(plan.token_ids, dtype=np.int32)
        num_prompt, num_tokens = len(prompt_ids), len(batch.positions)
        ids, next_of = np.zeros((2, num_tokens), dtype=np.int64)
        ids[:num_prompt] = prompt_ids
        next_of[num_prompt:] = batch.rows[plan.num_prefills :]
        return cls(batch, ids, next_of)

    def samples(self, plan: StepPlan, ends: np.ndarray, num_samples: int) -> np.ndarray:
        """Returns the tokens, rows and positions of the plan's samples, int64 `[3, num_samples]`; `ends`:
        behind each sequence's tokens in the step."""
        batch, sample = self.batch, np.array(plan.sample, dtype=np.int64)
        sampled = np.zeros((3, num_samples), dtype=np.int64)
        sampled[0, : len(sample)] = ends[sample] - 1
        sampled[1, : len(sample)] = batch.rows[sample]
        sampled[2, : len(sample)] = batch.starts[sample] + batch.counts[sample]
        return sampled


# Samples a step whose logits are being computed. It takes the masks of its samples, as in `Sampler.sample` but
# on the host, in pinned memory where there is a GPU; None without masks.
Sampling = Callable[[torch.Tensor | None], StepOutput]


class StepLogits(NamedTuple):
    """The logits of a step's samples, `[n, V]`, the inputs that say how they are sampled, and what the step's
    prompts score."""

    inputs: StepInputs
    logits: torch.Tensor
    scores: Sequence[PromptScores] = ()

    def first(self, num: int) -> "StepLogits":
        """Returns the first `num` samples; the others of a static batch are padding."""
        return self._replace(logits=self.logits[:num])

    def sample(self, parts: RunnerParts, kind: SamplerKind, masks: torch.Tensor | None) -> StepOutput:
        """Samples. `masks`: as those of a `Sampling`."""
        on_device = None if masks is None else masks.to(self.logits.device, non_blocking=True)
        return self.inputs.sample(parts, self.logits, kind, on_device)._replace(scores=self.scores)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an asynchronous copy in pinned memory, which comes from torch's cache after the first steps."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
