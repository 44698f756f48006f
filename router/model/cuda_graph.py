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

import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightkv.attention import Batch, BatchShape, StaticStep
from lightkv.errors import LightKVError
from lightkv.ledger.shared_prefixes import SharedPrefix
from lightkv.memory import capture
from lightkv.memory.capture import Capture
from lightkv.router.engine.step import Limits, StepPlan
from lightkv.router.sampling_params import SamplerKind
from lightkv.triton_kernels.slots.allocate import TableEntries
from lightkv.triton_kernels.slots.entries import read_entries

from .parts import MaskedSampling, RunnerParts, StepInputs, StepLogits, StepOutput
from .token_buckets import FEW_PREFILLS, MOST_TOKENS, most_buckets, prompt_shapes

_GRAPH_BYTES = 2 << 20  # of the launches of a graph
_LOGITS_COPIES = 5  # of a decode graph that samples at random, and the logits of prompt graphs


def batch_sizes(most: int) -> list[int]:
    """Returns the batch sizes to capture, in ascending order and ending with `most`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, most + 64, 64)]
    kept = [size for size in sizes if size < most]
    return [*kept, most]


def graphs_bytes(
    max_num_seqs: int, max_step_tokens: int, token_bytes: int, logits_bytes: int, scratch_bytes: int
) -> int:
    """Returns the bytes of device memory to keep for the graphs of all steps.

    token_bytes: of the activations of a token; logits_bytes: of its logits in float32; scratch_bytes: of what
    a layer's attention needs. The graphs share the memory of their tensors, and each has its launches besides.
    This is enough for any token buckets, which are chosen once the pool has its memory.
    """
    # A bucket has up to three shapes. Those with decodes may be captured with shared prefixes, too. A size of
    # decode batches has two kinds of sampling, and shared prefixes; with masks these, and two forward passes.
    num_graphs = 5 * most_buckets(max_step_tokens) + 8 * len(batch_sizes(max_num_seqs))
    masks = max_num_seqs * (logits_bytes // 32 + 4)
    sampling = max_num_seqs * logits_bytes * _LOGITS_COPIES + masks
    tokens = min(max_step_tokens, MOST_TOKENS) * token_bytes
    return tokens + sampling + scratch_bytes + num_graphs * _GRAPH_BYTES


class CannotCapture(LightKVError):
    """The model's code waits for the device in every pass, which a CUDA graph cannot do."""

    def __init__(self, error: RuntimeError) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        last = [frame for frame in frames if frame.filename != capture.__file__][-1]
        super().__init__(f"{Path(last.filename).name}, line {last.lineno}, waits for the device: {last.line}")


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

    @property
    def name(self) -> str:
        """How the graph samples."""
        return self.kind.name.lower() + (" with masks" if self.has_masks else "")


class _Loaded(NamedTuple):
    """The batch in a graph's static tensors, which are ready for the step after `step`."""

    step: int
    rows: list[int]
    prefixes: list[SharedPrefix]


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
        # Of steps with masks: the parts up to the logits, by whether rows share prefixes
        self._forwards: dict[bool, tuple[torch.cuda.CUDAGraph, StepLogits]] = {}
        self._loaded: _Loaded | None = None

    def has(self, key: GraphKey) -> bool:
        """Returns whether the graph of `key` is captured."""
        return key in self._graphs

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
        inputs, logits, _ = self._forwards[key.shares_prefixes][1]
        masks = self._logits.masks(len(logits))
        self._graphs[key] = shared.graph(lambda: inputs.sample(self._parts, logits, key.kind, masks))

    def rehearse(self, key: GraphKey) -> None:
        """Launches what `capture` would capture, once."""
        self._load_padding(key)
        if not key.has_masks:
            self._run(key.kind)
            return
        inputs, logits, _ = self._forward()
        inputs.sample(self._parts, logits, key.kind, self._logits.masks(len(logits)))

    def replay(self, plan: StepPlan) -> StepOutput:
        """Runs a plan that has decodes only. The next replay overwrites what it returns."""
        graph, output = self._graphs[GraphKey.of(plan)]
        self._replay(plan, graph)
        return output

    def replay_forward(self, plan: StepPlan) -> MaskedSampling:
        """Runs a plan that has decodes only, up to its logits. The next replay overwrites what its sampling
        returns."""
        self._replay(plan, self._forwards[bool(plan.prefixes)][0])
        return partial(self._sample, GraphKey.of(plan, has_masks=True))

    def _sample(self, key: GraphKey, masks: torch.Tensor) -> StepOutput:
        self._logits.masks(len(masks)).copy_(masks, non_blocking=True)
        graph, output = self._graphs[key]
        graph.replay()
        return output

    def _replay(self, plan: StepPlan, graph: torch.cuda.CUDAGraph) -> None:
        count = len(plan.rows)
        if self._loaded is None or (plan.step - 1, plan.rows, plan.prefixes) != self._loaded:
            batch = Batch.of(plan.rows, plan.starts, plan.counts, 0)
            if plan.prefixes:
                batch = batch.sharing(plan.prefixes, self._static.prefix_members)
            self._step = self._static.load(batch)
            self._count.fill_(count)
        if self.allocates:
            self._parts.memory.allocator.claim(count)
        graph.replay()
        self._loaded = _Loaded(plan.step, plan.rows, plan.prefixes)

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
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def has(self, shares_prefixes: bool) -> bool:
        """Returns whether the graph without or with shared prefixes is captured."""
        return shares_prefixes in self._graphs

    def capture(self, shares_prefixes: bool, shared: Capture) -> None:
        """Captures the graph without or with shared prefixes.

        Meanwhile the static tensors hold padding alone.
        """
        self._load(_PADDING, shares_prefixes)
        self._graphs[shares_prefixes] = shared.graph(self._compute)

    def rehearse(self) -> None:
        """Launches what `capture` would capture without shared prefixes, once."""
        self._load(_PADDING, False)
        self._compute()

    def replay(self, plan: StepPlan) -> StepOutput:
        """Runs a plan whose slots are allocated, and samples."""
        inputs, logits, _ = self._replay(plan)
        return inputs.sample(self._parts, logits, plan.kind)

    def replay_forward(self, plan: StepPlan) -> MaskedSampling:
        """Runs a plan whose slots are allocated, up to its logits. The next replay overwrites them."""
        return partial(self._replay(plan).sample, self._parts, plan.kind)

    def _replay(self, plan: StepPlan) -> StepLogits:
        shares_prefixes = bool(plan.prefixes)
        self._load(plan, shares_prefixes)
        graph, logits = self._graphs[shares_prefixes]
        graph.replay()
        return StepLogits(self._inputs, logits).first(len(plan.sample))

    def _load(self, plan: StepPlan, shares_prefixes: bool) -> None:
        self._inputs = StepInputs.load(plan, self._static, self._num_samples, shares_prefixes)

    def _compute(self) -> torch.Tensor:
        return self._logits.store(self._inputs.logits(self._parts))


class StepGraphs:
    """The graphs of all steps. They share one memory pool, since they never run at the same time.

    `limits`: how large a step can be. `buckets` are the numbers of tokens of prompt graphs, ascending.
    `announce` is called with a line before a graph is captured while requests run.
    """

    def __init__(self, parts: RunnerParts, limits: Limits, buckets: Sequence[int]) -> None:
        self.announce: Callable[[str], None] = lambda line: None
        members, max_num_seqs = limits.prefix_sharing.max_members, limits.max_num_seqs
        self._may_share = members > 1
        logits = SharedLogits(max_num_seqs)
        self._prompts = {
            size: {shape: PromptGraph(parts, shape, limits, logits) for shape in shapes}
            for size, shapes in prompt_shapes(buckets, max_num_seqs).items()
        }
        self._decodes = {
            size: DecodeGraph(parts, size, members, logits) for size in batch_sizes(max_num_seqs)
        }
        # There was no memory for these, so that their steps run eagerly.
        self._refused: set[tuple[DecodeGraph | PromptGraph, GraphKey | bool]] = set()

    @cached_property
    def _shared(self) -> Capture:
        return Capture.new()

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Launches steps of padding of enough sizes to meet every kernel that `capture` needs.

        The kernels differ by powers of two of tokens and of requests. A bucket may lack a kind of shape, so
        the largest of each kind is taken.
        """
        largest: dict[tuple[int, bool, bool], PromptGraph] = {}
        for size, graphs in self._prompts.items():
            for shape, graph in graphs.items():
                kind = shape.num_prefills > FEW_PREFILLS, shape.num_decodes > 0
                largest[(size - 1).bit_length(), *kind] = graph
        rehearsals: list[Callable[[], None]] = [graph.rehearse for graph in largest.values()]
        for size in _largest_of_each_power(self._decodes):
            for key in self._decode_keys(size, [SamplerKind.GREEDY]):
                rehearsals.append(partial(self._decodes[size].rehearse, key))
        for rehearse in rehearsals:
            try:
                rehearse()
            except RuntimeError as error:
                if not _is_out_of_memory(error):  # a graph without memory is refused when it is captured
                    raise

    def capture(self, kinds: Sequence[SamplerKind], report: Callable[[str], None]) -> None:
        """Captures graphs of every size ahead of time, the largest first, so that the others fit in its memory.

        Of decode graphs with shared prefixes, one size of each power of two is captured. This compiles the
        kernels, so that a graph captured later, when it is first needed, does not delay requests for long.
        Raises CannotCapture, before it captures any.
        """
        self._require_capturable()
        begun, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        with _frozen_objects():
            num_captured = self._capture_all(kinds, report)
        seconds, used = time.perf_counter() - begun, free - torch.cuda.mem_get_info()[0]
        refused = f"; no memory for {len(self._refused)}, which run eagerly" if self._refused else ""
        report(f"captured {num_captured} CUDA graphs in {seconds:.1f} s, {used / 2**20:,.0f} MiB{refused}")

    @torch.inference_mode()
    def _require_capturable(self) -> None:
        """Raises CannotCapture if a smallest step waits for the device."""
        smallest_prompts = self._prompts[min(self._prompts)].values()
        steps: list[Callable[[], None]] = [graph.rehearse for graph in smallest_prompts]
        steps.append(partial(self._decodes[min(self._decodes)].rehearse, GraphKey(SamplerKind.GREEDY)))
        for rehearse in steps:
            with self._shared.constants:
                rehearse()  # lets libraries set themselves up
                try:
                    with _waiting_refused():
                        rehearse()
                except RuntimeError as error:
                    if "synchronizing" not in str(error):
                        raise
                    raise CannotCapture(error) from error

    def _capture_all(self, kinds: Sequence[SamplerKind], report: Callable[[str], None]) -> int:
        """Captures what `capture` says. Returns how many graphs there was memory for."""
        num_captured = 0
        for done, (size, shapes) in enumerate(reversed(self._prompts.items()), start=1):
            for graph in shapes.values():
                num_captured += self._captures(graph, False)
            report(f"capturing prompt graphs: {done} of {len(self._prompts)} ({size} tokens)")
        for done, size in enumerate(reversed(self._decodes), start=1):
            for key in self._decode_keys(size, kinds):
                num_captured += self._captures(self._decodes[size], key)
            report(f"capturing decode graphs: {done} of {len(self._decodes)} (batch {size})")
        return num_captured

    def _decode_keys(self, size: int, kinds: Sequence[SamplerKind]) -> list[GraphKey]:
        """Returns what to capture ahead of time of a size of decode batches."""
        may_share = self._may_share and size > 1 and size in _largest_of_each_power(self._decodes)
        keys = []
        for has_masks in (False, True):  # a row with a grammar may come at any time
            keys += [GraphKey(kind, has_masks=has_masks) for kind in kinds]
            if may_share:
                keys.append(GraphKey(SamplerKind.GREEDY, shares_prefixes=True, has_masks=has_masks))
        return keys

    @property
    def most_tokens(self) -> int:
        """The most tokens of a step with prompts that has a graph."""
        return max(self._prompts)

    def get(self, plan: StepPlan, has_masks: bool = False) -> DecodeGraph | PromptGraph | None:
        """Returns the graph for a plan, and captures it if it is missing. `has_masks`: they say what may be
        sampled.

        Returns None if the step is larger than all graphs, or the device lacks the memory to capture it.
        """
        if plan.num_prefills:
            return self._prompt_graph(plan)
        return self.decode_graph(len(plan.rows), GraphKey.of(plan, has_masks))

    def decode_graph(self, batch_size: int, key: GraphKey) -> DecodeGraph | None:
        """Returns the graph for decode batches of this size, as `get` does."""
        size = next((size for size in self._decodes if size >= batch_size), None)
        if size is None:
            return None
        graph, name = self._decodes[size], f"a decode graph: batch {size}, {key.name}"
        return graph if graph.has(key) or self._captures(graph, key, name) else None

    def _prompt_graph(self, plan: StepPlan) -> PromptGraph | None:
        numbers = plan.num_tokens, plan.num_prefills, len(plan.rows) - plan.num_prefills
        sizes = (shapes.items() for size, shapes in self._prompts.items() if size >= numbers[0])
        fitting = ((shape, graph) for shapes in sizes for shape, graph in shapes if shape.fits(*numbers))
        shape, graph = next(fitting, (None, None))
        if shape is None or graph is None:
            return None
        shares_prefixes = bool(plan.prefixes)
        size, most = shape.num_tokens, shape.num_prefills - 1
        name = f"a prompt graph: {size} tokens, {most} prompts, {shape.num_decodes} decodes"
        captured = graph.has(shares_prefixes) or self._captures(graph, shares_prefixes, name)
        return graph if captured else None

    @torch.inference_mode()
    def _captures(self, graph: DecodeGraph | PromptGraph, key: Any, name: str = "") -> bool:
        """Captures a graph, after announcing it by its `name`, if it has one. Returns whether there was
        memory."""
        if (graph, key) in self._refused:
            return False
        if name:
            self.announce(f"capturing {name}")
        try:
            graph.capture(key, self._shared)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            self._refused.add((graph, key))
            return False
        return True


def _largest_of_each_power(sizes: Iterable[int]) -> list[int]:
    """Returns the largest of the ascending `sizes` up to each power of two."""
    return list({(size - 1).bit_length(): size for size in sizes}.values())


_PADDING = StepPlan(0, b"", [], [], [], 0, b"", [], SamplerKind.GREEDY, {}, [], 0)


@contextmanager
def _frozen_objects() -> Iterator[None]:
    """Hides all objects from the garbage collector while the block runs, unless some are hidden already. torch
    collects before every capture, and would go through all of transformers each time."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Lets torch raise RuntimeError where the block waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether `error`, or an error it replaced while the broken capture ended, is out of memory."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__context__
    return False
