"""Decode steps as CUDA graphs: one graph a batch size and form of step, with no host in it.

Captured in a graph: take a slot for every row, write the table, the forward pass (K/V written, attention over
the table), sample, note the token as the row's next input, and move every row one position on. A step whose
rows are those of the step before, and read the same prefixes together, needs no upload at all: a replay is the
whole of it. Batches are padded to the next size with row 0, whose slot is 0.
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
    """The sizes that graphs are captured for: padding is at most a batch again up to 8, then a quarter."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, most + 64, 64)]
    kept = [size for size in sizes if size < most]
    return [*kept, most]


class StepOutput(NamedTuple):
    """What a step leaves on the device. `packed`: int64, the tokens sampled, then the two counters, so that
    one copy brings them all."""

    sampled: Sampled
    packed: torch.Tensor

    @classmethod
    def of(cls, sampled: Sampled, memory: KVMemory) -> "StepOutput":
        """After everything else of the step."""
        return cls(sampled, torch.cat((sampled.tokens, memory.counters.long())))

    def to_host(self, with_logprobs: bool) -> "StepOutput":
        """A copy in pinned memory, there once the stream has come to here; on the CPU, itself."""
        if self.packed.device.type == "cpu":
            return self
        sampled = self.sampled
        if with_logprobs:
            sampled = Sampled._make(None if part is None else _pinned(part) for part in sampled)
        return StepOutput(sampled, _pinned(self.packed))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that nobody waits for, in pinned memory (from torch's cache of it after the first steps)."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class GraphKey(NamedTuple):
    """What a step is captured for, beside its size: how it samples, and whether some of its rows read a prefix
    together, which is another launch."""

    kind: SamplerKind
    grouped: bool = False

    @classmethod
    def of(cls, plan: StepPlan) -> "GraphKey":
        """That of a plan of decodes."""
        return cls(plan.kind, bool(plan.prefixes))


class _Loaded(NamedTuple):
    """The batch whose rows and positions are in a graph's tensors, ready for the step after `step`."""

    step: int
    rows: list[int]
    prefixes: list[SharedPrefix]


class DecodeGraph:
    """One batch size: its static tensors, and a graph for each form of step asked for so far."""

    def __init__(self, parts: RunnerParts, size: int, metadata: AttentionMetadata) -> None:
        memory = parts.memory
        self.size = size
        self._parts = parts
        self._metadata = metadata.create_cuda_graph_metadata(size)
        self._slots = torch.zeros(size, dtype=torch.int32, device=memory.device)
        self._count = torch.zeros(1, dtype=torch.int32, device=memory.device)
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, StepOutput]] = {}
        self._loaded: _Loaded | None = None

    def has(self, form: GraphKey) -> bool:
        """Is the step captured in `form`?"""
        return form in self._graphs

    def capture(self, form: GraphKey, pool: Any) -> None:
        """Capture the step once in `form`, in the memory of `pool` (torch's handle of one).

        The tensors hold padding meanwhile, so nothing is taken.
        """
        if form in self._graphs:
            return
        if form.kind >= SamplerKind.EDITED:
            self._parts.sampler.enable_logit_edits()
        self._loaded = None
        self._metadata.prepare([], [], [], 0, prefixes=[] if form.grouped else None)
        self._count.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(form.kind)  # compiles kernels and lets libraries set themselves up
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = self._step(form.kind)
        self._graphs[form] = (graph, output)

    def replay(self, plan: StepPlan) -> "StepOutput":
        """Run a plan of decodes. What it returns is overwritten by the next replay."""
        count = len(plan.rows)
        if self._loaded is None or (plan.step - 1, plan.rows, plan.prefixes) != self._loaded:
            self._metadata.prepare(plan.rows, plan.starts, plan.counts, 0, prefixes=plan.prefixes or None)
            self._count.fill_(count)
        graph, output = self._graphs[GraphKey.of(plan)]
        self._parts.memory.allocator.claim(count)
        graph.replay()
        self._loaded = _Loaded(plan.step, plan.rows, plan.prefixes)
        return output

    def _step(self, kind: SamplerKind) -> "StepOutput":
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
    """The graphs of a device, by batch size; they share one memory pool, since they never run together.

    `announce` is told of a graph that is captured while requests run.
    """

    def __init__(self, parts: RunnerParts, metadata: AttentionMetadata) -> None:
        self.announce: Callable[[str], None] = lambda line: None
        self._pool = torch.cuda.graph_pool_handle()
        self._sizes = batch_sizes(metadata.max_num_requests)
        self._may_group = metadata.group_members > 1
        self._graphs = {size: DecodeGraph(parts, size, metadata) for size in self._sizes}
        self._refused: set[tuple[int, GraphKey]] = set()  # no memory for these: they run eagerly

    @torch.inference_mode()
    def capture(self, kinds: Sequence[SamplerKind], report: Callable[[str], None]) -> None:
        """Capture every batch size ahead of time, the largest first, so that the others fit in its memory.

        With groups, one of each power of two: kernels are compiled for these, so that what is captured when it
        is first needed does not hold requests up for long.
        """
        powers = set()
        for done, size in enumerate(reversed(self._sizes), start=1):
            forms = [GraphKey(kind) for kind in kinds]
            power = (size - 1).bit_length()
            if self._may_group and size > 1 and power not in powers:
                powers.add(power)
                forms.append(GraphKey(SamplerKind.GREEDY, grouped=True))
            for form in forms:
                self._graphs[size].capture(form, self._pool)
            report(f"capturing decode graphs: {done} of {len(self._sizes)} (batch {size})")

    def get(self, batch_size: int, form: GraphKey) -> DecodeGraph | None:
        """The graph for such a batch, captured now if it is the first; None where memory is too short."""
        size = next((size for size in self._sizes if size >= batch_size), None)
        if size is None or (size, form) in self._refused:
            return None
        graph = self._graphs[size]
        if not graph.has(form):
            self.announce(f"capturing a decode graph: batch {size}, {form.kind.name.lower()}")
        try:
            graph.capture(form, self._pool)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            self._refused.add((size, form))
            return None
        return graph


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Was it that? Ending the broken capture may have raised another error over the first."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__context__
    return False
