"""Decode steps as CUDA graphs: one graph for each batch size and `GraphKey`, which runs without the host.

A graph allocates a slot for every row, writes the token table, runs the forward pass (which writes K/V and
attends over the table), samples, stores the token as the row's next input, and moves every row one position on.
A step with the rows and shared prefixes of the step before needs no upload: replaying the graph is all of it.
Batches are padded to the next size with row 0, whose slot is 0.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lightkv.attention import AttentionMetadata
from lightkv.integrations.model.hf_model import forward
from lightkv.ledger.shared_prefixes import SharedPrefix
from lightkv.memory.kv_memory import KVMemory
from lightkv.router.engine.step import StepPlan
from lightkv.router.sampling_params import SamplerKind
from lightkv.triton_kernels.slots.allocate import TableEntries

from .parts import RunnerParts
from .sampler import Sampled


def batch_sizes(most: int) -> list[int]:
    """Returns the batch sizes to capture, in ascending order and ending with `most`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, most + 64, 64)]
    kept = [size for size in sizes if size < most]
    return [*kept, most]


class StepOutput(NamedTuple):
    """The results of a step on the device.

    `packed`: int64, the sampled tokens and then the memory's two counters, so that one copy brings them all.
    """

    sampled: Sampled
    packed: torch.Tensor

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
        return StepOutput(sampled, _pinned(self.packed))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an asynchronous copy in pinned memory, which comes from torch's cache after the first steps."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class GraphKey(NamedTuple):
    """What distinguishes graphs of one batch size: how they sample, and whether rows share prefixes.

    Shared prefixes are read by launches of their own.
    """

    kind: SamplerKind
    shares_prefixes: bool = False

    @classmethod
    def of(cls, plan: StepPlan) -> "GraphKey":
        """Returns the key of a plan that has decodes only."""
        return cls(plan.kind, bool(plan.prefixes))


class _Loaded(NamedTuple):
    """The batch in a graph's static tensors, which are ready for the step after `step`."""

    step: int
    rows: list[int]
    prefixes: list[SharedPrefix]


class DecodeGraph:
    """The static tensors of one batch size, and the graphs captured for it so far."""

    def __init__(self, parts: RunnerParts, size: int, metadata: AttentionMetadata) -> None:
        memory = parts.memory
        self._parts = parts
        self._metadata = metadata.create_cuda_graph_metadata(size)
        self._slots = torch.zeros(size, dtype=torch.int32, device=memory.device)
        self._count = torch.zeros(1, dtype=torch.int32, device=memory.device)
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, StepOutput]] = {}
        self._loaded: _Loaded | None = None

    def has(self, key: GraphKey) -> bool:
        """Returns whether the graph of `key` is captured."""
        return key in self._graphs

    def capture(self, key: GraphKey, pool: Any) -> None:
        """Captures the graph of `key` in `pool`, torch's handle of a memory pool.

        Meanwhile the static tensors hold padding alone, so no slot is allocated.
        """
        if key.kind >= SamplerKind.EDITED:
            self._parts.sampler.enable_logit_edits()
        self._loaded = None
        self._metadata.prepare([], [], [], 0, prefixes=[] if key.shares_prefixes else None)
        self._count.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(key.kind)  # compiles kernels and lets libraries set themselves up
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = self._step(key.kind)
        self._graphs[key] = (graph, output)

    def replay(self, plan: StepPlan) -> StepOutput:
        """Runs a plan that has decodes only. The next replay overwrites what it returns."""
        count = len(plan.rows)
        if self._loaded is None or (plan.step - 1, plan.rows, plan.prefixes) != self._loaded:
            self._metadata.prepare(plan.rows, plan.starts, plan.counts, 0, prefixes=plan.prefixes or None)
            self._count.fill_(count)
        graph, output = self._graphs[GraphKey.of(plan)]
        self._parts.memory.allocator.claim(count)
        graph.replay()
        self._loaded = _Loaded(plan.step, plan.rows, plan.prefixes)
        return output

    def _step(self, kind: SamplerKind) -> StepOutput:
        model, backends, memory, sampler = self._parts
        metadata = self._metadata
        rows = metadata.rows
        entries = TableEntries(memory.table.req_to_token, metadata.position_ids, rows)
        memory.allocator.alloc_into(self._slots, self._count, entries)
        metadata.slot_mapping.copy_(self._slots)
        input_ids = sampler.next_token.index_select(0, rows)
        logits = forward(model, input_ids, metadata, backends, None)
        sampled = sampler.sample(logits, rows, metadata.kv_lens.long(), kind)
        active = rows > 0
        metadata.position_ids.add_(active)
        metadata.kv_lens.add_(active)
        return StepOutput.of(sampled, memory)


class DecodeGraphs:
    """The graphs of all batch sizes. They share one memory pool, since they never run at the same time.

    `announce` is called with a line before a graph is captured while requests run.
    """

    def __init__(self, parts: RunnerParts, metadata: AttentionMetadata) -> None:
        self.announce: Callable[[str], None] = lambda line: None
        self._pool = torch.cuda.graph_pool_handle()
        self._sizes = batch_sizes(metadata.max_num_requests)
        self._may_share = metadata.prefix_members > 1
        self._graphs = {size: DecodeGraph(parts, size, metadata) for size in self._sizes}
        # There was no memory for the graphs of these, so that their steps run eagerly.
        self._refused: set[tuple[int, GraphKey]] = set()

    @torch.inference_mode()
    def capture(self, kinds: Sequence[SamplerKind], report: Callable[[str], None]) -> None:
        """Captures every batch size ahead of time, the largest first, so that the others fit in its memory.

        With shared prefixes one size of each power of two is captured. This compiles the kernels, so that a
        graph captured later, when it is first needed, does not delay requests for long.
        """
        powers = set()
        for done, size in enumerate(reversed(self._sizes), start=1):
            keys = [GraphKey(kind) for kind in kinds]
            power = (size - 1).bit_length()
            if self._may_share and size > 1 and power not in powers:
                powers.add(power)
                keys.append(GraphKey(SamplerKind.GREEDY, shares_prefixes=True))
            for key in keys:
                self._graphs[size].capture(key, self._pool)
            report(f"capturing decode graphs: {done} of {len(self._sizes)} (batch {size})")

    def get(self, batch_size: int, key: GraphKey) -> DecodeGraph | None:
        """Returns the graph for a batch of this size, and captures it if it is missing.

        Returns None if the batch is larger than all graphs, or the device lacks the memory to capture it.
        """
        size = next((size for size in self._sizes if size >= batch_size), None)
        if size is None or (size, key) in self._refused:
            return None
        graph = self._graphs[size]
        if graph.has(key):
            return graph
        self.announce(f"capturing a decode graph: batch {size}, {key.kind.name.lower()}")
        try:
            graph.capture(key, self._pool)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            self._refused.add((size, key))
            return None
        return graph


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether `error`, or an error it replaced while the broken capture ended, is out of memory."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__context__
    return False
