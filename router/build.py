"""From settings to a model runner: the device, the model, its memory and its graphs, in that order.

Knows what depends on what (the pool takes what the weights leave), and reports each slow part as it goes.
The worker's side: imports torch.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from lightkv.attention import AttentionMetadata, make_backends
from lightkv.integrations.transformers import bind, probe
from lightkv.kv_memory import KVMemory
from lightkv.kv_pool import PoolPlan, plan_pool
from lightkv.kv_spec import KVSpec

from .config import EngineConfig, InvalidConfig
from .decode_graph import DecodeGraphs
from .messages import RunnerInfo
from .model_runner import Device, ModelRunner
from .sampler import Sampler
from .sampling_params import SamplerKind
from .weights import load_model, resolve

Report = Callable[[str], None]

# Activations of a step, as multiples of what its widest tensors take; measured shapes differ little.
_LOGITS_COPIES = 8
_HIDDEN_COPIES = 6


class Limits(NamedTuple):
    """The settings that depend on the model and the device, made definite."""

    max_num_seqs: int
    max_model_len: int
    prefill_chunk: int


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


def definite_limits(config: EngineConfig, device: torch.device, context: int) -> Limits:
    """The limits that `config` leaves open, from the device and the model's `context`. Raises InvalidConfig."""
    on_gpu = device.type == "cuda"
    max_model_len = config.max_model_len or context
    if max_model_len > context:
        raise InvalidConfig(f"--max-model-len is {max_model_len}; the model's context is {context} tokens")
    chunk = config.prefill_chunk
    if chunk is None:
        chunk = 2048 if on_gpu else 512
    return Limits(config.max_num_seqs or (256 if on_gpu else 64), max_model_len, chunk)


def size_pool(
    config: EngineConfig, spec: KVSpec, device: torch.device, limits: Limits, model: torch.nn.Module
) -> PoolPlan:
    """What the pool holds on `device`, beside the model and what its steps need. Raises OutOfMemory."""
    text = model.config.get_text_config()  # type: ignore[union-attr, operator]
    tokens = (limits.prefill_chunk or limits.max_model_len) + limits.max_num_seqs
    widest = max(text.hidden_size, getattr(text, "intermediate_size", 0))
    table = (limits.max_num_seqs + 1) * limits.max_model_len * 4
    penalties = (limits.max_num_seqs + 1) * text.vocab_size * 4
    logits = limits.max_num_seqs * text.vocab_size * 4 * _LOGITS_COPIES
    hidden = tokens * widest * spec.dtype.itemsize * _HIDDEN_COPIES
    return plan_pool(
        spec,
        device,
        num_tokens=config.max_total_tokens,
        fraction=config.mem_fraction,
        reserve=table + penalties + logits + hidden,
    )


def build_runner(config: EngineConfig, report: Report) -> tuple[ModelRunner, RunnerInfo]:
    """Load the model of `config` and make everything its steps need.

    `report` takes progress, a line at a time. Raises InvalidConfig, ModelNotFound, UnreadableWeights,
    UnsupportedModel, OutOfMemory.
    """
    device = pick_device(config.device)
    directory = resolve(config.model, report)
    model = load_model(directory, device, pick_dtype(config.dtype), report)
    return assemble(model, config, report)


def assemble(model: torch.nn.Module, config: EngineConfig, report: Report) -> tuple[ModelRunner, RunnerInfo]:
    """A runner around a model that is loaded already, on whatever device it is on."""
    device = next(model.parameters()).device
    text = model.config.get_text_config()  # type: ignore[union-attr, operator]
    limits = definite_limits(config, device, text.max_position_embeddings)
    shape = probe(model)  # type: ignore[arg-type]
    backends = make_backends(config.attention_backend, device, shape.layers)
    pool = size_pool(config, shape.spec, device, limits, model)
    report(f"K/V pool: {pool.num_tokens:,} tokens, {pool.num_bytes / 2**20:,.1f} MiB ({pool.why})")
    memory = KVMemory(shape.spec, pool.num_slots, limits.max_num_seqs, limits.max_model_len, device)
    sampler = Sampler(limits.max_num_seqs + 1, text.vocab_size, device)
    bind(model)  # type: ignore[arg-type]
    parts = Device(model, backends, memory, sampler)  # type: ignore[arg-type]
    graphs = None
    if config.cuda_graphs and device.type == "cuda":
        metadata = AttentionMetadata(limits.max_num_seqs, limits.max_num_seqs, memory)
        graphs = DecodeGraphs(_compiled(parts, report) if config.compile else parts, metadata)
        graphs.capture([SamplerKind.GREEDY, SamplerKind.RANDOM], report)
    elif config.compile:
        raise InvalidConfig("--compile is for decode steps in CUDA graphs; leave it out, or use a GPU")
    max_num_tokens = (limits.prefill_chunk or pool.num_tokens) + limits.max_num_seqs
    info = RunnerInfo(
        architecture=type(model).__name__,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=str(shape.spec.dtype).removeprefix("torch."),
        attention_backend=config.attention_backend or ("triton" if device.type == "cuda" else "torch"),
        cuda_graphs=graphs is not None,
        capacity=pool.num_tokens,
        bytes_per_token=shape.spec.bytes_per_token,
        pool_bytes=pool.num_bytes,
        pool_reason=pool.why,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        prefill_chunk=limits.prefill_chunk,
        vocab_size=text.vocab_size,
    )
    return ModelRunner(parts, max_num_tokens, graphs), info


def _compiled(parts: Device, report: Report) -> Device:
    """For decode graphs alone: their shapes are few, while every prefill would be compiled anew."""
    report("compiling the model for each batch size of a decode step: about 20 s each")
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 1024)  # a shape each
    compiled = torch.compile(parts.model, dynamic=False)
    return parts._replace(model=compiled)  # type: ignore[arg-type]
