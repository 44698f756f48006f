"""Reads a model's config.json and decides, before any weight is read, whether lightkv can run the model."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    __version__,
)
from transformers.utils import logging

from lightkv.errors import LightKVError, UnsupportedModel
from lightkv.integrations.model.adapters.adapt import FAMILIES, adapt
from lightkv.integrations.model.context import first_position
from lightkv.integrations.model.mixers.mixer import UNKNOWN, has_mixers
from lightkv.integrations.model.probe import NeedsNumbers, probe
from lightkv.router.model.loading.text_half import is_wrapper, text_half, wrapper_class
from lightkv.router.model_files import (
    UnreadableWeights,
    in_line,
    one_line,
    read_json,
    require_whole,
    stored_tensors,
    weight_files,
)

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # names used by configurations
_TOWER_COUNTS = ("decoder_layers", "encoder_layers", "depth")  # of which a model may also have none
_MAX_LAYERS = 10_000
_MOST_IN_A_BYTE = 4  # parameters: no format that loads has weights of fewer than two bits
_PREFIX_MODELS = {"paligemma"}  # wrappers whose processor has a prompt read in both directions
_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}  # of layers
_OTHER_TYPES = {"conv", "hybrid", "linear_attention", "mlp", "moe"}  # of layers of models that keep states
_MAY_DIFFER = {"head_dim", "num_key_value_heads"}  # fields that may differ by layer: the probe reads neither


def load_config(directory: Path) -> PreTrainedConfig:
    """Returns the configuration in `directory`.

    Raises:
        UnreadableWeights: config.json is missing or damaged.
        UnsupportedModel: the installed transformers does not know the architecture.
    """
    path = directory / "config.json"
    try:
        raw = read_json(path)
        model_type = raw["model_type"]
        architecture = (raw.get("architectures") or [model_type])[0]
        if not isinstance(model_type, str) or not isinstance(architecture, str):
            raise TypeError(f"model_type {model_type!r} and architectures {architecture!r} have to be names")
        # transformers writes out some fields for every layer; a wrong number would use up all memory.
        for fields in _objects(raw):
            wrong = [name for name in _LAYER_COUNTS if not _is_layer_count(fields.get(name))]
            wrong += [
                name for name in _TOWER_COUNTS if type(n := fields.get(name)) is int and n > _MAX_LAYERS
            ]
            if wrong:
                raise ValueError(f"{wrong[0]} is {fields[wrong[0]]!r}, and can be 1 to {_MAX_LAYERS}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnreadableWeights(path, f"is not a model configuration ({one_line(error)})") from error
    if model_type not in CONFIG_MAPPING:
        hint = " (code that comes with a model is never run)" if "auto_map" in raw else ""
        reason = f"transformers {__version__} does not know {model_type[:100]!r}{hint}"
        raise UnsupportedModel(in_line(architecture), reason)
    # The hub's validators raise errors of their own for a field out of range.
    with refusing(path, "is refused by transformers"), quiet_transformers():
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    # transformers would load the file named here, even a pickle, instead of those that `weight_files` returns.
    # The field is read from the configuration, as transformers does: an attribute_map can rename it.
    if getattr(config, "transformers_weights", None) is not None:
        raise UnreadableWeights(
            path, "names a file of weights (transformers_weights), which lightkv never follows"
        )
    # Where peft is installed, transformers would load an adapter that nothing here checks.
    if (directory / "adapter_config.json").is_file():
        remedy = "merge the adapter into its base model and give that, or delete the file"
        raise UnreadableWeights(directory, "holds an adapter_config.json", remedy)
    return config


def check_supported(config: PreTrainedConfig) -> None:
    """Raises UnsupportedModel for an architecture that lightkv's attention cannot run. Reads no weights.

    Of a wrapper (`text_half`), the text model is checked.
    """
    named = getattr(config, "architectures", None) or []
    wraps = is_wrapper(config)
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if known else None
    if wraps:
        model_class = wrapper_class(config)
    own_name = getattr(model_class, "__name__", config.model_type)
    architecture = named[0] if named else own_name

    def refuse(reason: str) -> NoReturn:
        raise UnsupportedModel(in_line(architecture), in_line(reason))

    # This check comes first: transformers raises when a field that differs by layer is read.
    if other := (getattr(config, "per_layer_attributes", None) or set()) - _MAY_DIFFER:
        refuse(f"its layers differ in {', '.join(sorted(other))}")
    # The configuration of a checkpoint of BART's decoder alone, say, is that of both halves.
    is_named = named[:1] == [own_name] and architecture.endswith("ForCausalLM")
    is_decoder_half = config.is_encoder_decoder and is_named and not getattr(config, "sub_configs", {})
    if config.is_encoder_decoder and not is_decoder_half:
        refuse("it is an encoder-decoder")
    if re.search(r"For(?!CausalLM)[A-Z]\w*$", architecture) and not (wraps and architecture == own_name):
        refuse("it is not a causal language model")
    if model_class is None:
        refuse("transformers has no causal language model of this type")
    if wraps and config.model_type in _PREFIX_MODELS:
        refuse("it reads a prompt in both directions, and counts its positions from 1")
    is_encoder = getattr(config, "is_decoder", None) is False and hasattr(config, "add_cross_attention")
    if is_encoder and not is_decoder_half:
        refuse("it is an encoder")
    # In BigBird-Pegasus, which has two numbers of layers, that is the encoder's attention.
    if getattr(config, "attention_type", None) == "block_sparse" and not hasattr(config, "decoder_layers"):
        refuse("its attention is over blocks (attention_type is block_sparse, and has to be original_full)")
    if hasattr(config, "default_language"):
        refuse("it computes a text with the adapters of its language, and a request names none")
    text = config.get_text_config()
    if text.is_encoder_decoder and not is_decoder_half:
        refuse("its text model is an encoder-decoder")
    if kind := UNKNOWN.get(text.model_type):
        refuse(f"some of its layers keep a state that is not computed here: {kind}")
    _check_text(text, refuse)
    keeps_known = has_mixers(text)
    if getattr(model_class, "_is_stateful", False) and not keeps_known:
        refuse("some of its layers keep a state that is not computed here")
    layer_types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    if other := set(layer_types) - (_ATTENTION_TYPES | _OTHER_TYPES if keeps_known else _ATTENTION_TYPES):
        refuse(f"it has layers of type {', '.join(sorted(other))}")
    is_known = wraps or getattr(model_class, "__name__", "") in FAMILIES
    # Some classes whose attention is looked up lack the first of these names.
    if not (
        is_known or model_class._supports_attention_backend or model_class._can_set_attn_implementation()
    ):
        code = "its transformers code does not support other attention functions (AttentionInterface)"
        refuse(f"{code}, and lightkv has no adapter for it")


def _check_text(text: PreTrainedConfig, refuse: Callable[[str], NoReturn]) -> None:
    """Calls `refuse` for a configuration of a text model whose attention lightkv cannot run."""
    if other := (getattr(text, "per_layer_attributes", None) or set()) - _MAY_DIFFER:
        refuse(f"its layers differ in {', '.join(sorted(other))}")
    if getattr(text, "use_bidirectional_attention", None) not in (None, False, "vision"):  # text is causal
        refuse("its attention is bidirectional")
    if getattr(text, "kv_lora_rank", None):
        refuse("its attention is latent (kv_lora_rank)")
    if hasattr(text, "keep_window_size"):
        refuse("its scores get a bias by key, computed from V, which would have to be kept beside K and V")
    if (getattr(text, "num_kv_shared_layers", None) or 0) >= getattr(text, "num_hidden_layers", 1):
        refuse("it drafts for another model: all of its layers read that model's K/V")


def load_checked_config(directory: Path) -> PreTrainedConfig:
    """Returns the configuration in `directory` once `check_supported` and `position_limit` have accepted it.

    Raises UnsupportedModel, and UnreadableWeights for a damaged file or a field of a wrong type.
    """
    config = load_config(directory)
    with refusing(directory / "config.json", "has a field of a wrong type"):
        check_supported(config)
        if not isinstance(config.get_text_config(), PreTrainedConfig):
            raise TypeError("the field of the text model's configuration holds something else")
        position_limit(config)
    return config


def load_supported_config(directory: Path) -> PreTrainedConfig:
    """Returns the configuration in `directory` after every check that needs no weights.

    The model is built on the meta device, which takes no memory, and probed there. A difference that shows only
    in computed numbers is found when the loaded model is probed. The presence of the other files is checked
    last, so that a model which cannot run is refused for its architecture first.

    Raises:
        UnsupportedModel: see `check_supported` and `probe`.
        UnreadableWeights: config.json is damaged, or `directory` lacks a file.
    """
    config = load_checked_config(directory)
    with refusing(directory / "config.json", "describes no model that can be made"), quiet_transformers():
        half = text_half(config) if is_wrapper(config) else None
        model_class = AutoModelForCausalLM if half is None else half.model_class
        # In bfloat16: on the meta device, products over experts exist in 16 bits only.
        with torch.device("meta"):
            model = model_class.from_config(config, dtype=torch.bfloat16)
    skips_padding = any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())
    if skips_padding and not first_position(config):
        raise UnsupportedModel(type(model).__name__, "it does not count a text's positions from 0")
    with suppress(NeedsNumbers), quiet_transformers():
        adapt(model)
        probe(model)
    require_whole(directory)
    _require_bits(directory, model)
    return config


def _require_bits(directory: Path, model: PreTrainedModel) -> None:
    """Raises UnreadableWeights if the files in `directory` have too few bytes for the parameters of `model`:
    transformers would make those that are missing, of the sizes that config.json says."""
    files = [directory / name for name in weight_files(directory)]
    stored = sum(file.stat().st_size for file in files)
    needed = model.num_parameters() // _MOST_IN_A_BYTE
    if 0 < stored < needed:  # an empty file is refused where it is read
        for file in files:
            stored_tensors(file)  # a damaged one says what it is
        what = (
            f"describes {model.num_parameters():,} parameters, and the files of weights have {stored:,} bytes"
        )
        raise UnreadableWeights(directory / "config.json", what)


def position_limit(config: PreTrainedConfig) -> int | None:
    """Returns how many positions have a rotary embedding that depends on the token's own position alone.

    None means that the embedding never depends on other tokens. `config`: as `load_config` returns it.

    transformers' `dynamic` and `longrope` embeddings take their frequencies from the highest position of the
    whole batch (modeling_rope_utils.dynamic_rope_update): a request that passes the limit would change what
    is computed for every other request. `dynamic` does so from max_position_embeddings on, whatever the
    original length is; `longrope` does so from original_max_position_embeddings on.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    limits: list[int] = []
    # The parameters are those of all layers, or hold a dictionary for each type of layer.
    for rope in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        rope_type = rope.get("rope_type", "default")
        if not isinstance(rope_type, str):
            raise TypeError(f"rope_type is {rope_type!r}, and has to be a name")
        if "dynamic" in rope_type:
            limits.append(text.max_position_embeddings)
        elif rope_type == "longrope":
            limits.append(rope["original_max_position_embeddings"])
    if wrong := [limit for limit in limits if type(limit) is not int or limit < 1]:
        raise ValueError(f"the rotary embedding is for {wrong[0]!r} positions")
    return min(limits, default=None)


@contextmanager
def refusing(path: Path, what: str) -> Iterator[None]:
    """Raises UnreadableWeights, which says `what` of `path`, for an error that transformers' code raises in the
    block: a field of a wrong type fails wherever the model's code first uses it."""
    try:
        yield
    except (LightKVError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnreadableWeights(path, f"{what} ({one_line(error)})") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' warnings and progress bars: lightkv reports progress itself."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def _objects(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a configuration and those within it, of the parts of a model."""
    found = [value]
    while found:
        fields = found.pop()
        yield fields
        found += [part for part in fields.values() if isinstance(part, dict)]


def _is_layer_count(value: Any) -> bool:
    return value is None or (type(value) is int and 1 <= value <= _MAX_LAYERS)
