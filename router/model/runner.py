"""Executes step plans on a device: applies the edits, runs the model, samples, and returns tokens and counts.

The runner decides nothing: the plan says which rows run, and over which positions. On a GPU, a step runs as one
CUDA graph (`cuda_graph.py`), which also allocates the slots of a step that has decodes only. Steps that are too
large for the graphs run eagerly, and so do all steps on a CPU.
A step is launched and later collected, so that the next step can be queued on the GPU in between.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from lightkv.attention import AttentionMetadata
from lightkv.edits import decode
from lightkv.errors import CheckFailed
from lightkv.memory_map import CACHED, OWN, MemoryMap
from lightkv.router.engine.step import (
    ExpectedMemory,
    Limits,
    PoolMap,
    PromptLogprobs,
    SlotOwners,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

from .cuda_graph import StepGraphs
from .parts import RunnerParts, StepInputs, StepOutput

Report = Callable[[str], None]

MAX_CELLS = 65_536  # of a map; in larger pools a cell stands for several slots


class _StepInFlight(NamedTuple):
    """A step that was launched and not collected yet.

    `output` is in host memory; on a GPU it is complete once the event `done` has occurred.
    """

    plan: StepPlan
    output: StepOutput
    done: torch.cuda.Event | None


class ModelRunner:
    """Executes plans on one device, in order. An engine in the same process uses it as its executor.

    `limits`: the plans stay within them. If `fatal` is set after an error, memory and ledger no longer agree,
    or the device is lost: make a new runner.
    """

    def __init__(self, parts: RunnerParts, limits: Limits, graphs: StepGraphs | None) -> None:
        self.fatal = False
        self._parts = parts
        self._graphs = graphs
        self._in_flight: deque[_StepInFlight] = deque()
        # There is memory for the logits of so many tokens, since a step may sample as many.
        self._scored_at_once = min(max(limits.max_num_seqs, 16), 256)
        self._metadata = AttentionMetadata(
            limits.max_num_seqs,
            limits.max_step_tokens,
            parts.memory,
            prefix_members=limits.prefix_sharing.max_members,
        )

    def announce(self, report: Report) -> None:
        """Calls `report` with a line before a step captures a graph, from now on."""
        if self._graphs is not None:
            self._graphs.announce = report

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step. See `fatal` for what an error means."""
        try:
            self.launch(plan)
            return self.collect()
        except BaseException:  # also Ctrl-C between the two calls
            self._in_flight.clear()
            raise

    @torch.inference_mode()
    def warm_up(self, plans: Iterable[StepPlan]) -> None:
        """Runs `plans` eagerly, without their edits, so that the kernels of such steps are compiled.

        Their rows are 0, the padding, so memory and counts stay as they are.
        """
        for plan in plans:
            self._run(plan)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Starts a step behind those in flight; `collect` returns its result.

        The host does not wait for a GPU here; on a CPU the step is computed at once. See `fatal` for what an
        error means; earlier steps can still be collected after it.
        """
        # An error before the edits are applied is fatal: they are sent only once.
        self.fatal = True
        graph = None if self._graphs is None or plan.scored else self._graphs.get(plan)
        allocates = graph is not None and graph.allocates
        edits = decode(plan.edits) if allocates else plan.all_edits()
        self._parts.sampler.set_rows(plan.new_rows, plan.prompts)
        self._parts.memory.apply(edits)
        self.fatal = allocates  # which an error in the middle leaves half done
        try:
            output = self._run(plan) if graph is None else graph.replay(plan)
            self.fatal = False
            self._in_flight.append(self._copy_to_host(plan, output))
        except Exception as error:
            self.fatal = self.fatal or self._loses_device(error)
            raise

    def collect(self) -> StepResult:
        """Returns the result of the oldest step in flight. Waits for that step, and for no later one."""
        step = self._in_flight.popleft()
        try:
            if step.done is not None:
                step.done.synchronize()
            return self._read(step.plan, step.output)
        except Exception as error:
            self.fatal = self.fatal or self._loses_device(error)
            raise

    @torch.inference_mode()
    def skip(self, plan: StepPlan) -> None:
        """Applies a step's edits without computing it, because an earlier step that it needs has failed."""
        self.fatal = True
        self._parts.memory.apply(plan.all_edits())
        self.fatal = False

    @torch.inference_mode()
    def check(self, edits: bytes, expected: ExpectedMemory) -> None:
        """Applies `edits`, then compares the memory with the ledger and checks the sampler; synchronises.

        Raises CheckFailed if they disagree, and InvalidFree; any error here is fatal.
        """
        self.fatal = True
        memory = self._parts.memory
        memory.apply(decode(edits))
        if memory.num_free != expected.num_free:
            raise CheckFailed(
                f"the ledger counts {expected.num_free} free slots, the memory {memory.num_free}"
            )
        memory.check(expected.private)
        self._parts.sampler.check()
        self.fatal = False

    @torch.inference_mode()
    def map(self, edits: bytes, owners: SlotOwners) -> PoolMap:
        """Applies `edits`, then returns what the slots are used for; synchronises. For errors see `fatal`."""
        self.fatal = True
        memory = self._parts.memory
        memory.apply(decode(edits))
        self.fatal = False
        try:
            own = {where: OWN + where[0] for where in owners.private}
            pool = MemoryMap(memory.labels(owners.segments, own, CACHED))
        except Exception as error:
            self.fatal = self._loses_device(error)
            raise
        slots_per_cell = -(-len(pool.labels) // MAX_CELLS)
        cells = pool.labels[::slots_per_cell].tolist()
        return PoolMap(**pool.counts._asdict(), slots_per_cell=slots_per_cell, cells=cells)

    def _loses_device(self, error: Exception) -> bool:
        """Returns whether the device is unusable after `error`: on a GPU, after all but out of memory."""
        on_gpu = self._parts.memory.device.type == "cuda"
        return on_gpu and not isinstance(error, torch.OutOfMemoryError)

    def _run(self, plan: StepPlan) -> StepOutput:
        """Runs a step eagerly, after its edits."""
        inputs = StepInputs.load(plan, self._metadata)
        if not plan.scored:
            return inputs.sample(self._parts, inputs.logits(self._parts, self._metadata), plan.kind)
        logits, scores = inputs.logits_and_scores(self._parts, self._metadata, plan, self._scored_at_once)
        return inputs.sample(self._parts, logits, plan.kind)._replace(scores=scores)

    def _copy_to_host(self, plan: StepPlan, output: StepOutput) -> _StepInFlight:
        """Starts copying the output to the host, before the next replay overwrites it."""
        on_host = output.to_host(bool(plan.logprobs))
        done = None
        if output.packed.is_cuda:
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(output.packed.device))
        return _StepInFlight(plan, on_host, done)

    def _read(self, plan: StepPlan, output: StepOutput) -> StepResult:
        """Makes the result of tokens, log-probabilities and the device's own counts."""
        *tokens, num_free, flags = output.packed.tolist()
        logprobs: dict[int, TokenLogprobs] = {}
        if plan.logprobs:
            _, own, top_ids, top_logprobs = output.sampled
            assert own is not None
            assert top_ids is not None
            assert top_logprobs is not None
            likeliest = list(zip(own.tolist(), top_ids.tolist(), top_logprobs.tolist(), strict=True))
            for i, count in plan.logprobs.items():
                logprob, ids, values = likeliest[i]
                logprobs[i] = TokenLogprobs(logprob, ids[:count], values[:count])
        scored = [PromptLogprobs(*(part.numpy().tobytes() for part in one)) for one in output.scores]
        return StepResult(plan.step, tokens[: len(plan.sample)], num_free, flags, logprobs, scored)
