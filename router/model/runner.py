"""The model runner: carries out step plans on a device. Edits, forward pass, sampling, and the counts back.

It holds a Hugging Face causal LM, the memory and the sampler, and decides nothing: which rows run, and over
which positions, stands in the plan. Steps of decodes alone run as one CUDA graph on a GPU, in which the slots
are taken as well (`cuda_graph.py`); all others run eagerly. A step is launched and then
collected, so that a GPU can have the next one queued behind it. Knows no request, no tree and no text.
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

MAX_CELLS = 65_536  # of a map, however many slots the pool has


class _Launched(NamedTuple):
    """A step under way. `output` is in host memory, valid once `done` (on a GPU) has come."""

    plan: StepPlan
    output: StepOutput
    done: torch.cuda.Event | None


class ModelRunner:
    """Executes plans, in order, on one device. The executor of an engine in process.

    `limits`: of what is planned for it. After an error with `fatal` set, memory and ledger have parted, or the
    device is lost: make a new one.
    """

    def __init__(self, parts: RunnerParts, limits: Limits, graphs: DecodeGraphs | None) -> None:
        self.fatal = False
        self._parts = parts
        self._graphs = graphs
        self._launched: deque[_Launched] = deque()
        self._metadata = AttentionMetadata(
            limits.max_num_seqs,
            limits.max_step_tokens,
            parts.memory,
            group_members=limits.prefix_sharing.max_members,
        )

    def announce(self, report: Report) -> None:
        """From now on `report` is told, a line at a time, what a step is about to capture."""
        if self._graphs is not None:
            self._graphs.announce = report

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see `fatal` for what an error means."""
        try:
            self.launch(plan)
            return self.collect()
        except BaseException:  # Ctrl-C may come between the two
            self._launched.clear()
            raise

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Start a step, behind those that are under way; `collect` brings its result.

        The host does not wait for a GPU here; on a CPU the step is computed at once. See `fatal` for what an
        error means; the steps before are collected as if there were none.
        """
        # Until its edits are applied an error parts memory and ledger: these edits come but once.
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
            self._launched.append(self._land(plan, output))
        except Exception as error:
            self.fatal = self._loses_device(error)
            raise

    def collect(self) -> StepResult:
        """The result of the oldest step under way; waits for it, and for nothing launched after it."""
        launched = self._launched.popleft()
        try:
            if launched.done is not None:
                launched.done.synchronize()
            return self._read(launched.plan, launched.output)
        except Exception as error:
            self.fatal = self.fatal or self._loses_device(error)
            raise

    @torch.inference_mode()
    def skip(self, plan: StepPlan) -> None:
        """Apply a step's edits, and compute nothing of it: what it builds on has failed."""
        self.fatal = True
        self._parts.memory.apply(plan.all_edits())
        self.fatal = False

    @torch.inference_mode()
    def check(self, edits: bytes, holding: ExpectedMemory) -> None:
        """Apply `edits`, then recount the memory and the sampler; synchronises.

        Raises CheckFailed where they are not what the ledger says, InvalidFree; any error here is fatal.
        """
        self.fatal = True
        memory = self._parts.memory
        memory.apply(decode(edits))
        if memory.num_free != holding.num_free:
            raise CheckFailed(
                f"the ledger counts {holding.num_free} free slots, the memory {memory.num_free}"
            )
        memory.check(holding.private)
        self._parts.sampler.check()
        self.fatal = False

    @torch.inference_mode()
    def map(self, edits: bytes, owners: SlotOwners) -> PoolMap:
        """Apply `edits`, then tell what the slots are used for; synchronises. For errors see `fatal`."""
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
        return PoolMap(*pool.counts, slots_per_cell, pool.labels[::slots_per_cell].tolist())

    def _loses_device(self, error: Exception) -> bool:
        """Out of memory leaves a GPU as it was; nothing else is known to."""
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

    def _land(self, plan: StepPlan, output: StepOutput) -> _Launched:
        """The step's output on its way to the host, out of the reach of the next replay."""
        on_host = output.to_host(bool(plan.logprobs))
        done = None
        if output.packed.is_cuda:
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(output.packed.device))
        return _Launched(plan, on_host, done)

    def _read(self, plan: StepPlan, output: StepOutput) -> StepResult:
        """The tokens and the device's own counts."""
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
