"""TensorRT-LLM's metadata of a batch, which every layer's attention reads."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import torch

from lightkv.attention.step_plans import StepPlans

from .arguments import AttentionRuntimeFeatures, KVCacheParams
from .batch_rules import checked_numbers
from .beams import Beams
from .lengths import LengthsField, SequenceLengths
from .step import BatchNumbers, StaticRoom, Step, check_blocks, own_rows
from .upstream import not_carried_out

_DRAFTS = (
    "it changes a batch's lengths on the device between forward passes. Verify drafts with "
    "runtime_features.has_speculative_draft_tokens, in a line, and call prepare() with each pass's lengths"
)
_SEQ_LENS = LengthsField("_queries", "_queries")
_SEQ_LENS_KV = LengthsField("_keys", "_new_keys")


@dataclass(kw_only=True, eq=False)
class AttentionMetadata:
    """A batch's metadata, in TensorRT-LLM's words: sequences in the context phase come first, those in the
    generation phase follow, and their tokens are packed in that order.

    Set `seq_lens` (int `[B]` on the CPU: this step's tokens of each sequence), `num_contexts`, `request_ids`
    and `kv_cache_params`, then call `prepare`, once a step. `kv_cache_manager` is lightkv's `KVCacheManager`,
    or any with `get_buffers(layer_idx)` and `get_batch_cache_indices(request_ids)`; without one, or where
    `kv_cache_params.use_cache` is False, tokens attend to this step's tokens alone. `seq_lens_cuda` is the copy
    on the device, int32; under a CUDA graph (`create_cuda_graph_metadata`) it never moves.

    In beam search, `beam_width` tells how many sequences each request in the generation phase has: its beams,
    one after the other, each with one token in this step. It is one number for all of these requests, or one
    for each. `cache_indirection`, int32 `[requests in the generation phase or more, beams, positions]` on the
    device, tells which of the request's beams each beam reads K and V from at each position; `prepare` reads
    it. Positions of the prompt (`prompt_lens`) are read from the first beam, which computed them, and the
    newest token from the beam itself, whatever the table says there. `request_ids` has one number for a request
    then, where the cache manager knows beams (`KVCacheManager`), or one for each sequence. With a `beam_width`
    of 1 the table is not read.

    `seq_lens_kv` is set for cross attention alone: this step's new keys of each sequence, which are an
    encoder's. `num_tokens` counts the new keys then, as in TensorRT-LLM. Without beams, `prompt_lens` only
    serve to recognise sequences in the wrong order.

    Fields that are not named here are TensorRT-LLM's own, and are not read. `prepare` refuses those that ask
    for something (`batch_rules.UNSUPPORTED`). Its methods for drafts and for helix parallelism raise
    NotImplementedError.
    """

    _queries: SequenceLengths = field(init=False, repr=False, default_factory=SequenceLengths)
    _keys: SequenceLengths = field(init=False, repr=False, default_factory=SequenceLengths)
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
    seq_lens: Any = _SEQ_LENS
    num_contexts: int = 0
    position_ids: torch.Tensor | None = None
    kv_cache_params: KVCacheParams | None = None
    seq_lens_kv: Any = _SEQ_LENS_KV
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
    beam_width: int | Sequence[int] = 1
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
        self._step_of: tuple[int, int, int] | None = None  # the batch that it was made from
        self._room: StaticRoom | None = None
        self.plans = StepPlans()

    @property
    def device(self) -> torch.device:
        """The cache manager's device, where it says so; else the GPU, or the CPU where there is none."""
        device = getattr(self.kv_cache_manager, "device", None)
        if isinstance(device, torch.device):
            return device
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def seq_lens_cuda(self) -> torch.Tensor | None:
        """`seq_lens` on the device, int32 `[B]`."""
        return self._queries.on_device

    @property
    def seq_lens_kv_cuda(self) -> torch.Tensor | None:
        """`seq_lens_kv` on the device, int32 `[B]`."""
        return self._new_keys.on_device

    @property
    def _new_keys(self) -> SequenceLengths:
        """The lengths of this step's keys: the queries' own, where no other ones are set."""
        return self._queries if self._keys.host is None else self._keys

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
        if self._step is None or self._step_of != self._batch():
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
        numbers = checked_numbers(self, self._room)
        prompts = np.zeros_like(numbers.cached) if self.prompt_lens is None else np.array(self.prompt_lens)
        beam_rows = self._beam_rows(numbers)
        blocks: Sequence[Sequence[int]] | torch.Tensor | None = None
        num_blocks: Sequence[int] | None = None
        if self.uses_cache:
            blocks, num_blocks = self._blocks(numbers.beams)
            page_size = getattr(self.kv_cache_manager, "tokens_per_block", None)
            if isinstance(page_size, int):
                check_blocks(numbers, num_blocks, page_size)
        step = Step(numbers, self.device, blocks, num_blocks, self._room)
        if beam_rows is not None:
            written = beam_rows[:, : int(numbers.lengths.max())]
            step.beam_rows = beam_rows
            written.copy_(own_rows(len(written), written.shape[1], self.device))
            if numbers.beams is not None:
                assert self.cache_indirection is not None
                numbers.beams.rows(self.cache_indirection, numbers.cached, prompts, written)
        if self._room is not None and self._room.reads_beams is None:
            self._room.reads_beams = beam_rows is not None
        self._step, self._step_of = step, self._batch()
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
        made._keys = SequenceLengths()
        if not sub_cross_metadata:
            made._queries = SequenceLengths()
            tokens = 1 if encode_only else 1 + max_draft_tokens
            made.seq_lens = torch.full((max_batch_size,), tokens, dtype=torch.int32)
        if self.is_cross:
            made.seq_lens_kv = torch.zeros(max_batch_size, dtype=torch.int32)
            made.cross = made
        elif self.cross is not None:
            made.cross = self.cross.create_cuda_graph_metadata(
                max_batch_size, True, max_draft_tokens, buffers, encode_only
            )
            made.cross._queries = made._queries
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
        `encoder_num_cached_tokens_per_seq`: those that are kept already; None for 0. Each has a number for each
        sequence. In beam search all beams of a request read the same keys, so its one number in `request_ids`
        may be that of a request with one beam.

        Raises ValueError for other numbers than there are sequences.
        """
        made = copy.copy(self)
        made._forget()
        made._keys = SequenceLengths()
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
        returns it. Its tensors do not move under a CUDA graph. Raises RuntimeError if there is none, and
        ValueError for other numbers than there are sequences, with nothing changed."""
        if not self.has_cross_sub_metadata:
            raise RuntimeError("there is no metadata of cross attention to update; set cross first")
        assert self.cross is not None
        self._fill_cross(
            self.cross, encoder_seq_lens, cross_kv_cache_manager, encoder_num_cached_tokens_per_seq
        )
        return self.cross

    def _batch(self) -> tuple[int, int, int]:
        """Returns what tells this batch from others that were set."""
        return self._queries.version, self._keys.version, self.num_contexts

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
        new = torch.tensor(list(encoder_seq_lens), dtype=torch.int32)
        kept = [0] * len(new) if cached is None else list(cached)
        if self.seq_lens is not None and not len(new) == len(kept) == self.num_seqs:
            raise ValueError(
                f"encoder_seq_lens {new.tolist()} and {kept} cached tokens of an encoder, in a batch of "
                f"{self.num_seqs} sequences: give one each"
            )
        made.kv_cache_manager = manager
        made._queries = self._queries  # sequences are the same ones, so their lengths are held once
        made.seq_lens_kv = new
        made.prompt_lens, made.request_ids = self.prompt_lens, self.request_ids
        made.num_contexts, made.beam_width = self.num_contexts, self.beam_width
        base = self.kv_cache_params
        made.kv_cache_params = KVCacheParams(
            use_cache=manager is not None if base is None else base.use_cache,
            num_cached_tokens_per_seq=kept,
        )

    def _most_blocks(self) -> int:
        """Returns how many blocks a sequence can have."""
        most = getattr(self.kv_cache_manager, "max_blocks_per_seq", None)
        return int(most) if isinstance(most, int) else len(self.buffers(0)[0])

    def _beam_rows(self, numbers: BatchNumbers) -> torch.Tensor | None:
        """Returns room for `Step.beam_rows`; None for a batch that needs none. Raises ValueError for a table of
        beams that does not fit the batch."""
        room, table = self._room, self.cache_indirection
        if self.is_cross or not self.uses_cache:  # all beams of a request read the same keys
            return None
        longest, most = int(numbers.lengths.max()), 0
        if numbers.beams is not None:
            if room is not None and room.reads_beams is False:
                raise ValueError(
                    f"beam_width is {self.beam_width} in metadata of a CUDA graph whose first batch had one "
                    "beam for each request: make other metadata by create_cuda_graph_metadata, and "
                    "capture on them"
                )
            numbers.beams.check_table(table, numbers.cached, self.device)
            assert table is not None
            most = table.shape[2] + 1  # a beam's newest token needs no place in the table
        if room is None:
            is_read = numbers.beams is not None
            return own_rows(len(numbers.q_lens), longest, self.device) if is_read else None
        reads_beams = numbers.beams is not None if room.reads_beams is None else room.reads_beams
        return room.beam_rows(longest, most, self.device) if reads_beams else None

    def _blocks(self, beams: Beams | None) -> tuple[Sequence[Sequence[int]] | torch.Tensor, Sequence[int]]:
        """Returns the blocks of each sequence, as lists or as a table on the device, and how many each has."""
        params, manager = self.kv_cache_params, self.kv_cache_manager
        given = None if params is None else params.block_ids_per_seq
        if given is None:
            widths = [1] * self.num_seqs
            if beams is not None and len(self.request_ids or ()) == len(beams.widths_of_requests):
                widths = beams.widths_of_requests
            if self.request_ids is None or len(self.request_ids) != len(widths):
                raise ValueError(
                    f"request_ids {self.request_ids} of {self.num_seqs} sequences: give one each, by which the "
                    "cache manager finds their blocks; or one for all beams of a request"
                )
            if hasattr(manager, "block_table"):
                table: tuple[torch.Tensor, list[int]] = manager.block_table(self.request_ids, widths)
                return table
            if max(widths) > 1 and not self.is_cross:
                raise ValueError(
                    f"request_ids {self.request_ids} of requests with {widths} beams, and the cache manager "
                    "gives the blocks of one: give those of each beam as block_ids_per_seq of kv_cache_params"
                )
            found = manager.get_batch_cache_indices(self.request_ids)
            given = [one for one, width in zip(found, widths, strict=True) for _ in range(width)]
        blocks = [list(one) for one in given]
        if len(blocks) != self.num_seqs:
            raise ValueError(f"the blocks of {len(blocks)} sequences in a batch of {self.num_seqs}")
        return blocks, [len(one) for one in blocks]
