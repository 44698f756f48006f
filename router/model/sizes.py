"""Chooses what an engine's configuration leaves open: the device, the limits of steps, the K/V pool's size."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, NamedTuple

import torch
from transformers import PreTrainedConfig

from lightkv.attention import make_backends, pick_backend
from lightkv.attention.restored_prefill import SCRATCH_BYTES
from lightkv.errors import InvalidDevice, OutOfMemory
from lightkv.integrations.model.context import context_length
from lightkv.integrations.model.probe import ModelShape
from lightkv.memory.device import usable_device
from lightkv.memory.kv_pool import PoolPlan, free_bytes, plan_pool
from lightkv.memory.kv_spec import KVSpec
from lightkv.router.config import EngineConfig, InvalidConfig
from lightkv.router.engine.step import Limits
from lightkv.triton_kernels.quantised.kv_format import KVFormat

from .model_config import position_limit
from .sampler import Sampler
from .step_graphs import graphs_bytes

# Where the configuration does not say how many states there are: one for each so many tokens of K/V, or for
# each request that may run, in at most this many bytes for each of K/V (docs/simulator.md, "K/V and states").
_TOKENS_A_STATE = 8192
_MOST_RATIO = 1 / 3
_LEAST_SLOTS = 5  # of states: so many requests less one run at once, unless they take half of the memory
# The memory of a step's activations, in copies of its widest tensors; measured models differ little.
_LOGITS_COPIES = 7
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


def state_ratio(num_bytes: int, bytes_per_token: int, bytes_per_state: int, max_num_seqs: int) -> float:
    """Returns the default of the bytes of states over those of K/V, which share `num_bytes`."""
    running = max_num_seqs * bytes_per_state
    for_prefixes = bytes_per_state / (_TOKENS_A_STATE * bytes_per_token)
    return min(max(for_prefixes, running / max(num_bytes - running, 1)), _MOST_RATIO)


class MemoryPlan(NamedTuple):
    """The pool, and how many states beside it; 0 where no layer has any."""

    pool: PoolPlan
    num_states: int = 0

    def state_bytes(self, spec: KVSpec) -> int:
        """Returns the bytes of the states, slot 0 included."""
        return (self.num_states + 1) * spec.bytes_per_state


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
            skips = config.skipped_layers
            if shape.numbers is not None:
                if others := sorted(set(skips) - set(shape.numbers)):
                    held = ", ".join(map(str, shape.numbers))
                    raise ValueError(f"layers {others} have no K/V; give some of {held}, which have")
                skips = tuple(map(shape.numbers.index, skips))
            chosen = KVFormat.parse(config.kv_dtype, skips)
            spec = dataclasses.replace(shape.spec, format=chosen, lifetimes=shape.lifetimes)
            for layer in backends:
                layer.check_format(spec.format_of(layer.layer_idx))
            return dataclasses.replace(shape, spec=spec)
        except ValueError as error:
            skipped = f", --kv-skip-layers {config.kv_skip_layers}" if config.kv_skip_layers else ""
            raise InvalidConfig(f"--kv-dtype {config.kv_dtype}{skipped}: {error}") from error

    def memory(self, shape: ModelShape, unloaded: int = 0) -> MemoryPlan:
        """Returns the pool and the states that fit beside what the device holds now, what steps need, and so
        many bytes of weights that are still to load.

        Raises OutOfMemory.
        """
        config, spec, reserve = self.config, shape.spec, self.step_bytes(shape) + unloaded
        plan = partial(
            plan_pool, spec, self.device, num_tokens=config.max_total_tokens, fraction=config.mem_fraction
        )
        pool = plan(reserve=reserve)
        if not spec.states:
            return MemoryPlan(pool)
        size, bytes_per_token = spec.bytes_per_state, spec.groups.num_groups * spec.bytes_per_slot
        ratio, least = config.mamba_full_memory_ratio, 2
        is_given = config.max_total_tokens is not None  # else K/V and states are of one budget
        if ratio is None:
            ratio = state_ratio(pool.num_bytes, bytes_per_token, size, self.limits.max_num_seqs)
            is_whole = self.device.type == "cuda" and not is_given
            room = pool.num_bytes if is_whole else free_bytes(self.device) // 4 - reserve
            least = max(least, min(_LEAST_SLOTS, room // 2 // size))
        num_slots = max(int(pool.num_bytes * ratio / (1 if is_given else 1 + ratio)) // size, least)
        pool = plan(reserve=reserve + num_slots * size)
        if is_given and pool.num_bytes + num_slots * size > (free := free_bytes(self.device)):
            raise OutOfMemory(free - pool.num_bytes, size, num_slots, "states")
        return MemoryPlan(pool, num_slots - 1)

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
