"""The rules of TensorRT-LLM's batches, which metadata keep before they are loaded to the device."""

from typing import Any

import numpy as np

from .arguments import is_default
from .beams import Beams
from .step import BatchNumbers, StaticRoom

# Fields of features that lightkv's kernels do not have here, and the values that do not ask for these.
UNSUPPORTED = {
    "cu_q_seqlens": None,
    "cu_kv_seqlens": None,
    "multi_item_part_lens": None,
    "draft_kv_cache_manager": None,
    "sparse_metadata_params": None,
    "mamba_metadata": False,
    "enable_flash_mla": False,
    "enable_context_mla_with_cached_kv": False,
}
UNSUPPORTED_PARAMS = {
    "host_max_attention_window_sizes": None,
    "host_sink_token_length": None,
    "num_extra_kv_tokens": 0,
}


def checked_numbers(metadata: Any, room: StaticRoom | None) -> BatchNumbers:
    """Returns the numbers of the batch that the fields of `metadata`, an AttentionMetadata, describe, in the
    room of a CUDA graph. Raises ValueError where they break the rules; it reads no table of beams and no
    blocks."""
    for holder, unsupported in ((metadata, UNSUPPORTED), (metadata.kv_cache_params, UNSUPPORTED_PARAMS)):
        for name, default in unsupported.items():
            value = getattr(holder, name, default)
            if not is_default(value, default):
                raise ValueError(
                    f"{name} is {value!r}, and lightkv's attention does not read it; leave it at {default}"
                )
    if metadata.seq_lens is None:
        raise ValueError("seq_lens is not set: give the tokens of each sequence, int [batch_size]")
    q_lens, kv_lens = (
        np.array(lens.tolist(), dtype=np.int64) for lens in (metadata.seq_lens, metadata.seq_lens_kv)
    )
    num_sequences, num_contexts = len(q_lens), metadata.num_contexts
    if len(kv_lens) != num_sequences or (q_lens < 1).any() or (kv_lens < 0).any():
        raise ValueError(
            f"seq_lens {q_lens.tolist()} and seq_lens_kv {kv_lens.tolist()}: give one each for a sequence, "
            "with at least one query"
        )
    if not 0 <= num_contexts <= num_sequences:
        raise ValueError(f"num_contexts is {num_contexts}, in a batch of {num_sequences} sequences")
    beams = Beams.of(metadata.beam_width, num_contexts, num_sequences)
    _check_size(metadata, q_lens, beams)
    cached = np.zeros(num_sequences, dtype=np.int64)
    if metadata.uses_cache:
        params = metadata.kv_cache_params
        if params is None or len(params.num_cached_tokens_per_seq) != num_sequences:
            raise ValueError(
                f"kv_cache_params is {params} for {num_sequences} sequences: with a cache manager, it "
                "has to give the cached tokens of each"
            )
        cached[:] = params.num_cached_tokens_per_seq
        if (cached < 0).any():
            raise ValueError(
                f"num_cached_tokens_per_seq is {cached.tolist()}; a number of tokens is 0 or more"
            )
    numbers = BatchNumbers(q_lens, kv_lens, cached, num_contexts, beams)
    if room is not None:
        _check_room(metadata, numbers, room)
    if beams is not None and metadata.uses_cache:
        beams.check_lengths(q_lens, cached)
        prompts = metadata.prompt_lens
        if prompts is not None and len(prompts) != num_sequences:
            raise ValueError(
                f"prompt_lens {prompts} in a batch of {num_sequences} sequences with beams: give one for "
                "each sequence, so one for each beam, or None"
            )
    if not metadata.is_cross:
        _check_order(metadata, numbers)
    return numbers


def _check_size(metadata: Any, q_lens: np.ndarray, beams: Beams | None) -> None:
    """Raises ValueError for more sequences or tokens than the metadata takes."""
    widest = 1 if beams is None else int(beams.widths.max())
    most = metadata.max_num_sequences or metadata.max_num_requests * widest
    num_sequences, num_tokens = len(q_lens), int(q_lens.sum())
    if num_sequences > most or num_tokens > metadata.max_num_tokens:
        raise ValueError(
            f"{num_sequences} sequences of {num_tokens} tokens; this metadata takes {most} of "
            f"{metadata.max_num_tokens}: split the batch, or make it larger"
        )


def _check_room(metadata: Any, numbers: BatchNumbers, room: StaticRoom) -> None:
    """Raises ValueError if a CUDA graph has no room for the batch."""
    if (
        len(numbers.q_lens) != room.num_sequences
        or numbers.num_queries > room.num_tokens
        or (room.only_decodes and (numbers.num_prefills or numbers.num_queries != room.num_sequences))
    ):
        shape = "one token each" if room.only_decodes else f"{room.num_tokens} tokens in all"
        raise ValueError(
            f"seq_lens {numbers.q_lens.tolist()} with {numbers.num_contexts} contexts; the CUDA graph is of "
            f"{room.num_sequences} sequences of {shape}: create_cuda_graph_metadata takes max_draft_tokens "
            "and encode_only for others"
        )
    if metadata.is_cross and metadata.uses_cache and numbers.num_keys:
        raise ValueError(
            f"{numbers.num_keys} new keys of an encoder under a CUDA graph: cache them in an eager step "
            "first, and give encoder_seq_lens of 0"
        )


def _check_order(metadata: Any, numbers: BatchNumbers) -> None:
    """Raises ValueError for a generation before a context, as far as the numbers show one."""
    remedy = "put all contexts before all generations, and let num_contexts count them"
    cached, q_lens = numbers.cached.tolist(), numbers.q_lens.tolist()
    num_contexts = numbers.num_contexts
    prompts = metadata.prompt_lens if metadata.uses_cache else None
    if prompts is not None and len(prompts) == len(cached):
        for number in range(num_contexts):
            if cached[number] >= prompts[number]:
                raise ValueError(
                    f"sequence {number} is one of {num_contexts} contexts, but {cached[number]} "
                    f"tokens of its prompt of {prompts[number]} are cached, so it is a generation: {remedy}"
                )
    drafts = metadata.is_cuda_graph or getattr(
        metadata.runtime_features, "has_speculative_draft_tokens", False
    )
    for number in range(num_contexts, len(cached)):
        if q_lens[number] > 1 and not drafts:
            raise ValueError(
                f"sequence {number} comes after {num_contexts} contexts and has {q_lens[number]} "
                f"tokens, and a generation has one: {remedy}; or, if these are draft tokens, set "
                "runtime_features.has_speculative_draft_tokens"
            )
