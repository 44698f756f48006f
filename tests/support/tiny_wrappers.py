"""Makes a tiny text half of every wrapper in transformers, and runs it on lightkv.

Towers keep their published sizes where a test names no smaller ones: they are built on the meta device alone.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from lightkv.errors import UnsupportedModel
from lightkv.router.model.loader import load_model
from lightkv.router.model.loading.text_half import is_wrapper, text_half
from lightkv.router.model.model_config import load_supported_config
from tests.support.tiny_architectures import MORE, SIZES, VOCABULARY, answers, own_answers, prompts

CPU = torch.device("cpu")
# Fields of a wrapper's text model, or of the wrapper itself, for which the sizes do not fit together.
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
TEXT: dict[str, dict[str, Any]] = {
    "cosmos3_edge_text": {"rope_parameters": _MROPE},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": _MROPE | {"mrope_section": [1, 1, 2]},
    },
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
    "gemma4_unified_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
    "glm4v_moe_text": {
        "rope_parameters": _MROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
    },
    "glm4v_text": {"rope_parameters": _MROPE},
    "glm_ocr_text": {"rope_parameters": _MROPE},
    "hunyuan_vl_text": {"rope_parameters": _MROPE},
    "moshi": {"sliding_window": 128},  # its context, as published
    "paddleocr_vl_text": {"rope_parameters": _MROPE},
    "qwen2_5_omni_text": {"rope_parameters": _MROPE},
    "qwen2_5_vl_text": {"rope_parameters": _MROPE},
    "qwen2_vl_text": {"rope_parameters": _MROPE},
}
# The sizes of these depend on each other. Each is refused before it is built.
LARGE = {"dots3_note_text", "gemma4_assistant", "gemma4_unified_assistant", "glm5_next_text"}
WHOLE: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 16}},
    "chameleon": {"vocabulary_map": {"<image>": 90, "IMGIMGAZ": 91}},
    "emu3": {"vocabulary_map": {"<image>": 90, "<|visual token 000000|>": 91}},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 32, "intermediate_size": 8}},
    "gemma4": {
        "vision_config": {"model_type": "gemma4_vision"},
        "audio_config": {"model_type": "gemma4_audio"},
    },
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "4/8"},
    "granite_docling": {"vision_config": {"out_hidden_size": 32}},
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
    "muse_spark": {"audio_config": {"out_hidden_size": 32}},
    "kyutai_speech_to_text": {"audio_pad_token_id": 96},
    "perception_lm": {"vision_config": {"model_type": "timm_wrapper", "model_args": {"embed_dim": 16}}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 90},
    "qwen3_omni_moe": {
        "talker_config": {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": 16}}
    },
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 90},
}

# Of towers, by the names that configurations use.
TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model"), 16),
    **dict.fromkeys(
        ("intermediate_size", "encoder_ffn_dim", "projector_input_dim", "projector_output_dim"), 16
    ),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    "out_hidden_size": 32,  # that of the text model
    "vision_output_dim": 16,
    "global_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
# Whole wrappers of these are small enough to be made: the families that matter, and the ways of naming weights.
FAMILIES = (
    "aya_vision",
    "gemma3",
    "gemma4",
    "glm4v",
    "idefics3",
    "internvl",
    "llama4",
    "llava",
    "mistral3",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "voxtral",
)


def whole_wrapper(model_type: str, **text: Any) -> PreTrainedModel:
    """Returns a float32 wrapper of one of FAMILIES with tiny towers, and random weights that are large enough
    for its answers to vary. `text`: fields of its text model."""
    kind = CONFIG_MAPPING[model_type]
    towers: dict[str, Any] = {}
    for name in kind.sub_configs:
        named = WHOLE.get(model_type, {}).get(name) or getattr(kind(), name).to_dict()
        tower = CONFIG_MAPPING[named["model_type"]]
        if name != "text_config":
            known = getattr(tower, "__dataclass_fields__", ())
            sizes = {field: value for field, value in TOWER.items() if field in known}
            towers[name] = {"model_type": named["model_type"]} | sizes
    config = tiny_wrapper(model_type, towers, text)
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval().requires_grad_(False)


def wrapper_cases() -> list[str]:
    """Returns the model types of all wrappers, in order."""
    kinds = {*MODEL_FOR_MULTIMODAL_LM_MAPPING, *filter(is_wrapper, MODEL_FOR_CAUSAL_LM_MAPPING)}
    return sorted(kind.model_type for kind in kinds if wrapper_name(kind.model_type))


def wrapper_name(model_type: str) -> str:
    """Returns the name of the class that transformers makes of a wrapper's configuration; "" for none."""
    kind = CONFIG_MAPPING[model_type]
    for mapping in (MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if kind in mapping:
            return str(mapping[kind].__name__)
    return ""


def tiny_wrapper(
    model_type: str,
    fields: Mapping[str, Any] = MappingProxyType({}),
    text: Mapping[str, Any] = MappingProxyType({}),
) -> PreTrainedConfig:
    """Returns a configuration of a wrapper whose text model has four small layers.

    `fields` of the wrapper, and those of its `text` model, take precedence.
    """
    kind = CONFIG_MAPPING[model_type]
    own: dict[str, Any] = WHOLE.get(model_type, {}) | MORE.get(model_type, {}) | dict(fields)
    name = next((one for one in ("text_config",) if one in kind.sub_configs), None)
    if name is None:
        config = kind(**(_sizes(kind) | TEXT.get(model_type, {}) | own | dict(text)))
    else:
        given = own.pop(name, {})
        text_type = given.get("model_type") or getattr(kind(), name).model_type
        sizes = _sizes(CONFIG_MAPPING[text_type]) | MORE.get(text_type, {}) | TEXT.get(text_type, {})
        config = kind(**own, **{name: {"model_type": text_type} | sizes | given | dict(text)})
    config.architectures = [wrapper_name(model_type)]
    return config


def _sizes(kind: Any) -> dict[str, Any]:
    known = set() if kind.model_type in LARGE else set(getattr(kind, "__dataclass_fields__", ()))
    return {name: value for name, value in SIZES.items() if name in known}


def wrapper_outcome(model_type: str, directory: Path) -> str | None:
    """Returns why lightkv refuses the wrapper, or None if its text runs; its answers then have to be those that
    the wrapper generates itself."""
    config = tiny_wrapper(model_type)
    config.save_pretrained(directory)
    for name in ("model.safetensors", "tokenizer.json"):
        (directory / name).touch()
    try:
        load_supported_config(directory)
    except UnsupportedModel as error:
        return error.reason
    save_random(config, directory)
    ours = answers(load_model(directory, CPU, "auto", lambda line: None), prompts(), prefill_chunk=16)
    own = own_answers(load_model(directory, CPU, "auto", lambda line: None), prompts())
    assert ours == own, model_type
    return None


def save_random(config: PreTrainedConfig, directory: Path) -> None:
    """Saves random weights of the text half of `config`, large enough for its answers to vary."""
    with torch.device("meta"):
        model = text_half(config).model_class.from_config(config, dtype=torch.float32)
    torch.manual_seed(0)
    tensors = {}
    for name, parameter in model.named_parameters():
        std = 0.2 if parameter.dim() >= 2 else 0.1
        tensors[name] = torch.randn(parameter.shape) * std + (parameter.dim() < 2)
    tensors |= {
        name: torch.zeros(one.shape)
        for name, one in model.state_dict().items()
        if name not in tensors and name not in model.all_tied_weights_keys
    }
    save_file(tensors, str(directory / "model.safetensors"), {"format": "pt"})
