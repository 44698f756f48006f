"""Steps as CUDA graphs, which run without the host: one for each size of decode batch, and, for steps with
prompts, one for each bucket of tokens and each of a few numbers of prefills and decodes.

A decode graph allocates a slot for every row, writes the token table, runs the forward pass (which writes K/V
and attends over the table), samples, stores the token as the row's next input, and moves every row one position
on. A step with the rows and shared prefixes of the step before needs no upload: replaying the graph is all of
it. Batches are padded to the next size with row 0, whose slot is 0.

A prompt graph runs the forward pass and computes the logits to sample from. The slots of its step are allocated
before it, because edits that come after the allocation, such as those that publish a chunk, read them. Sampling
comes after it, eagerly: its few launches are made while the graph runs, and one graph serves every kind of
sampling. For steps with rows that have a grammar, a decode graph has two parts as well, and both are captured:
what such rows may sample is known only while the first part runs (`runner.py`).
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from lightkv.attention import Batch, BatchShape, StaticStep
from lightkv.ledger.shared_prefixes import SharedPrefix
from lightkv.memory.capture import Capture
from lightkv.memory.state_passes import StaticPasses, decode_pass
from lightkv.router.engine.step import Limits, StepPlan
from lightkv.router.sampling_params import SamplerKind
from lightkv.triton_kernels.slots.allocate import TableEntries
from lightkv.triton_kernels.slots.entries import read_entries

from .parts import AppliedPlan, RunnerParts, Sampling, StepInputs, StepLogits, StepOutput


class GraphKey(NamedTuple):
    """What distinguishes graphs of one batch size: how they sample, whether rows share prefixes, which are read
    by launches of their own, and whether masks say what may be sampled."""

    kind: SamplerKind
    shares_prefixes: bool = False
    has_masks: bool = False

    @classmethod
    def of(cls, plan: StepPlan, has_masks: bool = False) -> "GraphKey":
        """Returns the key of a plan that has decodes only."""
        return cls(plan.kind, bool(plan.prefixes), has_masks)


class _Loaded(NamedTuple):
    """The batch in a graph's static tensors, which are ready for the step after `step`."""

    step: int
    rows: list[int]
    prefixes: list[SharedPrefix]


_PADDING = StepPlan(0, b"", [], [], [], 0, b"", [], SamplerKind.GREEDY, {}, [], 0)


class DecodeGraph:
    """The static tensors of one batch size, and the graphs captured for it so far."""

    def __init__(self, parts: RunnerParts, size: int, prefix_members: int, logits: "SharedLogits") -> None:
        memory = parts.memory
        # Whether it allocates the slots of its decodes. Those of several layer groups are allocated before it.
        self.allocates = len(memory.table.groups) == 1
        self._parts = parts
        self._logits = logits
        self._static = StaticStep(BatchShape.of_decodes(size), memory, prefix_members=prefix_members)
        self._step = self._static.load(Batch.empty())
        self._slots = torch.zeros(size, dtype=torch.int32, device=memory.device)
        self._count = torch.zeros(1, dtype=torch.int32, device=memory.device)
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, StepOutput]] = {}
        # The parts up to the logits, by whether rows share prefixes: of steps with masks, and of kinds of
        # sampling that have no graph yet.
        self._forwards: dict[bool, tuple[torch.cuda.CUDAGraph, StepLogits]] = {}
        self._loaded: _Loaded | None = None

    def capture(self, key: GraphKey, shared: Capture) -> None:
        """Captures the graph of `key`.

        Meanwhile the static tensors hold padding alone, so no slot is allocated.
        """
        if key.kind >= SamplerKind.EDITED:
            self._parts.sampler.enable_logit_edits()
        self._load_padding(key)
        if not key.has_masks:
            self._graphs[key] = shared.graph(lambda: self._run(key.kind))
            return
        if key.shares_prefixes not in self._forwards:
            self._forwards[key.shares_prefixes] = shared.graph(self._forward)
        logits = self._forwards[key.shares_prefixes][1]
        self._graphs[key] = shared.graph(lambda: self._sample_masked(key, logits))

    def runs(self, key: GraphKey) -> bool:
        """Returns whether the forward pass of `key` is captured, if not its sampling."""
        return key in self._graphs or key.shares_prefixes in self._forwards

    def rehearse(self, key: GraphKey) -> None:
        """Launches what `capture` would capture, once."""
        self._load_padding(key)
        if not key.has_masks:
            self._run(key.kind)
            return
        self._sample_masked(key, self._forward())

    def replay(self, applied: AppliedPlan) -> StepOutput:
        """Runs a plan that has decodes only. The next replay overwrites what it returns."""
        plan = applied.plan
        key = GraphKey.of(plan)
        self._load(plan)
        if key in self._graphs:
            graph, output = self._graphs[key]
            graph.replay()
        else:
            inputs, logits, _ = self._replayed_forward(key.shares_prefixes)
            output = inputs.sample(self._parts, logits, key.kind)
        self._loaded = _Loaded(plan.step, plan.rows, plan.prefixes)
        return output

    def replay_forward(self, applied: AppliedPlan) -> Sampling:
        """Runs a plan that has decodes only, up to its logits. The next replay overwrites what its sampling
        returns."""
        plan = applied.plan
        self._load(plan)
        logits = self._replayed_forward(bool(plan.prefixes))
        self._loaded = _Loaded(plan.step, plan.rows, plan.prefixes)
        return partial(self._sample, GraphKey.of(plan, has_masks=True), logits)

    def _replayed_forward(self, shares_prefixes: bool) -> StepLogits:
        if shares_prefixes not in self._forwards:
            return self._forward()
        graph, logits = self._forwards[shares_prefixes]
        graph.replay()
        return logits

    def _sample(self, key: GraphKey, logits: StepLogits, masks: torch.Tensor) -> StepOutput:
        self._logits.masks(len(masks)).copy_(masks, non_blocking=True)
        if key not in self._graphs:
            return self._sample_masked(key, logits)
        graph, output = self._graphs[key]
        graph.replay()
        return output

    def _sample_masked(self, key: GraphKey, logits: StepLogits) -> StepOutput:
        masks = self._logits.masks(len(logits.logits))
        return logits.inputs.sample(self._parts, logits.logits, key.kind, masks)

    def _load(self, plan: StepPlan) -> None:
        """Makes the static tensors those of a plan, unless they are, and claims its slots."""
        count = len(plan.rows)
        if self._loaded is None or (plan.step - 1, plan.rows, plan.prefixes) != self._loaded:
            batch = Batch.of(plan.rows, plan.starts, plan.counts, 0)
            if plan.prefixes:
                batch = batch.sharing(plan.prefixes, self._static.prefix_members)
            self._step = self._static.load(batch)
            self._count.fill_(count)
        if self.allocates:
            self._parts.memory.allocator.claim(count)

    def _load_padding(self, key: GraphKey) -> None:
        self._loaded = None
        batch = Batch.empty()
        if key.shares_prefixes:
            batch = batch.sharing([], self._static.prefix_members)
        self._step = self._static.load(batch)
        self._count.zero_()

    def _run(self, kind: SamplerKind) -> StepOutput:
        inputs, logits = self._compute()
        return inputs.sample(self._parts, logits, kind)

    def _forward(self) -> StepLogits:
        inputs, logits = self._compute()
        return StepLogits(inputs, self._logits.store(logits))

    def _compute(self) -> tuple[StepInputs, torch.Tensor]:
        """Computes the logits, and moves every row one position on."""
        memory, step = self._parts.memory, self._step
        rows = step.rows
        if self.allocates:
            entries = TableEntries(memory.table.req_to_token, step.position_ids, rows)
            memory.allocator.alloc_into(self._slots, self._count, entries)
            step.slot_mapping.copy_(self._slots)
        else:
            read_entries(memory.table.groups, rows, step.position_ids, step.slot_mapping)
        if memory.states is not None:
            step = replace(step, states=[decode_pass(memory.states, rows)])
        inputs = StepInputs(step, None, rows, None, rows, step.kv_lens.long())
        logits = inputs.logits(self._parts)
        active = rows > 0
        step.position_ids.add_(active)
        step.kv_lens.add_(active)
        return inputs, logits


class SharedLogits:
    """One tensor `[num_samples, V]` for the logits of all graphs that do not sample, which never run at the
    same time: kept apart, those of each would be tens of megabytes. And one for the masks of their tokens."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._logits: torch.Tensor | None = None
        self._masks: torch.Tensor | None = None

    def store(self, logits: torch.Tensor) -> torch.Tensor:
        """Copies `logits`, `[n, V]`, to the first n places, and returns these. The first call makes the tensor;
        it must not be captured."""
        if self._logits is None:
            self._logits = logits.new_empty(self._num_samples, logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)

    def masks(self, num: int) -> torch.Tensor:
        """Returns the first `num` masks, int32 `[num, ceil(V / 32)]`, once logits have been stored. The first
        call makes the tensor; it must not be captured."""
        assert self._logits is not None
        if self._masks is None:
            size = self._num_samples, -(-self._logits.shape[1] // 32)
            self._masks = self._logits.new_zeros(size, dtype=torch.int32)
        return self._masks[:num]


class PromptGraph:
    """The static tensors of one shape of steps with prompts, and the graphs captured for it so far."""

    allocates = False

    def __init__(self, parts: RunnerParts, shape: BatchShape, limits: Limits, logits: SharedLogits) -> None:
        self.shape = shape
        self._parts = parts
        self._logits = logits
        most = min(shape.num_tokens, limits.max_num_seqs)
        self._num_samples = min(shape.num_prefills - 1 + shape.num_decodes, most)
        room = StepInputs.bytes_for(shape.num_tokens, self._num_samples)
        members = limits.prefix_sharing.max_members
        self._static = StaticStep(shape, parts.memory, prefix_members=members, room=room)
        states = parts.memory.states
        self._passes = None if states is None else StaticPasses(states, *shape)
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def capture(self, shares_prefixes: bool, shared: Capture) -> None:
        """Captures the graph without or with shared prefixes.

        Meanwhile the static tensors hold padding alone.
        """
        self._load(AppliedPlan(_PADDING, {}), shares_prefixes)
        self._graphs[shares_prefixes] = shared.graph(self._compute)

    def runs(self, shares_prefixes: bool) -> bool:
        """Returns whether the graph without or with shared prefixes is captured."""
        return shares_prefixes in self._graphs

    def rehearse(self) -> None:
        """Launches what `capture` would capture without shared prefixes, once."""
        self._load(AppliedPlan(_PADDING, {}), False)
        self._compute()

    def has_room(self, plan: StepPlan) -> bool:
        """Returns whether there is room for the pieces of a plan."""
        parts = plan.rows, plan.counts, plan.num_prefills
        return not plan.pieces or self._passes is None or self._passes.fits(*parts)

    def replay_forward(self, applied: AppliedPlan) -> Sampling:
        """Runs a plan whose slots are allocated, up to its logits. The next replay overwrites them."""
        plan = applied.plan
        shares_prefixes = bool(plan.prefixes)
        self._load(applied, shares_prefixes)
        if shares_prefixes in self._graphs:
            graph, logits = self._graphs[shares_prefixes]
            graph.replay()
        else:
            logits = self._compute()
        found = StepLogits(self._inputs, logits).first(len(plan.sample))
        return partial(found.sample, self._parts, plan.kind)

    def _load(self, applied: AppliedPlan, shares_prefixes: bool) -> None:
        plan = applied.plan
        self._inputs = StepInputs.load(plan, self._static, self._num_samples, shares_prefixes)
        if self._passes is not None:
            parts, step = (plan.rows, plan.counts, plan.num_prefills), self._inputs.step
            passes = self._passes.load(*parts, applied.earlier, step.q_starts)
            self._inputs = self._inputs._replace(step=replace(step, states=passes))

    def _compute(self) -> torch.Tensor:
        return self._logits.store(self._inputs.logits(self._parts))
