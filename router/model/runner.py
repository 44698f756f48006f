"""Executes step plans on a device: applies the edits, runs the model, samples, and returns tokens and counts.

The runner decides nothing: the plan says which rows run, and over which positions. On a GPU, a step runs as one
CUDA graph (`cuda_graph.py`), which also allocates the slots of a step that has decodes only. Steps that are too
large for the graphs run eagerly, and so do all steps on a CPU.
A step is launched and later collected, so that the next step can be queued on the GPU in between.

What a row with a grammar may sample depends on its token of the step before, which the host has to know. So the
sampling of a step with such rows waits, while its forward pass runs, until the step before it is collected:

    host   launch N   collect N-1, masks of N, sample N   launch N+1   collect N, masks of N+1, sample N+1
    GPU         forward N ──────────────────── sample N   forward N+1 ─────────────────────── sample N+1
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from msgspec.structs import replace

from lightkv.edits import decode
from lightkv.errors import CheckFailed
from lightkv.holdings import Holdings
from lightkv.memory_map import MemoryMap
from lightkv.router.engine.step import (
    Captured,
    ExpectedMemory,
    Limits,
    PoolMap,
    PromptLogprobs,
    StateMap,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from lightkv.router.text.grammars import Grammars, InvalidGrammar, RowGrammar

from .cuda_graph import DecodeGraph
from .parts import AppliedPlan, RunnerParts, Sampling, StepInputs, StepLogits, StepOutput
from .step_graphs import StepGraphs

MAX_CELLS = 65_536  # of a map; in larger pools a cell stands for several slots


@dataclass
class _StepInFlight:
    """A step that was launched and not collected yet.

    `output` is in host memory; on a GPU it is complete once the event `done` has occurred.

    Attributes:
        grammars: those of its samples, by their index.
        sampling: samples the step, while that waits for the step before.
        error: why the sampling failed.
        had_ended: whether it had ended before the host waited for it.
        tokens: what was sampled, once the host has read it and `grammars` have taken it.
        errors: why samples have failed, by their index.
    """

    plan: StepPlan
    grammars: list[tuple[int, RowGrammar]]
    sampling: Sampling | None = None
    output: StepOutput | None = None
    done: torch.cuda.Event | None = None
    error: Exception | None = None
    had_ended: bool = False
    tokens: list[int] | None = None
    errors: dict[int, str] = field(default_factory=dict)


class ModelRunner:
    """Executes plans on one device, in order. An engine in the same process uses it as its executor.

    `limits`: the plans stay within them. `grammars`: None fails rows with a grammar. If `fatal` is set after an
    error, memory and ledger no longer agree, or the device is lost: make a new runner.
    """

    def __init__(
        self, parts: RunnerParts, limits: Limits, graphs: StepGraphs | None, grammars: Grammars | None = None
    ) -> None:
        self.fatal = False
        self.grammars = grammars or Grammars(None, limits.vocab_size)
        self._parts = parts
        self._graphs = graphs
        self._in_flight: deque[_StepInFlight] = deque()
        # There is memory for the logits of so many tokens, since a step may sample as many.
        self._scored_at_once = min(max(limits.max_num_seqs, 16), 256)
        self.limits = limits

    @property
    def newest_error(self) -> Exception | None:
        """Why `collect` will fail for the step that was launched last, as far as that is known."""
        return self._in_flight[-1].error if self._in_flight else None

    @torch.inference_mode()
    def warm_up(self, plans: Iterable[StepPlan]) -> None:
        """Runs `plans` eagerly, without their edits, so that the kernels of such steps are compiled.

        Their rows are 0, the padding, so memory and counts stay as they are.
        """
        for plan in plans:
            self._forward(AppliedPlan(plan, {}))(None)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Starts a step behind those in flight; `collect` returns its result.

        The host does not wait for a GPU here; on a CPU the step is computed at once. See `fatal` for what an
        error means; earlier steps can still be collected after it.
        """
        # The step before reads its inputs when it samples, and this one overwrites them.
        self._sample_waiting()
        graph = None
        with self._fatal_errors():  # the edits are sent only once
            grammars = self._grammars_of(plan)
            if self._graphs is not None and not plan.scored:
                graph = self._graphs.get(plan, has_masks=bool(grammars))
            allocates = graph is not None and graph.allocates
            edits = decode(plan.edits) if allocates else plan.all_edits()
            pieces = {part: (num_edits, plan.rows[part]) for part, num_edits in plan.pieces.items()}
            applied = AppliedPlan(plan, self._parts.memory.apply_step(edits, pieces))
        step = _StepInFlight(plan, grammars)
        with self._fatal_errors(always=allocates):  # slots that are allocated by half are lost
            sampler = self._parts.sampler
            if isinstance(graph, DecodeGraph) and not grammars:
                sampler.set_rows(plan.new_rows, plan.prompts)
                self._copy_to_host(step, graph.replay(applied))
            else:
                sampling = self._forward(applied) if graph is None else graph.replay_forward(applied)
                sampler.set_rows(plan.new_rows, plan.prompts)  # while the GPU computes the logits
                if grammars:
                    step.sampling = sampling
                else:
                    self._copy_to_host(step, sampling(None))
        self._in_flight.append(step)
        if len(self._in_flight) == 1:
            self._sample_waiting()

    @torch.inference_mode()
    def collect(self) -> StepResult:
        """Returns the result of the oldest step in flight. Waits for that step, and for no later one."""
        self._sample_waiting(self._in_flight[0])  # it still waits where the step before it has failed
        step = self._in_flight.popleft()
        with self._fatal_errors(always=False):
            tokens = self._take_tokens(step)
            if self._in_flight:
                self._sample_waiting(self._in_flight[0])
            assert step.output is not None
            result = self._read(step.plan, step.output)
        if step.grammars:
            result = replace(result, tokens=tokens, errors=step.errors)
        return replace(result, had_ended=True) if step.had_ended else result

    @property
    def num_missing_graphs(self) -> int:
        """How many CUDA graphs are still to be captured."""
        return 0 if self._graphs is None else self._graphs.num_missing

    @torch.inference_mode()
    def capture(self) -> Captured:
        """Captures the CUDA graph that most steps have lacked. See `fatal` for what an error means."""
        begun = time.perf_counter()
        self._sample_waiting()  # it reads its inputs when it samples, and the capture may overwrite them
        with self._fatal_errors():
            if self._graphs is not None:
                self._graphs.capture_next()
        return Captured(time.perf_counter() - begun, self.num_missing_graphs)

    @torch.inference_mode()
    def capture_for(self, plan: StepPlan) -> None:
        """Captures the CUDA graph of a plan without grammars, if it is missing."""
        if self._graphs is not None:
            self._graphs.capture_for(plan)

    @torch.inference_mode()
    def skip(self, plan: StepPlan) -> None:
        """Applies a step's edits without computing it, because an earlier step that it needs has failed."""
        with self._fatal_errors():
            self._parts.memory.apply(plan.all_edits())

    @torch.inference_mode()
    def check(self, edits: bytes, expected: ExpectedMemory) -> None:
        """Applies `edits`, then compares the memory with the ledger and checks the sampler; synchronises.

        Raises CheckFailed if they disagree, and InvalidFree; any error here is fatal.
        """
        memory = self._parts.memory
        with self._fatal_errors():
            memory.apply(decode(edits))
            if memory.num_free != expected.num_free:
                raise CheckFailed(
                    f"the ledger counts {expected.num_free} free slots, the memory {memory.num_free}"
                )
            memory.check(expected.holdings)
            self._parts.sampler.check()

    def digest(self) -> bytes:
        """Returns a digest of the memory's tables, which are the same bytes on every rank; synchronises."""
        return self._parts.memory.digest()

    @torch.inference_mode()
    def map(self, edits: bytes, holdings: Holdings) -> PoolMap:
        """Applies `edits`, then returns what the slots are used for; synchronises. For errors see `fatal`."""
        memory = self._parts.memory
        with self._fatal_errors():
            memory.apply(decode(edits))
        with self._fatal_errors(always=False):
            pool, states = MemoryMap(memory.labels(holdings)), None
            if memory.states is not None:
                counts = MemoryMap(memory.states.labels(holdings)).counts
                size = memory.pool.spec.bytes_per_state * (counts.capacity + 1)
                states = StateMap(counts.num_free, counts.num_cached, counts.num_own, size)
        slots_per_cell = -(-len(pool.labels) // MAX_CELLS)
        cells = pool.labels[::slots_per_cell].tolist()
        drawn = {"slots_per_cell": slots_per_cell, "cells": cells, "num_bytes": memory.pool.num_bytes}
        return PoolMap(**pool.counts._asdict(), **drawn, states=states)

    @contextmanager
    def _fatal_errors(self, *, always: bool = True) -> Iterator[None]:
        """Sets `fatal` if the block fails: for every error if `always`, else for one that loses the device: on
        a GPU, all but out of memory."""
        try:
            yield
        except BaseException as error:
            on_gpu = self._parts.memory.device.type == "cuda"
            is_failure = isinstance(error, Exception) and not isinstance(error, torch.OutOfMemoryError)
            self.fatal = self.fatal or always or (on_gpu and is_failure)
            raise

    def _grammars_of(self, plan: StepPlan) -> list[tuple[int, RowGrammar]]:
        """Notes the grammars of the plan's new rows. Returns those of its samples, by their index."""
        for new_row in plan.new_rows:
            max_tokens = new_row.params.max_tokens
            self.grammars.set_row(new_row.row, new_row.grammar, new_row.output_ids, max_tokens)
        if not self.grammars.num_rows:
            return []
        found = [(i, self.grammars.of(plan.rows[idx])) for i, idx in enumerate(plan.sample)]
        return [(i, grammar) for i, grammar in found if grammar is not None]

    def _sample_waiting(self, step: _StepInFlight | None = None) -> None:
        """Samples a step (the newest if None) whose sampling waits. Its masks need the tokens of all before it.

        An error is raised when the step is collected.
        """
        if step is None:
            step = self._in_flight[-1] if self._in_flight else None
        if step is None or step.sampling is None:
            return
        sampling, step.sampling = step.sampling, None
        try:
            for earlier in self._in_flight:
                if earlier is step:
                    break
                self._take_tokens(earlier)
            self._copy_to_host(step, sampling(self._masks(step)))
        except Exception as error:
            step.error = error

    def _masks(self, step: _StepInFlight) -> torch.Tensor:
        """Computes the masks of a step, on the host."""
        size = len(step.plan.sample), self.grammars.mask_words
        masks = torch.empty(size, dtype=torch.int32, pin_memory=self._parts.memory.device.type == "cuda")
        step.errors |= self.grammars.fill(masks.numpy(), step.grammars)
        return masks

    def _take_tokens(self, step: _StepInFlight) -> list[int]:
        """Waits for a step's tokens and gives them to its grammars, once. Raises what its sampling raised."""
        if step.error is not None:
            raise step.error
        if step.tokens is None:
            assert step.output is not None
            if step.done is not None:
                step.had_ended = step.done.query()
                step.done.synchronize()
            tokens = step.output.packed[: len(step.plan.sample)].tolist() if step.grammars else []
            for i, grammar in step.grammars:
                try:
                    tokens[i] = grammar.take(tokens[i])
                except InvalidGrammar as error:
                    step.errors.setdefault(i, str(error))
            step.tokens = tokens
        return step.tokens

    def _logits(self, applied: AppliedPlan) -> StepLogits:
        """Runs a step eagerly, after its edits, up to its logits."""
        plan = applied.plan
        inputs = StepInputs.of(applied, self._parts.memory, self.limits.prefix_sharing.max_members)
        if not plan.scored:
            return StepLogits(inputs, inputs.logits(self._parts))
        return StepLogits(inputs, *inputs.logits_and_scores(self._parts, plan, self._scored_at_once))

    def _forward(self, applied: AppliedPlan) -> Sampling:
        """Runs a step eagerly, after its edits, up to its logits."""
        return partial(self._logits(applied).sample, self._parts, applied.plan.kind)

    def _copy_to_host(self, step: _StepInFlight, output: StepOutput) -> None:
        """Starts copying the output to the host, before the next replay overwrites it."""
        step.output = output.to_host(bool(step.plan.logprobs))
        if output.packed.is_cuda:
            step.done = torch.cuda.Event()
            step.done.record(torch.cuda.current_stream(output.packed.device))

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
        return StepResult(
            step=plan.step,
            tokens=tokens[: len(plan.sample)],
            num_free=num_free,
            flags=flags,
            logprobs=logprobs,
            scored=scored,
            num_missing_graphs=self.num_missing_graphs,
        )
