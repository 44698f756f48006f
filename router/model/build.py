"""Builds a model runner from an engine's configuration: device, model, memory, graphs, in this order.

The order matters, since the pool takes the memory that the weights leave. Each slow part is reported.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from msgspec.structs import replace
from transformers import PreTrainedConfig, PreTrainedModel

from lightkv.attention import AttentionBackend, make_backends, pick_backend, prefix_members
from lightkv.attention.restored_prefill import SCRATCH_BYTES
from lightkv.edits import Alloc, AllocPart, FreePartRange, FreeRange
from lightkv.errors import InvalidDevice
from lightkv.integrations.model.adapters.adapt import adapt
from lightkv.integrations.model.context import context_length, num_layers
from lightkv.integrations.model.fused_layers import fuse_layers, unfuse_layers
from lightkv.integrations.model.hf_model import bind
from lightkv.integrations.model.kv_scales import (
    BadScales,
    LayerScales,
    kv_scheme,
    read_kv_scales,
    set_kv_scales,
)
from lightkv.integrations.model.linears import prepare_linears
from lightkv.integrations.model.probe import ModelShape, probe
from lightkv.integrations.ranks.group import RankGroup
from lightkv.integrations.ranks.sharded import part_of_heads
from lightkv.ledger.shared_prefixes import PrefixSharing
from lightkv.memory.device import usable_device
from lightkv.memory.kv_memory import KVMemory
from lightkv.memory.kv_pool import PoolPlan, plan_pool
from lightkv.memory.kv_spec import KVSpec
from lightkv.router.config import EngineConfig, InvalidConfig
from lightkv.router.engine.step import Limits, RunnerInfo, StepPlan
from lightkv.router.model_files import resolve, weight_files
from lightkv.router.sampling_params import SamplerKind
from lightkv.router.text.grammars import Grammars
from lightkv.triton_kernels.compile_ahead import compile_ahead
from lightkv.triton_kernels.quantised.kv_format import KVFormat

from .loader import load_model
from .model_config import load_supported_config, position_limit
from .parts import RunnerParts
from .runner import ModelRunner
from .sampler import Sampler
from .step_graphs import CannotCapture, StepGraphs, graphs_bytes
from .step_timing import StepTimer
from .text_half import left_out_of
from .token_buckets import token_buckets

Report = Callable[[str], None]

# The memory of a step's activations, in copies of its widest tensors; measured models differ little.
_LOGITS_COPIES = 8
_HIDDEN_COPIES = 6


def pick_device(name: str) -> torch.device:
    """Returns the device called `name`; "auto" is the GPU if there is one. Raises InvalidConfig."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = usable_device(name)
    except InvalidDevice as error:
        raise InvalidConfig(f"--{error}") from error
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def pick_dtype(name: str) -> torch.dtype | Literal["auto"]:
    """Returns the dtype called `name`, or "auto"."""
    if name == "auto":
        return "auto"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def kv_text(config: EngineConfig, shape: ModelShape) -> str:
    """Returns how K and V are stored, in words: "float16", or "int8, layers 0 and 1 in float16"."""
    computed = str(shape.spec.dtype).removeprefix("torch.")
    if config.kv_dtype == "auto":
        return computed
    *others, last = map(str, config.skipped_layers or ("",))
    if not last:
        return config.kv_dtype
    layers = f"layers {', '.join(others)} and {last}" if others else f"layer {last}"
    return f"{config.kv_dtype}, {layers} in {computed}"


def use_graphs(config: EngineConfig, device: torch.device) -> bool:
    """Returns whether steps run as CUDA graphs."""
    backend = pick_backend(config.attention_backend, device)
    return config.cuda_graphs and device.type == "cuda" and backend.supports_cuda_graph


def pick_rank_device(config: EngineConfig, rank: int) -> torch.device:
    """Returns the device of a rank, of which there are `config.tensor_parallel`: on GPUs the one with its
    number. Raises InvalidConfig."""
    device, size = pick_device(config.device), config.tensor_parallel
    if size == 1:
        return device
    if device.type == "cuda":
        num_gpus = torch.cuda.device_count()
        if config.device not in ("auto", "cuda"):
            raise InvalidConfig(
                f"--device is {config.device}, and --tensor-parallel {size} takes GPUs 0 to {size - 1}; give "
                "--device cuda, and choose the GPUs with CUDA_VISIBLE_DEVICES"
            )
        if num_gpus < size:
            raise InvalidConfig(f"--tensor-parallel is {size}, and this host has {num_gpus} GPUs; give fewer")
        device = torch.device("cuda", rank)
    return device


def join_ranks(config: EngineConfig, rank: int, size: int, store: str) -> RankGroup:
    """Joins the group of `size` ranks that finds itself by the file `store`. Blocks until all have joined.
    Raises InvalidConfig."""
    device = pick_rank_device(config, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))  # the ranks share the cores
    return RankGroup(rank, size, torch.distributed.FileStore(store, size), device)


@dataclass(frozen=True)
class EngineSizes:
    """The sizes that `config` leaves open, computed from the device and the model's (text) configuration."""

    config: EngineConfig
    device: torch.device
    text: PreTrainedConfig

    @cached_property
    def limits(self) -> Limits:
        """The limits of a step and of a request.

        The longest request is one for which no sequence depends on its neighbours (`position_limit`). Raises
        InvalidConfig, also for a `max_model_len` above that.
        """
        config, on_gpu = self.config, self.device.type == "cuda"
        context = position_limit(self.text) or context_length(self.text)
        max_model_len = config.max_model_len or context
        if max_model_len is None:
            raise InvalidConfig("the model names no context length; give one with --max-model-len")
        if context is not None and max_model_len > context:
            raise InvalidConfig(
                f"--max-model-len is {max_model_len}; the model's context is {context} tokens here"
            )
        chunk = config.prefill_chunk
        if chunk is None:
            # Larger steps run their matrix products at a higher rate. With a target, tokens would wait for the
            # launch of steps that are too large for graphs.
            has_target = config.itl_target != 0
            chunk = (4096 if has_target else 8192) if on_gpu else (512 if has_target else 2048)
        return Limits(
            max_num_seqs=config.max_num_seqs or (256 if on_gpu else 64),
            max_model_len=max_model_len,
            prefill_chunk=chunk,
            vocab_size=self.text.vocab_size,
            itl_target=config.itl_target,
            session_share=config.session_share,
        )

    def with_format(self, shape: ModelShape) -> ModelShape:
        """Returns the shape that `probe` found, with K and V stored as the configuration says.

        Raises InvalidConfig for a format that does not fit the heads, the layers or the attention backend.
        """
        config = self.config
        backends = make_backends(config.attention_backend, self.device, shape.layers)
        try:
            chosen = KVFormat.parse(config.kv_dtype, config.skipped_layers)
            spec = dataclasses.replace(shape.spec, format=chosen, lifetimes=shape.lifetimes)
            for layer in backends:
                layer.check_format(spec.format_of(layer.layer_idx))
            return dataclasses.replace(shape, spec=spec)
        except ValueError as error:
            skipped = f", --kv-skip-layers {config.kv_skip_layers}" if config.kv_skip_layers else ""
            raise InvalidConfig(f"--kv-dtype {config.kv_dtype}{skipped}: {error}") from error

    def pool(self, shape: ModelShape) -> PoolPlan:
        """Returns the pool that fits beside what the device holds now and what steps need.

        Raises OutOfMemory.
        """
        return plan_pool(
            shape.spec,
            self.device,
            num_tokens=self.config.max_total_tokens,
            fraction=self.config.mem_fraction,
            reserve=self.step_bytes(shape),
        )

    def step_bytes(self, shape: ModelShape) -> int:
        """Returns the bytes that steps need on the device, beside the weights and the pool."""
        # Some configurations give the intermediate size of each layer.
        inner = getattr(self.text, "intermediate_size", None) or 0
        widest = max(self.text.hidden_size, *(inner if isinstance(inner, list | tuple) else [inner]))
        limits = self.limits
        rows = limits.max_num_seqs + 1
        table = rows * limits.max_model_len * 4 * shape.spec.groups.num_groups
        sampling = Sampler.bytes_for(rows, limits.vocab_size)
        logits = limits.max_num_seqs * limits.vocab_size * 4 * _LOGITS_COPIES
        per_token = widest * shape.spec.dtype.itemsize * _HIDDEN_COPIES
        hidden = limits.max_step_tokens * per_token
        scratch = self._scratch_bytes(shape)
        # Graphs have memory of their own, which eager steps and their sampling do not use.
        graphs = 0
        if use_graphs(self.config, self.device):
            logits_row = limits.vocab_size * 4
            graphs = graphs_bytes(limits.max_num_seqs, limits.max_step_tokens, per_token, logits_row, scratch)
        return table + sampling + logits + hidden + scratch + graphs

    def _scratch_bytes(self, shape: ModelShape) -> int:
        """Returns the bytes that the attention of a layer needs in a step; layers run one after the other."""
        backends = make_backends(self.config.attention_backend, self.device, shape.layers)
        most, dtype = self.limits.max_step_tokens, shape.spec.dtype
        parts = max(backend.scratch_bytes(most, dtype, self.device) for backend in backends)
        is_restored = shape.spec.format.is_quantised and self.device.type == "cuda"
        return parts + (SCRATCH_BYTES if is_restored else 0)


def find_model(config: EngineConfig, report: Report) -> Path:
    """Finds the directory of `config`'s model and checks, without its weights, that the model can run here.

    Raises InvalidConfig, ModelNotFound, UnreadableWeights, UnsupportedModel.
    """
    device = pick_device(config.device)
    directory = resolve(config.model, report)
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
    scheme = kv_scheme(model) or {}
    kind, bits = scheme.get("type", "float"), scheme.get("num_bits", 8)
    if (kind, bits) != ("float", 8):
        raise InvalidConfig(
            f"--kv-dtype {config.kv_dtype}: the checkpoint's scales are for {kind} elements of {bits} bits "
            "(kv_cache_scheme); choose int8 or int4, which compute their scales"
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
    model = load_model(directory, device, pick_dtype(config.dtype), report, ranks)
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
    device = model.device
    sizes = EngineSizes(config, device, model.config.get_text_config())
    limits = sizes.limits
    with_graphs = use_graphs(config, device)
    if num_adapted := adapt(model):
        report(f"adapted the attention of {num_adapted} layers ({type(model).__name__})")
    unfuse_layers(model)  # of an engine that ran the model before
    shape = sizes.with_format(probe(model))
    backends = make_backends(config.attention_backend, device, shape.layers)
    if config.group_prefixes:
        limits = replace(limits, prefix_sharing=PrefixSharing(prefix_members(backends)))
    bind(model)
    is_packed = device.type == "cpu"
    if config.fuse:
        fused = fuse_layers(model, report, is_packed)
        linears, unfused = fused.linears, dict(fused.unfused)
    else:
        linears = prepare_linears(model, packed=is_packed)
        unfused = {"--no-fuse": shape.spec.num_layers}
        for line in linears.lines:
            report(line)
    pool = sizes.pool(shape)
    if ranks is not None and (smallest := ranks.smallest(pool.num_tokens)) < pool.num_tokens:
        pool = PoolPlan(smallest, (smallest + 1) * shape.spec.bytes_per_slot, "as on the smallest rank")
    size = f"{pool.num_bytes / 2**20:,.1f} MiB"
    groups = shape.spec.groups
    unit = "tokens" if groups.is_uniform else "slots"
    report(f"K/V pool: {pool.num_tokens:,} {unit} in {kv_text(config, shape)}, {size} ({pool.why})")
    if not groups.is_uniform:
        report(f"layers: {'; '.join(map(str, groups.classes))}")
    memory = KVMemory(shape.spec, pool.num_slots, limits.max_num_seqs, limits.max_model_len, device)
    scales = scales or {}
    if ranks is not None:
        scales = _scales_of_rank(scales, sizes.text, shape.spec.num_kv_heads, ranks)
    try:
        set_kv_scales(memory.pool, scales)
    except BadScales as error:
        raise InvalidConfig(f"--kv-dtype {config.kv_dtype}: {error}") from error
    use_fp8_prefill(backends, shape.spec, device, scales, config.prefill_dtype, report)
    sampler = Sampler(
        limits.max_num_seqs + 1, limits.vocab_size, device, None if ranks is None else ranks.take_first
    )
    parts = RunnerParts(model, backends, memory, sampler)
    graphs, buckets = None, list[int]()
    if with_graphs:
        most = limits.max_step_tokens
        buckets = token_buckets(linears.by_shape(), limits.prefill_budget, most, report)
        if ranks is not None:
            buckets = ranks.list_of_first(buckets)
        graphs = StepGraphs(parts, limits, buckets)
    if device.type == "cuda":
        report("compiling kernels")
        with compile_ahead():
            _warm_up(memory, limits)
            if graphs is not None:
                graphs.rehearse()
        _warm_up(memory, limits)
    if graphs is not None:
        try:
            graphs.capture_first(report)
        except CannotCapture as error:
            report(f"no CUDA graphs, so that the host launches each kernel of a step: {error}")
            graphs = None
    runner = ModelRunner(parts, limits, graphs, Grammars(directory, limits.vocab_size))
    if device.type == "cuda":
        report("compiling the kernels of steps that run eagerly")
        runner.warm_up(_eager_plans(limits, graphs.most_tokens if graphs else 0))
    info = RunnerInfo(
        architecture=type(model).__name__,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=str(shape.spec.dtype).removeprefix("torch."),
        attention_backend=type(backends[0]).__name__,
        cuda_graphs=graphs is not None,
        capacity=pool.num_tokens,
        bytes_per_token=shape.spec.bytes_per_token,
        pool_bytes=pool.num_bytes,
        pool_reason=pool.why,
        groups=groups,
        longest=None if groups.is_uniform else groups.longest(pool.num_tokens, limits.prefill_budget),
        limits=limits,
        graph_tokens=tuple(buckets) if graphs else (),
        kv_dtype=config.kv_dtype,
        skipped_layers=config.skipped_layers,
        num_ranks=1 if ranks is None else ranks.size,
        left_out=left_out_of(model),
        unfused=unfused,
    )
    if config.itl_target or (config.itl_target is None and device.type == "cuda"):
        clock = time.perf_counter if ranks is None else ranks.clock_of_first
        info = replace(info, step_time=StepTimer(runner, info, runner.capture_for, clock).measure(report))
    return runner, replace(info, num_missing_graphs=runner.num_missing_graphs)


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
    others = range(1, len(groups.classes))  # classes of layers that do not see everything
    num_tokens = memory.capacity // groups.num_groups
    for size in _powers_of_two(min(limits.prefill_budget, limits.max_model_len, num_tokens)):
        memory.apply([Alloc((1,), (0,), (size,)), *(AllocPart(cls, (1,), (0,), (size,)) for cls in others)])
        memory.apply([FreeRange(1, 0, size), *(FreePartRange(cls, 1, 0, size) for cls in others)])
    for size in _powers_of_two(min(limits.max_num_seqs, num_tokens)):
        rows, ones = tuple(range(1, size + 1)), (1,) * size
        memory.apply(
            [Alloc(rows, (0,) * size, ones), *(AllocPart(cls, rows, (0,) * size, ones) for cls in others)]
        )
        frees = [FreeRange(row, 0, 1) for row in rows]
        memory.apply([*frees, *(FreePartRange(cls, row, 0, 1) for cls in others for row in rows)])


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
