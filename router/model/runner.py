"""Executes step plans on a device: applies the edits, runs the model, samples, and returns tokens and counts.

The runner decides nothing: the plan says which rows run, and over which positions. On a GPU, steps that have
decodes only run as one CUDA graph, which also allocates their slots (`cuda_graph.py`); all others run eagerly.
A step is launched and later collected, so that the next step can be queued on the GPU in between.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from lightkv.attention import AttentionMetadata
from lightkv.edits import decode
from lightkv.errors import CheckFailed
from lightkv.integrations.model.hf_model import forward
from lightkv.memory.staging import upload
from lightkv.memory_map import CACHED, OWN, MemoryMap
from lightkv.router.engine.step import (
    ExpectedMemory,
    Limits,
    PoolMap,
    SlotOwners,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

from .cuda_graph import DecodeGraphs, GraphKey, StepOutput
from .parts import RunnerParts

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

    def __init__(self, parts: RunnerParts, limits: Limits, graphs: DecodeGraphs | None) -> None:
        self.fatal = False
        self._parts = parts
        self._graphs = graphs
        self._in_flight: deque[_StepInFlight] = deque()
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
    def launch(self, plan: StepPlan) -> None:
        """Starts a step behind those in flight; `collect` returns its result.

        The host does not wait for a GPU here; on a CPU the step is computed at once. See `fatal` for what an
        error means; earlier steps can still be collected after it.
        """
        # An error before the edits are applied is fatal: they are sent only once.
        self.fatal = True
        graph = None
        if self._graphs is not None and not plan.num_prefills:
            graph = self._graphs.get(len(plan.rows), GraphKey.of(plan))
        edits = decode(plan.edits) if graph is not None else plan.all_edits()
        self._parts.sampler.set_rows(plan.new_rows, plan.prompts)
        if graph is not None:
            self._parts.memory.apply(edits)  # the graph allocates the decodes' slots
            output = graph.replay(plan)
        else:
            self._parts.memory.apply(edits)
        self.fatal = False
        try:
            if graph is None:
                output = self._forward(plan)
            self._in_flight.append(self._copy_to_host(plan, output))
        except Exception as error:
            self.fatal = self._loses_device(error)
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

    def _forward(self, plan: StepPlan) -> StepOutput:
        model, backends, memory, sampler = self._parts
        metadata = self._metadata
        metadata.prepare(plan.rows, plan.starts, plan.counts, plan.num_prefills, prefixes=plan.prefixes)
        ends = np.cumsum(plan.counts)
        sample = np.array(plan.sample, dtype=np.int64)
        prefill_ids, chosen, last_tokens = upload(
            [np.frombuffer(plan.token_ids, dtype=np.int32).astype(np.int64), sample, ends[sample] - 1],
            memory.device,
        )
        decode_rows = metadata.rows[plan.num_prefills :]
        input_ids = torch.cat((prefill_ids, sampler.next_token.index_select(0, decode_rows)))
        logits = forward(model, input_ids, metadata, backends, last_tokens)
        rows = metadata.rows.index_select(0, chosen)
        positions = metadata.kv_lens.index_select(0, chosen).long()
        return StepOutput.of(sampler.sample(logits, rows, positions, plan.kind), memory)

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
        return StepResult(plan.step, tokens[: len(plan.sample)], num_free, flags, logprobs)
