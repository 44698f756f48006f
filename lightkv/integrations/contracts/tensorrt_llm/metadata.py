"""TensorRT-LLM's metadata of a batch, which every layer's attention reads."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import torch

from lightkv.attention.step_plans import StepPlans

from .arguments import AttentionRuntimeFeatures, KVCacheParams, is_default
from .step import BatchNumbers, StaticRoom, Step, check_blocks
from .upstream import not_carried_out

# Fields of features that lightkv's kernels do not have here, and the values that do not ask for these.
_UNSUPPORTED = {
    "cache_indirection": None,
    "cu_q_seqlens": None,
    "cu_kv_seqlens": None,
    "multi_item_part_lens": None,
    "draft_kv_cache_manager": None,
    "sparse_metadata_params": None,
    "mamba_metadata": False,
    "enable_flash_mla": False,
    "enable_context_mla_with_cached_kv": False,
}
_UNSUPPORTED_PARAMS = {
    "host_max_attention_window_sizes": None,
    "host_sink_token_length": None,
    "num_extra_kv_tokens": 0,
}
_DRAFTS = (
    "it changes a batch's lengths on the device between forward passes. Verify drafts with "
    "runtime_features.has_speculative_draft_tokens, in a line, and call prepare() with each pass's lengths"
)


class _Followed:
    """A field of the metadata whose assignment changes others (`AttentionMetadata._assign`)."""

    def __init__(self, default: Any, fallback: str | None = None) -> None:
        self._default = default
        self._fallback = fallback  # the field that is read where this one is not set

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, metadata: Any, owner: type) -> Any:
        if metadata is None:  # a dataclass asks for the default
            return self._default
        value = getattr(metadata, f"_{self._name}", self._default)
        return getattr(metadata, self._fallback) if value is None and self._fallback else value

    def __set__(self, metadata: Any, value: Any) -> None:
        metadata._assign(self._name, value)


@dataclass(kw_only=True, eq=False)
class AttentionMetadata:
    """A batch's metadata, in TensorRT-LLM's words: sequences in the context phase come first, those in the
    generation phase follow, and their tokens are packed in that order.

    Set `seq_lens` (int `[B]` on the CPU: this step's tokens of each sequence), `num_contexts`, `request_ids`
    and `kv_cache_params`, then call `prepare`, once a step. `kv_cache_manager` is lightkv's `KVCacheManager`,
    or any with `get_buffers(layer_idx)` and `get_batch_cache_indices(request_ids)`; without one, or where
    `kv_cache_params.use_cache` is False, tokens attend to this step's tokens alone. `seq_lens_cuda` is the copy
    on the device, int32; under a CUDA graph (`create_cuda_graph_metadata`) it never moves.

    `seq_lens_kv` is set for cross attention alone: this step's new keys of each sequence, which are an
    encoder's. `num_tokens` counts the new keys then, as in TensorRT-LLM. `prompt_lens` only serve to recognise
    sequences in the wrong order.

    Fields that are not named here are TensorRT-LLM's own, and are not read. `prepare` refuses those that ask
    for something (`_UNSUPPORTED`). Its methods for drafts and for helix parallelism raise NotImplementedError.
    """

    max_num_requests: int
    max_num_tokens: int
    max_num_sequences: int | None = None
    kv_cache_manager: Any = None
    draft_kv_cache_manager: Any = None
    mapping: Any = None
    sparse_metadata_params: Any = None
    kv_layout: Literal["NHD", "HND"] = "HND"
    enable_flash_mla: bool = False
    enable_context_mla_with_cached_kv: bool = False
    is_cuda_graph: bool = field(default=False, repr=False)
    seq_lens: Any = _Followed(None)
    num_contexts: Any = _Followed(0)
    position_ids: torch.Tensor | None = None
    kv_cache_params: KVCacheParams | None = None
    seq_lens_kv: Any = _Followed(None, fallback="seq_lens")
    cross: "AttentionMetadata | None" = None
    request_ids: list[int] | None = None
    prompt_lens: list[int] | None = None
    cu_q_seqlens: torch.Tensor | None = None
    cu_kv_seqlens: torch.Tensor | None = None
    runtime_features: Any = field(default_factory=AttentionRuntimeFeatures)
    all_rank_num_tokens: list[int] | None = None
    mamba_metadata: Any = None
    mamba_chunk_size: int = 128
    padded_num_tokens: int | None = None
    cache_indirection: torch.Tensor | None = None
    cuda_graph_buffers: Any = None
    num_heads_per_kv: int | None = 1
    multi_item_part_lens: list[list[int]] | None = None

    def __post_init__(self) -> None:
        self._forget()
        if self.is_cross:
            if self.cross is not None and self.cross is not self:
                raise ValueError(
                    "metadata of cross attention (its seq_lens_kv is set) has no cross metadata of its own; "
                    "give cross to that of the decoder's self-attention"
                )
            self.cross = self
        elif self.cross is not None and type(self.cross) is not type(self):
            raise ValueError(
                f"cross is a {type(self.cross).__name__} and this a {type(self).__name__}; make it by "
                "create_cross_metadata"
            )

    def _forget(self) -> None:
        """Drops what belongs to the object that this one was copied from."""
        self._step: Step | None = None
        self._room: StaticRoom | None = None
        self.plans = StepPlans()

    def _assign(self, name: str, value: Any) -> None:
        """Sets a followed field, and what depends on it."""
        if name != "num_contexts" and value is not None:
            if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.is_cuda or _is_float(value):
                raise ValueError(f"{name} must be an int tensor [batch_size] on the CPU, got {value!r}")
            self._copy_to_device(name, value)
        self.__dict__[f"_{name}"] = value
        self._step = None  # the batch is another one until `prepare`
        cross = self.__dict__.get("cross")
        if name == "seq_lens" and cross is not None and cross is not self:
            cross.__dict__["_seq_lens"] = value
            cross.__dict__["_seq_lens_cuda"] = self.seq_lens_cuda
            cross._step = None

    def _copy_to_device(self, name: str, value: torch.Tensor) -> None:
        held = self.__dict__.get(f"_{name}_cuda")
        if not (self.is_cuda_graph and held is not None):
            self.__dict__[f"_{name}_cuda"] = value.to(self.device, torch.int32, copy=True)
            return
        if held.shape != value.shape:
            raise ValueError(
                f"{name} of {len(value)} sequences, and the CUDA graph has {len(held)}: fill the batch up with "
                "requests of one token (add_dummy_requests of the cache manager), or capture another graph"
            )
        held.copy_(value, non_blocking=True)

    @property
    def device(self) -> torch.device:
        """The cache manager's device, where it says so; else the GPU, or the CPU where there is none."""
        device = getattr(self.kv_cache_manager, "device", None)
        if isinstance(device, torch.device):
            return device
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def seq_lens_cuda(self) -> torch.Tensor | None:
        """`seq_lens` on the device, int32 `[B]`."""
        held: torch.Tensor | None = self.__dict__.get("_seq_lens_cuda")
        return held

    @property
    def seq_lens_kv_cuda(self) -> torch.Tensor | None:
        """`seq_lens_kv` on the device, int32 `[B]`."""
        held: torch.Tensor | None = self.__dict__.get("_seq_lens_kv_cuda")
        return self.seq_lens_cuda if held is None else held

    @property
    def num_seqs(self) -> int:
        """Sequences of the batch."""
        return len(self.seq_lens)

    @property
    def num_generations(self) -> int:
        """Sequences in the generation phase."""
        return 0 if self.seq_lens is None else max(len(self.seq_lens) - self.num_contexts, 0)

    @property
    def context_lens(self) -> torch.Tensor:
        """This step's tokens of each sequence in the context phase, int `[num_contexts]` on the CPU."""
        lens: torch.Tensor = self.seq_lens[: self.num_contexts]
        return lens

    @property
    def num_ctx_tokens(self) -> int:
        """This step's tokens of sequences in the context phase."""
        return 0 if self.seq_lens is None else int(self.context_lens.sum())

    @property
    def num_tokens(self) -> int:
        """This step's keys: the tokens of all sequences, or in cross attention those that `seq_lens_kv`
        counts."""
        return 0 if self.seq_lens is None else int(self.seq_lens_kv.sum())

    @property
    def is_cross(self) -> bool:
        """Whether this is the metadata of cross attention."""
        return self.seq_lens is not self.seq_lens_kv

    @property
    def has_cross_sub_metadata(self) -> bool:
        """Whether `cross` is metadata of cross attention that belongs to this."""
        return self.cross is not None and self.cross is not self

    @property
    def uses_cache(self) -> bool:
        """Whether K and V are kept by the cache manager."""
        params = self.kv_cache_params
        return self.kv_cache_manager is not None and (params is None or params.use_cache)

    @property
    def step(self) -> Step:
        """The batch on the device. Raises ValueError if `prepare` was not called for it."""
        if self._step is None:
            raise ValueError(
                "the metadata is not prepared for its batch: call prepare() after setting seq_lens, "
                "num_contexts or seq_lens_kv, and before forward"
            )
        return self._step

    def prepare(self) -> None:
        """Loads the batch that the fields describe to the device, without waiting for it.

        Under a CUDA graph it fills the tensors that the graph was captured on, so call it before a replay.
        Raises ValueError for a batch that breaks the rules, such as one with a generation before a context; the
        batch before it stays loaded then.
        """
        numbers = self._checked_numbers()
        blocks: Sequence[Sequence[int]] | torch.Tensor | None = None
        num_blocks: Sequence[int] | None = None
        if self.uses_cache:
            blocks, num_blocks = self._blocks()
            page_size = getattr(self.kv_cache_manager, "tokens_per_block", None)
            if isinstance(page_size, int):
                check_blocks(numbers, num_blocks, page_size)
        self._step = Step(numbers, self.device, blocks, num_blocks, self._room)
        self.plans = StepPlans()

    def prepare_encoder_only(self) -> None:
        """Loads a batch of an encoder, as `prepare`."""
        self.prepare()

    prepare_for_spec_dec = not_carried_out("prepare_for_spec_dec", _DRAFTS)
    restore_from_spec_dec = not_carried_out("restore_from_spec_dec", _DRAFTS)
    update_spec_dec_param = not_carried_out("update_spec_dec_param", _DRAFTS)
    update_for_spec_dec = not_carried_out("update_for_spec_dec", _DRAFTS)
    on_update_kv_lens = not_carried_out("on_update_kv_lens", _DRAFTS)
    update_helix_param = not_carried_out(
        "update_helix_param", "a sequence's K/V lies on one rank; split the heads between ranks instead"
    )

    def create_cuda_graph_metadata(
        self,
        max_batch_size: int,
        sub_cross_metadata: bool = False,
        max_draft_tokens: int = 0,
        buffers: Any = None,
        encode_only: bool = False,
    ) -> Self:
        """Makes metadata whose tensors never move, for a CUDA graph of `max_batch_size` sequences. Metadata
        that is one already is returned as it is.

        Its sequences are generations of up to `1 + max_draft_tokens` tokens. With `encode_only`, `seq_lens` are
        free, of up to `max_num_tokens` in all, and the caller sets `num_contexts`. `sub_cross_metadata`: it
        belongs to other metadata, whose `seq_lens` it shares. Raises ValueError for a batch size below 1.
        """
        if self.is_cuda_graph:
            return self
        if max_batch_size < 1 or max_draft_tokens < 0:
            raise ValueError(
                f"a CUDA graph of {max_batch_size} sequences with {max_draft_tokens} draft tokens; there is at "
                "least one sequence, and 0 draft tokens or more"
            )
        made = copy.copy(self)
        made._forget()
        made.is_cuda_graph = True
        made.cuda_graph_buffers = buffers
        num_tokens = self.max_num_tokens if encode_only else max_batch_size * (1 + max_draft_tokens)
        only_decodes = not (encode_only or max_draft_tokens)
        max_blocks = self._most_blocks() if self.uses_cache else 1
        made._room = StaticRoom(max_batch_size, num_tokens, max_blocks, only_decodes)
        if self.has_cross_sub_metadata:
            assert self.cross is not None
            made.cross = self.cross.create_cuda_graph_metadata(
                max_batch_size, True, max_draft_tokens, buffers, encode_only
            )
        for name in ("_seq_lens_cuda", "_seq_lens_kv_cuda"):
            if not (sub_cross_metadata and name == "_seq_lens_cuda"):
                made.__dict__.pop(name, None)
        if not sub_cross_metadata:
            tokens = 1 if encode_only else 1 + max_draft_tokens
            made.seq_lens = torch.full((max_batch_size,), tokens, dtype=torch.int32)
        if self.is_cross:
            made.seq_lens_kv = torch.zeros(max_batch_size, dtype=torch.int32)
            made.cross = made
        if not encode_only:
            made.num_contexts = 0
        return made

    def create_cross_metadata(
        self,
        encoder_seq_lens: Sequence[int],
        cross_kv_cache_manager: Any = None,
        encoder_num_cached_tokens_per_seq: Sequence[int] | None = None,
    ) -> Self:
        """Makes the metadata of cross attention for the sequences of this one, which is the decoder's. It is
        not stored in `cross`, and has to be prepared by itself.

        `encoder_seq_lens`: the encoder's tokens whose K and V this step brings: all in a sequence's first step,
        0 later. `cross_kv_cache_manager`: where they are kept; None: nowhere, so each step brings them.
        `encoder_num_cached_tokens_per_seq`: those that are kept already; None for 0.
        """
        made = copy.copy(self)
        made._forget()
        made.__dict__.pop("_seq_lens_kv_cuda", None)
        made.cross = None
        if self._room is not None:
            room = self._room
            made.kv_cache_manager = cross_kv_cache_manager
            max_blocks = 1 if cross_kv_cache_manager is None else made._most_blocks()
            made._room = StaticRoom(room.num_sequences, room.num_tokens, max_blocks, room.only_decodes)
        self._fill_cross(made, encoder_seq_lens, cross_kv_cache_manager, encoder_num_cached_tokens_per_seq)
        made.cross = made
        return made

    def update_cross_metadata(
        self,
        encoder_seq_lens: Sequence[int],
        cross_kv_cache_manager: Any,
        encoder_num_cached_tokens_per_seq: Sequence[int] | None = None,
    ) -> "AttentionMetadata":
        """Gives `cross` the sequences of this metadata and other numbers, as `create_cross_metadata`, and
        returns it. Its tensors do not move under a CUDA graph. Raises RuntimeError if there is none."""
        if not self.has_cross_sub_metadata:
            raise RuntimeError("there is no metadata of cross attention to update; set cross first")
        assert self.cross is not None
        self._fill_cross(
            self.cross, encoder_seq_lens, cross_kv_cache_manager, encoder_num_cached_tokens_per_seq
        )
        return self.cross

    def buffers(self, layer_idx: int) -> tuple[torch.Tensor, str]:
        """Returns the cache manager's blocks of a layer and their layout: `kv_layout` if `get_buffers` names
        that parameter, else NHD, the only layout of managers of the older form. Where `get_buffers` takes
        `**kwargs`, it may pass the layout on or ignore it; asked for NHD it returns NHD either way."""
        get_buffers = self.kv_cache_manager.get_buffers
        parameters = inspect.signature(get_buffers).parameters
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        if "kv_layout" in parameters:
            return get_buffers(layer_idx, kv_layout=self.kv_layout), self.kv_layout
        if takes_any:
            return get_buffers(layer_idx, kv_layout="NHD"), "NHD"
        return get_buffers(layer_idx), "NHD"

    def _fill_cross(
        self,
        made: "AttentionMetadata",
        encoder_seq_lens: Sequence[int],
        manager: Any,
        cached: Sequence[int] | None,
    ) -> None:
        made.kv_cache_manager = manager
        made.__dict__["_seq_lens"] = self.seq_lens
        made.__dict__["_seq_lens_cuda"] = self.seq_lens_cuda
        made.seq_lens_kv = torch.tensor(list(encoder_seq_lens), dtype=torch.int32)
        made.prompt_lens, made.request_ids = self.prompt_lens, self.request_ids
        made.num_contexts = self.num_contexts
        base = self.kv_cache_params
        made.kv_cache_params = KVCacheParams(
            use_cache=manager is not None if base is None else base.use_cache,
            num_cached_tokens_per_seq=[0] * len(made.seq_lens_kv) if cached is None else list(cached),
        )

    def _most_blocks(self) -> int:
        """Returns how many blocks a sequence can have."""
        most = getattr(self.kv_cache_manager, "max_blocks_per_seq", None)
        return int(most) if isinstance(most, int) else len(self.buffers(0)[0])

    def _blocks(self) -> tuple[Sequence[Sequence[int]] | torch.Tensor, Sequence[int]]:
        """Returns the blocks of each sequence, as lists or as a table on the device, and how many each has."""
        params, manager = self.kv_cache_params, self.kv_cache_manager
        given = None if params is None else params.block_ids_per_seq
        if given is None:
            if self.request_ids is None or len(self.request_ids) != self.num_seqs:
                raise ValueError(
                    f"request_ids {self.request_ids} of {self.num_seqs} sequences: give one each, by which the "
                    "cache manager finds their blocks"
                )
            if hasattr(manager, "block_table"):
                table: tuple[torch.Tensor, list[int]] = manager.block_table(self.request_ids)
                return table
            given = manager.get_batch_cache_indices(self.request_ids)
        blocks = [list(one) for one in given]
        if len(blocks) != self.num_seqs:
            raise ValueError(f"the blocks of {len(blocks)} sequences in a batch of {self.num_seqs}")
        return blocks, [len(one) for one in blocks]

    def _checked_numbers(self) -> BatchNumbers:
        """Returns the batch's numbers. Raises ValueError where they break the rules."""
        for holder, unsupported in ((self, _UNSUPPORTED), (self.kv_cache_params, _UNSUPPORTED_PARAMS)):
            for name, default in unsupported.items():
                value = getattr(holder, name, default)
                if not is_default(value, default):
                    raise ValueError(
                        f"{name} is {value!r}, and lightkv's attention does not read it; leave it at {default}"
                    )
        if self.seq_lens is None:
            raise ValueError("seq_lens is not set: give the tokens of each sequence, int [batch_size]")
        q_lens, kv_lens = (
            np.array(lens.tolist(), dtype=np.int64) for lens in (self.seq_lens, self.seq_lens_kv)
        )
        most = self.max_num_sequences or self.max_num_requests
        num_sequences, num_tokens = len(q_lens), int(q_lens.sum())
        if num_sequences > most or num_tokens > self.max_num_tokens:
            raise ValueError(
                f"{num_sequences} sequences of {num_tokens} tokens; this metadata takes {most} of "
                f"{self.max_num_tokens}: split the batch, or make it larger"
            )
        if len(kv_lens) != num_sequences or (q_lens < 1).any() or (kv_lens < 0).any():
            raise ValueError(
                f"seq_lens {q_lens.tolist()} and seq_lens_kv {kv_lens.tolist()}: give one each for a sequence, "
                "with at least one query"
            )
        if not 0 <= self.num_contexts <= num_sequences:
            raise ValueError(f"num_contexts is {self.num_contexts}, in a batch of {num_sequences} sequences")
        cached = np.zeros(num_sequences, dtype=np.int64)
        if self.uses_cache:
            params = self.kv_cache_params
            if params is None or len(params.num_cached_tokens_per_seq) != num_sequences:
                raise ValueError(
                    f"kv_cache_params is {params} for {num_sequences} sequences: with a cache manager, it "
                    "has to give the cached tokens of each"
                )
            cached[:] = params.num_cached_tokens_per_seq
        numbers = BatchNumbers(q_lens, kv_lens, cached, self.num_contexts)
        if self._room is not None:
            self._check_room(numbers, self._room)
        if not self.is_cross:
            self._check_order(numbers)
        return numbers

    def _check_room(self, numbers: BatchNumbers, room: StaticRoom) -> None:
        """Raises ValueError if a CUDA graph has no room for the batch."""
        if (
            len(numbers.q_lens) != room.num_sequences
            or numbers.num_queries > room.num_tokens
            or (room.only_decodes and (numbers.num_prefills or numbers.num_queries != room.num_sequences))
        ):
            shape = "one token each" if room.only_decodes else f"{room.num_tokens} tokens in all"
            raise ValueError(
                f"seq_lens {numbers.q_lens.tolist()} with {self.num_contexts} contexts; the CUDA graph is of "
                f"{room.num_sequences} sequences of {shape}: create_cuda_graph_metadata takes max_draft_tokens "
                "and encode_only for others"
            )
        if self.is_cross and self.uses_cache and numbers.num_keys:
            raise ValueError(
                f"{numbers.num_keys} new keys of an encoder under a CUDA graph: cache them in an eager step "
                "first, and give encoder_seq_lens of 0"
            )

    def _check_order(self, numbers: BatchNumbers) -> None:
        """Raises ValueError for a generation before a context, as far as the numbers show one."""
        remedy = "put all contexts before all generations, and let num_contexts count them"
        cached, q_lens = numbers.cached.tolist(), numbers.q_lens.tolist()
        prompts = self.prompt_lens if self.uses_cache else None
        if prompts is not None and len(prompts) == len(cached):
            for number in range(self.num_contexts):
                if cached[number] >= prompts[number]:
                    raise ValueError(
                        f"sequence {number} is one of {self.num_contexts} contexts, but {cached[number]} "
                        f"tokens of its prompt of {prompts[number]} are cached, so it is a generation: {remedy}"
                    )
        drafts = self.is_cuda_graph or getattr(self.runtime_features, "has_speculative_draft_tokens", False)
        for number in range(self.num_contexts, len(cached)):
            if q_lens[number] > 1 and not drafts:
                raise ValueError(
                    f"sequence {number} comes after {self.num_contexts} contexts and has {q_lens[number]} "
                    f"tokens, and a generation has one: {remedy}; or, if these are draft tokens, set "
                    "runtime_features.has_speculative_draft_tokens"
                )


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
