"""Finds out which K/V an encoder-decoder's decoder caches, by running it once over one token."""

from collections.abc import Iterator

import torch
from transformers import Cache, EncoderDecoderCache, PreTrainedModel
from transformers.generation import GenerationMixin

from lightkv.errors import UnsupportedModel
from lightkv.integrations.model.context import cache_name
from lightkv.integrations.model.model_shape import RecordingLayer, evaluated
from lightkv.memory.kv_spec import KVSpec
from lightkv.triton_kernels.quantised.kv_format import KVFormat

_NUM_COLUMNS = 3  # of the encoder's output


def probe_encoder_decoder(model: PreTrainedModel, kv_format: KVFormat) -> KVSpec:
    """Returns the K/V of one token of `model`, which is the same for its text and for its encoder's output.

    The decoder runs once over one token and an encoder output of zeros; the model stays as it was. Raises
    UnsupportedModel where a layer does not cache K and V of both once, or not in one shape, or where the
    model's `generate` makes caches in its own way, as T5Gemma's, and ValueError for a format that does not fit.
    """
    name, usual = type(model).__name__, GenerationMixin._prepare_cache_for_generation
    if getattr(type(model), "_prepare_cache_for_generation", usual) is not usual:
        raise UnsupportedModel(name, "its generate puts a cache of its own in place of the encoder output's")
    own, cross = (Cache(layer_class_to_replicate=RecordingLayer) for _ in range(2))
    try:
        decoder = model.get_decoder()
        hidden_size = model.get_encoder().config.hidden_size
        hidden = torch.zeros(1, _NUM_COLUMNS, hidden_size, dtype=model.dtype, device=model.device)
        with evaluated(decoder), torch.no_grad():
            decoder(
                input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device),
                encoder_hidden_states=hidden,
                use_cache=True,
                **{cache_name(decoder): EncoderDecoderCache(own, cross)},
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UnsupportedModel(name, f"its decoder fails when it is probed alone ({said})") from error
    if not own.layers or len(own.layers) != len(cross.layers):
        numbers = f"{len(own.layers)} and {len(cross.layers)}"
        reason = f"{numbers} of its layers cache K/V of their text and of the encoder's output"
        raise UnsupportedModel(name, reason)
    found = {
        call for half, columns in ((own, 1), (cross, _NUM_COLUMNS)) for call in _calls(name, half, columns)
    }
    if len(found) > 1:
        shown = sorted(map(str, found))
        raise UnsupportedModel(name, f"its layers' K/V differ: (KV heads, K dim, V dim, type) {shown}")
    ((num_heads, k_dim, v_dim, dtype),) = found
    return KVSpec(len(own.layers), num_heads, k_dim, v_dim, dtype, kv_format)


def _calls(name: str, half: Cache, num_columns: int) -> Iterator[tuple[int, int, int, torch.dtype]]:
    """Returns the heads, dims and type of what each layer was given. Raises UnsupportedModel for anything but
    K and V of `num_columns` columns, given once."""
    for layer_idx, layer in enumerate(half.layers):
        assert isinstance(layer, RecordingLayer)
        shapes = [(tuple(k.shape), tuple(v.shape)) for k, v in layer.calls]
        if len(shapes) != 1 or any(len(one) != 4 or one[2] != num_columns for one in shapes[0]):
            raise UnsupportedModel(name, f"layer {layer_idx} caches {shapes} of {num_columns} columns")
        ((k, v),) = layer.calls
        if k.shape[1] != v.shape[1] or k.dtype != v.dtype:
            reason = f"layer {layer_idx} caches K and V of {shapes[0]}, {k.dtype} and {v.dtype}"
            raise UnsupportedModel(name, reason)
        yield k.shape[1], k.shape[3], v.shape[3], k.dtype
