"""Builds a model runner from an engine's configuration: model, memory, graphs, step times, in this order.

The order matters, since the pool takes the memory that the weights leave. Each slow part is reported.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace
from transformers import PreTrainedConfig, PreTrainedModel

from lightkv.attention import AttentionBackend, make_backends, prefix_members
from lightkv.edits import AllocPart, FreeRange
from lightkv.integrations.model.adapters.adapt import adapt
from lightkv.integrations.model.context import num_layers
from lightkv.integrations.model.fused_layers import few_layers, fuse_layers, unfuse_layers
from lightkv.integrations.model.hf_model import bind
from lightkv.integrations.model.kv_scales import (
    BadScales,
    LayerScales,
    kv_scheme,
    read_kv_scales,
    set_kv_scales,
)
from lightkv.integrations.model.linears import prepare_linears
from lightkv.integrations.model.mixers.mixer import has_mixers
from lightkv.integrations.model.probe import ModelShape, probe
from lightkv.integrations.ranks.group import RankGroup
from lightkv.integrations.ranks.sharded import part_of_heads
from lightkv.ledger.shared_prefixes import PrefixSharing
from lightkv.memory.kv_memory import KVMemory
from lightkv.memory.kv_pool import PoolPlan
from lightkv.memory.kv_spec import KVSpec
from lightkv.router.config import EngineConfig, InvalidConfig
from lightkv.router.engine.step import Limits, RunnerInfo, StepPlan
from lightkv.router.engine.step_time import StepTime
from lightkv.router.model.loading.text_half import left_out_of
from lightkv.router.model_files import resolve, weight_files
from lightkv.router.sampling_params import SamplerKind
from lightkv.router.text.grammars import Grammars
from lightkv.triton_kernels.compile_ahead import compile_ahead
from lightkv.triton_kernels.quantised.kv_format import KVFormat

from .loader import load_model
from .model_config import load_supported_config
from .parts import RunnerParts
from .runner import ModelRunner
from .sampler import Sampler
from .sizes import EngineSizes, MemoryPlan, kv_text, pick_device, pick_dtype, pick_rank_device, use_graphs
from .step_graphs import CannotCapture, StepGraphs
from .step_timing import StepTimer, measured_once, shapes
from .token_buckets import token_buckets

Report = Callable[[str], None]


def join_ranks(config: EngineConfig, rank: int, size: int, store: str) -> RankGroup:
    """Joins the group of `size` ranks that finds itself by the file `store`. Blocks until all have joined.
    Raises InvalidConfig."""
    device = pick_rank_device(config, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))  # the ranks share the cores
    return RankGroup(rank, size, torch.distributed.FileStore(store, size), device)


def find_model(config: EngineConfig, report: Report) -> Path:
    """Finds the directory of `config`'s model and checks, without its weights, that the model can run here.

    Raises InvalidConfig, ModelNotFound, UnreadableWeights, UnsupportedModel.
    """
    device = pick_device(config.device)
    directory = resolve(config.model, report, config.revision)
    loaded = load_supported_config(directory)
    text = loaded.get_text_config()
    _ = EngineSizes(config, device, text).limits  # raises InvalidConfig
    _ = kv_scales(config, directory, loaded)
    if config.kv_dtype == "auto" and kv_scheme(loaded) is not None:
        report(
            "the checkpoint has a scheme for quantised K/V (kv_cache_scheme), which --kv-dtype auto does not "
            "use: K and V stay in the model's type; --kv-dtype fp8-static uses its scales, and int8 "
            "computes its own"
        )
    return directory


def kv_scales(config: EngineConfig, directory: Path, model: PreTrainedConfig) -> dict[int, LayerScales]:
    """Returns the scales of K, V and queries that `config` takes from the checkpoint, by layer; none if it
    needs none.

    `model`: the checkpoint's configuration. Raises InvalidConfig if the checkpoint lacks a scale, or says that
    its scales are for other elements than fp8.
    """
    chosen = KVFormat.parse(config.kv_dtype, config.skipped_layers)
    if not chosen.is_static:
        return {}
    if has_mixers(model.get_text_config()):
        raise InvalidConfig(
            f"--kv-dtype {config.kv_dtype}: layers of the model keep states, and no checkpoint of such a model "
            "with scales of K/V was tried; choose int8, which computes its scales"
        )
    scheme = kv_scheme(model) or {}
    kind, bits = scheme.get("type", "float"), scheme.get("num_bits", 8)
    zeros = "" if scheme.get("symmetric", True) else " with zero points"
    if (kind, bits, zeros) != ("float", 8, ""):
        raise InvalidConfig(
            f"--kv-dtype {config.kv_dtype}: the checkpoint's scales are for {kind} elements of {bits} bits"
            f"{zeros} (kv_cache_scheme); choose int8 or int4, which compute their scales"
        )
    layers = [
        layer for layer in range(num_layers(model.get_text_config()) or 0) if layer not in chosen.skipped
    ]
    try:
        files = [directory / name for name in weight_files(directory)]
        return read_kv_scales(files, layers, of_queries=config.prefill_dtype != "model")
    except BadScales as error:
        raise InvalidConfig(f"--kv-dtype {config.kv_dtype}: {error}") from error


def build_runner(
    config: EngineConfig, report: Report, directory: Path | None = None, ranks: RankGroup | None = None
) -> tuple[ModelRunner, RunnerInfo]:
    """Loads the model of `config` and makes everything that its steps need.

    `report` is called with each line of progress. `directory`: what `find_model` returned; None calls it here.
    `ranks`: the group of this process, which then loads its part of the model; None loads the whole model.
    Raises what `find_model` does, ModelTooLarge, and OutOfMemory.
    """
    device = pick_device(config.device) if ranks is None else ranks.device
    directory = directory or find_model(config, report)
    for line in () if ranks is None else ranks.lines:
        report(line)
    model = load_model(directory, device, pick_dtype(config.dtype), report, ranks, config.dequantise)
    return assemble(model, config, report, kv_scales(config, directory, model.config), directory, ranks)


def assemble(
    model: PreTrainedModel,
    config: EngineConfig,
    report: Report,
    scales: Mapping[int, LayerScales] | None = None,
    directory: Path | None = None,
    ranks: RankGroup | None = None,
) -> tuple[ModelRunner, RunnerInfo]:
    """Makes a runner around a loaded model, on the device that the model is on.

    `scales`: those of each layer, for a K/V format whose scales are given. `directory`: the model's, whose
    tokenizer grammars need; None fails rows with a grammar. `ranks`: the group that runs the model. What each
    rank measures for itself, and has to be the same on all, is taken from rank 0. Raises InvalidConfig, also
    where they are missing, UnsupportedModel, and OutOfMemory.

    The model belongs to the runner from now on: a runner that was made of it before may not run any more, since
    its CUDA graphs may read weights that have moved.
    """
    start = _Start(model, config, report, ranks)
    bound = start.bind()
    plan = start.plan_memory(bound.shape)
    parts = start.make_parts(bound, plan, scales or {})
    graphs = start.capture(bound, parts)
    runner = ModelRunner(parts, bound.limits, graphs, Grammars(directory, bound.limits.vocab_size))
    info = start.describe(bound, plan, graphs)
    return runner, start.time_steps(runner, info)


class _BoundModel(NamedTuple):
    """A model that calls lightkv's attention, the limits of its steps, and how many layers run unfused, by the
    reason."""

    shape: ModelShape
    backends: Sequence[AttentionBackend]
    limits: Limits
    unfused: dict[str, int]


@dataclass(frozen=True)
class _Start:
    """The steps that make a runner around a loaded model, in the order of `assemble`."""

    model: PreTrainedModel
    config: EngineConfig
    report: Report
    ranks: RankGroup | None

    @cached_property
    def device(self) -> torch.device:
        return self.model.device

    @cached_property
    def sizes(self) -> EngineSizes:
        return EngineSizes(self.config, self.device, self.model.config.get_text_config())

    def bind(self) -> _BoundModel:
        """Finds the shape of the model's attention, binds the model to lightkv's, and fuses its layers."""
        model, config, limits = self.model, self.config, self.sizes.limits
        if num_adapted := adapt(model):
            self.report(f"adapted the attention of {num_adapted} layers ({type(model).__name__})")
        unfuse_layers(model)  # of an engine that ran the model before
        shape = self.sizes.with_format(probe(model))
        backends = make_backends(config.attention_backend, self.device, shape.layers)
        if config.group_prefixes:
            limits = replace(limits, prefix_sharing=PrefixSharing(prefix_members(backends)))
        bind(model)
        is_packed = self.device.type == "cpu"
        if config.fuse:
            unfused = dict(fuse_layers(model, self.report, is_packed).unfused)
        else:
            unfused = {"--no-fuse": shape.spec.num_layers}
            for line in prepare_linears(model, packed=is_packed).lines:
                self.report(line)
        return _BoundModel(shape, backends, limits, unfused)

    def plan_memory(self, shape: ModelShape) -> MemoryPlan:
        """Plans the pool and the states that fit beside the weights, with ranks on each of them, and reports
        them."""
        config, spec, groups = self.config, shape.spec, shape.spec.groups
        pool, num_states = self.sizes.memory(shape)
        if self.ranks is not None:
            if (smallest := self.ranks.smallest(pool.num_tokens)) < pool.num_tokens:
                pool = PoolPlan(smallest, (smallest + 1) * spec.bytes_per_slot, "as on the smallest rank")
            num_states = self.ranks.smallest(num_states)
        size, unit = f"{pool.num_bytes / 2**20:,.1f} MiB", "tokens" if groups.is_uniform else "slots"
        self.report(f"K/V pool: {pool.num_tokens:,} {unit} in {kv_text(config, shape)}, {size} ({pool.why})")
        if not groups.is_uniform:
            self.report(f"layers: {'; '.join(map(str, groups.classes))}")
        plan = MemoryPlan(pool, num_states)
        if spec.states:
            self.report(f"states: {num_states:,} in {plan.state_bytes(spec) / 2**20:,.1f} MiB")
        return plan

    def make_parts(
        self, bound: _BoundModel, plan: MemoryPlan, scales: Mapping[int, LayerScales]
    ) -> RunnerParts:
        """Makes the K/V memory, with `scales` where its format has given ones, and the sampler."""
        config, device, spec, limits = self.config, self.device, bound.shape.spec, bound.limits
        rows, entries = limits.max_num_seqs, limits.max_model_len
        memory = KVMemory(spec, plan.pool.num_slots, rows, entries, device, plan.num_states)
        if self.ranks is not None:
            scales = _scales_of_rank(scales, self.sizes.text, spec.num_kv_heads, self.ranks)
        try:
            set_kv_scales(memory.pool, scales)
        except BadScales as error:
            raise InvalidConfig(f"--kv-dtype {config.kv_dtype}: {error}") from error
        use_fp8_prefill(bound.backends, spec, device, scales, config.prefill_dtype, self.report)
        take_first = None if self.ranks is None else self.ranks.take_first
        sampler = Sampler(limits.max_num_seqs + 1, limits.vocab_size, device, take_first)
        return RunnerParts(self.model, bound.shape.by_layer(bound.backends), memory, sampler)

    def capture(self, bound: _BoundModel, parts: RunnerParts) -> StepGraphs | None:
        """Compiles the kernels of steps and captures the first graphs; None where steps run without graphs."""
        limits, graphs = bound.limits, None
        if use_graphs(self.config, self.device):
            graphs = StepGraphs(parts, limits, token_buckets(limits.max_step_tokens, limits.prefill_budget))
        if self.device.type == "cuda":
            self.report("compiling kernels")
            kinds = {
                layer: (backend.kind, bound.shape.spec.format_of(backend.layer_idx))
                for layer, backend in bound.shape.by_layer(bound.backends).items()
            }
            with compile_ahead(), few_layers(self.model, kinds.get):
                _warm_up(parts.memory, limits)
                parts.sampler.rehearse(self.model.dtype)
                if graphs is not None:
                    graphs.rehearse()
            _warm_up(parts.memory, limits)
        if graphs is not None:
            try:
                graphs.capture_first(self.report)
            except CannotCapture as error:
                self.report(f"no CUDA graphs, so that the host launches each kernel of a step: {error}")
                graphs = None
        return graphs

    def describe(self, bound: _BoundModel, plan: MemoryPlan, graphs: StepGraphs | None) -> RunnerInfo:
        """Returns what the engine has to know of the runner, but for the times of its steps."""
        config, device, limits, pool = self.config, self.device, bound.limits, plan.pool
        spec = bound.shape.spec
        groups = spec.groups
        return RunnerInfo(
            architecture=type(self.model).__name__,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            dtype=str(spec.dtype).removeprefix("torch."),
            attention_backend=type(bound.backends[0]).__name__,
            cuda_graphs=graphs is not None,
            capacity=pool.num_tokens,
            bytes_per_token=spec.bytes_per_token,
            pool_bytes=pool.num_bytes,
            pool_reason=pool.why,
            groups=groups,
            longest=None if groups.is_uniform else groups.longest(pool.num_tokens, limits.prefill_budget),
            limits=limits,
            graph_tokens=graphs.buckets if graphs else (),
            kv_dtype=config.kv_dtype,
            skipped_layers=config.skipped_layers,
            num_ranks=1 if self.ranks is None else self.ranks.size,
            left_out=left_out_of(self.model),
            unfused=bound.unfused,
            num_states=plan.num_states,
            bytes_per_state=spec.bytes_per_state,
        )

    def time_steps(self, runner: ModelRunner, info: RunnerInfo) -> RunnerInfo:
        """Compiles the kernels of eager steps, and measures what steps take where a target needs it."""
        config, on_gpu = self.config, self.device.type == "cuda"
        if on_gpu:
            self.report("compiling the kernels of steps that run eagerly")
            runner.warm_up(_eager_plans(info.limits, max(info.graph_tokens, default=0)))
        if config.itl_target or (config.itl_target is None and on_gpu):
            info = replace(info, step_time=self._step_time(runner, info))
        return replace(info, num_missing_graphs=runner.num_missing_graphs)

    def _step_time(self, runner: ModelRunner, info: RunnerInfo) -> StepTime | None:
        clock = time.perf_counter if self.ranks is None else self.ranks.clock_of_first
        timer = StepTimer(runner, info, runner.capture_for, clock)
        if self.device.type != "cuda" or self.ranks is not None:  # all ranks measure, or none
            return timer.measure(self.report)
        facts = [self.config, self.model.config.to_json_string(), info.graph_tokens, shapes(info)]
        found, is_kept = measured_once(facts, lambda: timer.measure(self.report))
        if is_kept:
            self.report("step times: measured in an earlier start")
        return found


def _scales_of_rank(
    scales: Mapping[int, LayerScales], text: PreTrainedConfig, num_own: int, ranks: RankGroup
) -> dict[int, LayerScales]:
    """Returns the scales with those of this rank's `num_own` K/V heads, where there is one for each of the
    model's."""
    num_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads

    def own(scale: torch.Tensor) -> torch.Tensor:
        return part_of_heads(scale, num_own, ranks) if len(scale) == num_heads else scale

    return {layer: one._replace(k=own(one.k), v=own(one.v)) for layer, one in scales.items()}


def use_fp8_prefill(
    backends: Sequence[AttentionBackend],
    spec: KVSpec,
    device: torch.device,
    scales: Mapping[int, LayerScales],
    prefill_dtype: str,
    report: Report,
) -> None:
    """Has the layers compute prefill in fp8 that `prefill_dtype` (of `EngineConfig`) says, and reports how many
    do, and why one with a scale of queries does not. Raises InvalidConfig where one has to, and cannot."""
    num, why_not = 0, None
    for backend in backends if prefill_dtype != "model" else ():
        layer, of_layer = backend.layer_idx, scales.get(backend.layer_idx)
        if of_layer is None or (of_layer.q is None and prefill_dtype == "auto"):
            continue
        try:
            q_scales = [1.0] if of_layer.q is None else of_layer.q.tolist()
            if len(q_scales) != 1:
                raise ValueError(
                    f"layer {layer} has {len(q_scales)} scales of queries, and prefill in fp8 takes one"
                )
            backend.use_fp8_prefill(q_scales[0], spec, device)
            num += 1
        except ValueError as error:
            if prefill_dtype == "fp8":
                raise InvalidConfig(f"--prefill-dtype fp8: {error}; choose auto or model") from error
            why_not = why_not or error
    if num or why_not:
        told = f", though the checkpoint has scales of queries for more ({why_not})" if why_not else ""
        report(f"attention of prompts: in fp8 in {num} of {len(backends)} layers{told}")


def _warm_up(memory: KVMemory, limits: Limits) -> None:
    """Allocates and frees slots in every size that a step may need, and leaves the memory as it was.

    The kernels are compiled by size, and the first launch of each takes longer than the others.
    """
    groups = memory.pool.spec.groups
    classes = range(len(groups.classes))
    every = (1 << len(classes)) - 1
    num_tokens = memory.capacity // groups.num_groups
    for size in _powers_of_two(min(limits.prefill_budget, limits.max_model_len, num_tokens)):
        memory.apply([AllocPart(every, (1,), (0,), (size,), (0,))])
        memory.apply([FreeRange(1, 0, size, cls) for cls in classes])
    for size in _powers_of_two(min(limits.max_num_seqs, num_tokens)):
        rows = tuple(range(1, size + 1))
        memory.apply([AllocPart(every, rows, (0,) * size, (1,) * size, (0,) * size)])
        memory.apply([FreeRange(row, 0, 1, cls) for cls in classes for row in rows])


def _eager_plans(limits: Limits, most_in_graphs: int) -> Iterator[StepPlan]:
    """Yields steps of padding that meet the kernels of eager steps, which have more than `most_in_graphs`
    tokens. These kernels differ by the tokens of prefills and by their number, and by the number of decodes."""
    sizes = [size for size in _powers_of_two(limits.max_step_tokens) if size > most_in_graphs]
    for size in sizes:
        most = min(size, limits.max_num_seqs) if size == sizes[0] or not most_in_graphs else 1
        for num_prefills in _powers_of_two(most):
            if size <= num_prefills * limits.max_model_len:
                yield _padding_plan(_parts_of(size, num_prefills), num_prefills)
    if not most_in_graphs:
        for size in _powers_of_two(limits.max_num_seqs):
            yield _padding_plan([1] * size, 0)


def _parts_of(total: int, num: int) -> list[int]:
    """Returns `num` numbers that add up to `total`, as equal as possible."""
    return [total // num + (i < total % num) for i in range(num)]


def _padding_plan(counts: list[int], num_prefills: int) -> StepPlan:
    """Returns a step of sequences in row 0, all of which are sampled."""
    num, ids = len(counts), bytes(4 * sum(counts[:num_prefills]))
    kind, sample = SamplerKind.RANDOM, list(range(num))
    return StepPlan(0, b"", [0] * num, [0] * num, counts, num_prefills, ids, sample, kind, {}, [], 0)


def _powers_of_two(most: int) -> list[int]:
    """Returns the powers of two below `most`, then `most`."""
    return [*(1 << bits for bits in range(most.bit_length()) if 1 << bits < most), most]
