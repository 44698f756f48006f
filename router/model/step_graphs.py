"""The CUDA graphs of all steps: which there are, which of them are captured, and which is captured next.

A start captures a few sizes, to which steps of other sizes are padded. The others are captured between steps
(`engine/captures.py`), those first that most steps have lacked. Until then, a step whose kind of sampling has
no graph replays the forward pass, and the host launches the sampling. Where no captured graph fits, the host
launches all kernels of a step one by one, on the same static tensors.
"""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path

import torch

from lightkv.errors import LightKVError
from lightkv.memory import capture
from lightkv.memory.capture import Capture
from lightkv.router.engine.step import Limits, StepPlan
from lightkv.router.sampling_params import SamplerKind

from .cuda_graph import DecodeGraph, GraphKey, PromptGraph, SharedLogits
from .parts import RunnerParts
from .token_buckets import FEW_PREFILLS, MOST_TOKENS, most_buckets, prompt_shapes

FIRST_DECODES = 32  # decode batches up to this size have their own graphs from the start
_KINDS = (SamplerKind.GREEDY, SamplerKind.RANDOM)  # of decode graphs that no step has lacked yet
_GRAPH_BYTES = 2 << 20  # of the launches of a graph
_LOGITS_COPIES = 3  # of a decode graph that draws from 16-bit logits, and the logits of prompt graphs


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


# A graph of steps: the static tensors of its size, and what else distinguishes it.
_Graph = tuple[DecodeGraph, GraphKey] | tuple[PromptGraph, bool]


class StepGraphs:
    """The graphs of all steps. They share one memory pool, since they never run at the same time.

    `limits`: how large a step can be. `buckets` are the numbers of tokens of prompt graphs, ascending.
    """

    def __init__(self, parts: RunnerParts, limits: Limits, buckets: Sequence[int]) -> None:
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
        self._captured: set[_Graph] = set()
        # There was no memory for these, so that the host launches their steps.
        self._refused: set[_Graph] = set()
        # How many steps have lacked each graph that is to be captured, in the order to capture them in. The
        # largest come first, so that the others fit in their memory.
        self._missing: dict[_Graph, int] = dict.fromkeys(self._ahead_of_time(), 0)

    @cached_property
    def _shared(self) -> Capture:
        return Capture.new()

    @property
    def num_missing(self) -> int:
        """How many graphs are still to be captured."""
        return len(self._missing)

    def _ahead_of_time(self) -> Iterator[_Graph]:
        """Yields the graphs that are captured before a step has lacked them. Of decode graphs with shared
        prefixes that is one size of each power of two."""
        for shapes in reversed(self._prompts.values()):
            for graph in shapes.values():
                yield graph, False
        for size in reversed(self._decodes):
            for key in self._decode_keys(size, _KINDS):
                yield self._decodes[size], key

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

    def capture_first(self, report: Callable[[str], None]) -> None:
        """Captures graphs that steps of every size fit into: those of small decode batches, and of one size of
        each power of two. Raises CannotCapture, before it captures any."""
        self._require_capturable()
        begun, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        first = list(self._first())
        for done, one in enumerate(first, start=1):
            self._capture(one)
            report(f"capturing CUDA graphs: {done} of {len(first)}")
        seconds, used = time.perf_counter() - begun, free - torch.cuda.mem_get_info()[0]
        report(
            f"captured {len(self._captured)} CUDA graphs in {seconds:.1f} s, {used / 2**20:,.0f} MiB; "
            f"{self.num_missing} more are captured between steps"
        )

    def _first(self) -> Iterator[_Graph]:
        """Yields what `capture_first` captures, the largest first."""
        most = self._prompts[max(self._prompts)]
        yield from ((graph, False) for graph in most.values())
        for size in reversed(_largest_of_each_power(self._prompts)[:-1]):
            few = [
                graph for shape, graph in self._prompts[size].items() if shape.num_prefills <= FEW_PREFILLS
            ]
            yield few[-1], False  # beside decodes
        powers = _largest_of_each_power(self._decodes)
        for size, graph in reversed(self._decodes.items()):
            if size <= FIRST_DECODES or size in powers:
                yield graph, GraphKey(SamplerKind.GREEDY)
                yield graph, GraphKey(SamplerKind.RANDOM, has_masks=True)  # its forward pass serves all kinds

    def capture_next(self) -> None:
        """Captures the missing graph that most steps have lacked, if any is missing. No sampling may wait for
        its masks meanwhile."""
        if self._missing:
            self._capture(max(self._missing, key=self._missing.__getitem__))

    def capture_for(self, plan: StepPlan) -> None:
        """Captures the graph of a plan without masks, if it has one that is missing."""
        own = next(self._fitting(plan, has_masks=False), None)
        if own is not None and own not in self._captured | self._refused:
            self._capture(own)

    @torch.inference_mode()
    def _require_capturable(self) -> None:
        """Raises CannotCapture if a smallest step waits for the device."""
        smallest_prompts = self._prompts[min(self._prompts)].values()
        steps: list[Callable[[], None]] = [graph.rehearse for graph in smallest_prompts]
        steps.append(partial(self._decodes[min(self._decodes)].rehearse, GraphKey(SamplerKind.GREEDY)))
        for rehearse in steps:
            with self._shared.rehearsal():
                rehearse()
                try:
                    with _waiting_refused():
                        rehearse()
                except RuntimeError as error:
                    if "synchronizing" not in str(error):
                        raise
                    raise CannotCapture(error) from error

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
    def buckets(self) -> tuple[int, ...]:
        """The numbers of tokens of prompt graphs, ascending."""
        return tuple(self._prompts)

    def get(self, plan: StepPlan, has_masks: bool = False) -> DecodeGraph | PromptGraph | None:
        """Returns the graph for a plan: its own, or, while that is missing, the smallest whose forward pass is
        captured, and notes that it is missing. None if the step is larger than all graphs. `has_masks`: they
        say what may be sampled.
        """
        fitting = self._fitting(plan, has_masks)
        own = next(fitting, None)
        if own is None:
            return None
        if own in self._captured:
            return own[0]
        if own not in self._refused:
            self._missing[own] = self._missing.get(own, 0) + 1
        may_run = (own, *fitting)
        return next((graph for graph, key in may_run if graph.runs(key)), own[0])  # type: ignore[arg-type]

    def _fitting(self, plan: StepPlan, has_masks: bool) -> Iterator[_Graph]:
        """Yields the graphs that a plan fits into, its own first, then those of larger sizes."""
        num_prefills, num_rows = plan.num_prefills, len(plan.rows)
        if num_prefills:
            numbers = plan.num_tokens, num_prefills, num_rows - num_prefills
            for shapes in self._prompts.values():
                for shape, graph in shapes.items():
                    if shape.fits(*numbers) and graph.has_room(plan):
                        yield graph, bool(plan.prefixes)
        else:
            for size, decodes in self._decodes.items():
                if size >= num_rows:
                    yield decodes, GraphKey.of(plan, has_masks)

    @torch.inference_mode()
    def _capture(self, one: _Graph) -> None:
        """Captures a graph, or notes that there is no memory for it."""
        graph, key = one
        self._missing.pop(one, None)
        try:
            graph.capture(key, self._shared)  # type: ignore[arg-type]
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            self._refused.add(one)
        else:
            self._captured.add(one)


def _largest_of_each_power(sizes: Iterable[int]) -> list[int]:
    """Returns the largest of the ascending `sizes` up to each power of two."""
    return list({(size - 1).bit_length(): size for size in sizes}.values())


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
