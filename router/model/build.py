"""From settings to a model runner: the device, the model, its memory and its graphs, in that order.

Knows what depends on what (the pool takes what the weights leave), and reports each slow part as it goes.
The worker's side: imports torch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from msgspec.structs import replace
from transformers import PreTrainedConfig, PreTrainedModel

from lightkv.attention import AttentionMetadata, group_members, make_backends, pick_backend
from lightkv.edits import Alloc, FreeRange
from lightkv.integrations.model.context import context_length
from lightkv.integrations.model.hf_model import bind
from lightkv.integrations.model.probe import probe
from lightkv.ledger.shared_prefixes import PrefixSharing
from lightkv.memory.kv_memory import KVMemory
from lightkv.memory.kv_pool import PoolPlan, plan_pool
from lightkv.memory.kv_spec import KVSpec
from lightkv.router.config import EngineConfig, InvalidConfig
from lightkv.router.engine.step import Limits, RunnerInfo
from lightkv.router.model_files import resolve
from lightkv.router.sampling_params import SamplerKind

from .cuda_graph import DecodeGraphs
from .loader import load_model, load_supported_config, position_limit
from .packed_linear import pack_linears
from .parts import RunnerParts
from .runner import ModelRunner
from .sampler import Sampler

Report = Callable[[str], None]

# Activations of a step, as multiples of what its widest tensors take; measured shapes differ little.
_LOGITS_COPIES = 8
_HIDDEN_COPIES = 6


def pick_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the GPU where there is one. Raises InvalidConfig."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidConfig(f"--device is {name!r}; give auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidConfig(f"--device is {name!r}; lightkv runs on cpu and cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidConfig(f"--device is {name!r}, and torch {torch.__version__} sees no GPU; give cpu")
        if (device.index or 0) >= torch.cuda.device_count():
            raise InvalidConfig(f"--device is {name!r}, and there are {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", device.index or 0)
    return device


def pick_dtype(name: str) -> torch.dtype | Literal["auto"]:
    """The type called `name`, or "auto"."""
    if name == "auto":
        return "auto"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def definite_limits(config: EngineConfig, device: torch.device, text: PreTrainedConfig) -> Limits:
    """What `config` leaves open, made definite from the device and the model's (text) configuration.

    A context is the longest at which no sequence depends on its neighbours (`position_limit`). Raises
    InvalidConfig, also for a context longer than that.
    """
    on_gpu = device.type == "cuda"
    context = position_limit(text) or context_length(text)
    max_model_len = config.max_model_len or context
    if max_model_len is None:
        raise InvalidConfig("the model names no context length; give one with --max-model-len")
    if context is not None and max_model_len > context:
        raise InvalidConfig(
            f"--max-model-len is {max_model_len}; the model's context is {context} tokens here"
        )
    chunk = config.prefill_chunk
    if chunk is None:
        chunk = 2048 if on_gpu else 512
    return Limits(
        max_num_seqs=config.max_num_seqs or (256 if on_gpu else 64),
        max_model_len=max_model_len,
        prefill_chunk=chunk,
        vocab_size=text.vocab_size,
    )


def use_graphs(config: EngineConfig, device: torch.device) -> bool:
    """Do decode steps run as CUDA graphs? Raises InvalidConfig where `config` contradicts itself."""
    backend = pick_backend(config.attention_backend, device)
    graphs = config.cuda_graphs and device.type == "cuda" and backend.supports_cuda_graph
    if config.compile and not graphs:
        raise InvalidConfig(
            "--compile is for decode steps in CUDA graphs; leave it out, or use a GPU with the triton "
            "attention backend and without --no-cuda-graphs"
        )
    return graphs


def size_pool(
    config: EngineConfig, spec: KVSpec, device: torch.device, limits: Limits, text: PreTrainedConfig
) -> PoolPlan:
    """What the pool holds on `device`, beside the model and what its steps need. Raises OutOfMemory."""
    inner = getattr(text, "intermediate_size", None) or 0  # of each layer, in some configurations
    widest = max(text.hidden_size, *(inner if isinstance(inner, list | tuple) else [inner]))
    rows = limits.max_num_seqs + 1
    table = rows * limits.max_model_len * 4
    sampling = Sampler.bytes_for(rows, limits.vocab_size)
    logits = limits.max_num_seqs * limits.vocab_size * 4 * _LOGITS_COPIES
    hidden = limits.max_step_tokens * widest * spec.dtype.itemsize * _HIDDEN_COPIES
    return plan_pool(
        spec,
        device,
        num_tokens=config.max_total_tokens,
        fraction=config.mem_fraction,
        reserve=table + sampling + logits + hidden,
    )


def find_model(config: EngineConfig, report: Report) -> Path:
    """The directory of the model of `config`, which can run here as far as can be told without its weights.

    Raises InvalidConfig, ModelNotFound, UnreadableWeights, UnsupportedModel.
    """
    device = pick_device(config.device)
    use_graphs(config, device)
    directory = resolve(config.model, report)
    definite_limits(config, device, load_supported_config(directory).get_text_config())
    return directory


def build_runner(
    config: EngineConfig, report: Report, directory: Path | None = None
) -> tuple[ModelRunner, RunnerInfo]:
    """Load the model of `config` and make everything its steps need.

    `report` takes progress, a line at a time. `directory`: what `find_model` has returned; None asks it now.
    Raises what `find_model` does, ModelTooLarge, and OutOfMemory.
    """
    device = pick_device(config.device)
    directory = directory or find_model(config, report)
    model = load_model(directory, device, pick_dtype(config.dtype), report)
    return assemble(model, config, report)


def assemble(model: PreTrainedModel, config: EngineConfig, report: Report) -> tuple[ModelRunner, RunnerInfo]:
    """A runner around a model that is loaded already, on the device that it is on."""
    device = model.device
    text = model.config.get_text_config()
    limits = definite_limits(config, device, text)
    with_graphs = use_graphs(config, device)
    shape = probe(model)
    backends = make_backends(config.attention_backend, device, shape.layers)
    if config.group_prefixes:
        limits = replace(limits, prefix_sharing=PrefixSharing(group_members(backends)))
    if device.type == "cpu":
        pack_linears(model, report)
    pool = size_pool(config, shape.spec, device, limits, text)
    report(f"K/V pool: {pool.num_tokens:,} tokens, {pool.num_bytes / 2**20:,.1f} MiB ({pool.why})")
    memory = KVMemory(shape.spec, pool.num_slots, limits.max_num_seqs, limits.max_model_len, device)
    sampler = Sampler(limits.max_num_seqs + 1, limits.vocab_size, device)
    bind(model)
    parts = RunnerParts(model, backends, memory, sampler)
    if device.type == "cuda":
        report("compiling what takes slots, for every size of a step")
        _warm_up(memory, limits)
    graphs = None
    if with_graphs:
        members = limits.prefix_sharing.max_members
        metadata = AttentionMetadata(limits.max_num_seqs, limits.max_num_seqs, memory, group_members=members)
        graphs = DecodeGraphs(_compiled(parts, report) if config.compile else parts, metadata)
        graphs.capture([SamplerKind.GREEDY, SamplerKind.RANDOM], report)
    info = RunnerInfo(
        architecture=type(model).__name__,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=str(shape.spec.dtype).removeprefix("torch."),
        attention_backend=type(backends[0]).__name__,
        cuda_graphs=with_graphs,
        capacity=pool.num_tokens,
        bytes_per_token=shape.spec.bytes_per_token,
        pool_bytes=pool.num_bytes,
        pool_reason=pool.why,
        limits=limits,
    )
    return ModelRunner(parts, limits, graphs), info


def _warm_up(memory: KVMemory, limits: Limits) -> None:
    """Take and give back as many slots as a step's prompts or decodes may take: kernels are compiled by size,
    and one that is compiled while requests run holds them up. Leaves the memory as it was."""
    most = min(limits.prefill_budget, limits.max_model_len, memory.capacity)
    for size in _powers_of_two(most):
        memory.apply([Alloc((1,), (0,), (size,)), FreeRange(1, 0, size)])
    for size in _powers_of_two(min(limits.max_num_seqs, memory.capacity)):
        rows = tuple(range(1, size + 1))
        memory.apply([Alloc(rows, (0,) * size, (1,) * size), *(FreeRange(row, 0, 1) for row in rows)])


def _powers_of_two(most: int) -> list[int]:
    """Up to `most`, which comes last."""
    return [*(1 << bits for bits in range(most.bit_length()) if 1 << bits < most), most]


def _compiled(parts: RunnerParts, report: Report) -> RunnerParts:
    """For decode graphs alone: their shapes are few, while every prefill would be compiled anew."""
    report("compiling the model for each batch size of a decode step: about 20 s each")
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 1024)  # a shape each
    compiled = torch.compile(parts.model, dynamic=False)
    return parts._replace(model=compiled)  # type: ignore[arg-type]
