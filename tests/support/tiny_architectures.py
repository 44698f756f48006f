"""Makes a tiny configuration of every causal language model in transformers, and runs it on lightkv."""

import random
from array import array
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from lightkv.errors import UnsupportedModel
from lightkv.integrations.model.context import first_position
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.model.build import assemble
from lightkv.router.model.loading.text_half import is_wrapper
from lightkv.router.model.model_config import load_supported_config

VOCABULARY = 96

# By the names that configurations use. Each configuration gets the fields that it has.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size",), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "hidden_dim", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "dff", "ffn_hidden_size", "decoder_ffn_dim"), 48
    ),
    **dict.fromkeys(
        ("intermediate_size_mlp", "moe_intermediate_size", "shared_expert_intermediate_size"), 16
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads",), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "v_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_layer"),
        4,
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("linear_num_key_heads", "mamba_n_groups", "mamba_ngroups", "n_groups"), 2),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "mamba_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "mamba_chunk_size"), 8),
    **dict.fromkeys(("linear_value_head_dim", "mamba_d_state", "ssm_state_size"), 12),
    "mamba_d_ssm": 64,
    "shared_intermediate_size": 24,
    # Not as many layers and heads as in the decoder. With fewer layers, transformers' own cache fails.
    "encoder_layers": 5,
    "encoder_attention_heads": 2,
    "decoder_layers": 4,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# Fields for models for which these sizes do not fit together, or which differ from their published defaults.
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    # Where the embeddings are tied, these repeat a token.
    **{name: {"tie_word_embeddings": False} for name in ("biogpt", "openai-gpt", "xglm")},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
    },
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "gpt_neo": {"num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8},
    "gpt_oss": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4,
        }
    },
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "residual_multiplier": 0.5,
        "position_embedding_type": "rope",
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    # Queries of the last layer are scaled by another factor every 4 tokens.
    "llama4_text": {"attention_chunk_size": 8, "floor_scale": 4},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "phimoe": {"sliding_window": None},
    # Two blocks with their own adapters, of which the first is in the second and the last layer.
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", *["hybrid"] * 3, "linear_attention", "hybrid"],
        "num_mem_blocks": 2,
        "num_key_value_heads": 4,
        "adapter_rank": 4,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
    },
    "zaya": {"num_experts_per_tok": 1},
}
# These keep their own sizes, since their fields depend on each other. Each is refused before it is built.
LARGE = {"dots3_note_text", "gemma4_assistant"}


FULL = ["full_attention"] * 4
# Models whose outcome depends on a field of their configuration.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "big_bird": {"is_decoder with original_full": {"is_decoder": True, "attention_type": "original_full"}},
    "falcon_h1": {
        "mamba_rms_norm": {
            "mamba_rms_norm": True,
            "ssm_in_multiplier": 1.2,
            "ssm_multipliers": [0.5, 2.0, 0.7, 1.3, 0.9],
            "mlp_multipliers": [0.8, 1.2],
        }
    },
    "granitemoehybrid": {"no experts": {"num_local_experts": 0, "position_embedding_type": "nope"}},
    "falcon": {
        "alibi": {"alibi": True, "multi_query": False, "parallel_attn": False},
        "new_decoder_architecture": {"new_decoder_architecture": True, "num_kv_heads": 2},
    },
    "llama4_text": {"full attention only": {"layer_types": FULL, "no_rope_layers": [1, 1, 1, 0]}},
    "lfm2": {"full attention only": {"layer_types": FULL}},
    "phimoe": {"sliding_window": {"sliding_window": 8}},
}
NUM_NEW = 8  # tokens of each answer


def cases() -> list[tuple[str, str]]:
    """Returns the model type and the variant ("" for none) of every case, in order, without wrappers."""
    found = []
    kinds = [config for config in MODEL_FOR_CAUSAL_LM_MAPPING if not is_wrapper(config)]
    for name in sorted({config.model_type for config in kinds}):
        found += [(name, ""), *((name, variant) for variant in VARIANTS.get(name, {}))]
        kind = CONFIG_MAPPING[name]
        fields = getattr(kind, "__dataclass_fields__", {})
        is_encoder = {"is_decoder", "add_cross_attention"} <= fields.keys() and not fields[
            "is_decoder"
        ].default
        if is_encoder and not kind.is_encoder_decoder:
            found.append((name, "is_decoder"))
    return found


def tiny(
    model_type: str, variant: str = "", fields: Mapping[str, Any] = MappingProxyType({})
) -> PreTrainedConfig:
    """Returns a configuration of this type with four small layers, where `fields` say nothing else."""
    kind = CONFIG_MAPPING[model_type]
    known = set(getattr(kind, "__dataclass_fields__", ()))
    sizes = {name: value for name, value in SIZES.items() if name in known and model_type not in LARGE}
    sizes |= MORE.get(model_type, {}) | VARIANTS.get(model_type, {}).get(variant, {})
    if variant == "is_decoder":
        sizes["is_decoder"] = True
    config = kind(**(sizes | dict(fields)))
    config.architectures = [architecture(model_type)]
    return config


def architecture(model_type: str) -> str:
    """Returns the name of the class that transformers makes of a configuration."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    return (found[0] if isinstance(found, tuple) else found).__name__


def outcome(model_type: str, variant: str, directory: Path) -> str | None:
    """Returns why lightkv refuses the model, or None if it runs; its answers then have to be transformers'."""
    config = tiny(model_type, variant)
    config.save_pretrained(directory)
    for name in ("model.safetensors", "tokenizer.json"):
        (directory / name).touch()  # these files have to exist, but are not read
    try:
        load_supported_config(directory)
    except UnsupportedModel as error:
        return error.reason
    ours = answers(random_weights(config), prompts(), prefill_chunk=16)
    assert ours == own_answers(random_weights(tiny(model_type, variant)), prompts()), (
        f"{model_type} {variant}"
    )
    return None


def random_weights(config: PreTrainedConfig) -> PreTrainedModel:
    """Makes a model whose weights are large enough for its answers to vary, and the same for equal `config`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
        elif name.endswith("sinks"):  # about as large as scores, and another for each head
            torch.nn.init.normal_(parameter, std=2.0)
    return model.eval().requires_grad_(False)


def prompts() -> list[list[int]]:
    """Returns prompts of several lengths; the last shares a prefix with another one."""
    rng = random.Random(0)
    found = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (3, 21, 40, 9)]
    return [*found, found[2][:25] + found[0]]


def own_answers(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Returns what transformers generates greedily, one prompt at a time.

    RoBERTa and its kin are given the positions that they count themselves where they are given none: `generate`
    would count from 0. Qwen-Omni's thinkers run without a cache, with which Qwen3's gives other texts.
    """
    found, first = [], first_position(model.config)
    for prompt in prompts:
        ids = torch.tensor([prompt])
        positions = {"position_ids": torch.arange(first, first + len(prompt))[None]} if first else {}
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=not model.config.model_type.endswith("_thinker"),
            forced_eos_token_id=None,  # the last token would be BART's end of a text, whatever it computes
            **positions,
        )
        found.append(output[0, len(prompt) :].tolist())
    return found


def answers(
    model: PreTrainedModel, prompts: list[list[int]], prefill_chunk: int, fuse: bool = True
) -> list[list[int]]:
    """Returns what lightkv's engine generates greedily, all prompts at once, in chunks of `prefill_chunk`, on
    the model's device."""
    config = EngineConfig(
        device=str(model.device),
        dtype="float32",
        max_total_tokens=400,
        max_num_seqs=4,
        max_model_len=100,
        prefill_chunk=prefill_chunk,
        fuse=fuse,
    )
    runner, info = assemble(model, config, lambda line: None)
    engine = LocalEngine(make_scheduler(info), runner)
    for idx, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=NUM_NEW)
        engine.add(Request(str(idx), array("i", prompt).tobytes(), params, seed=0))
    found: list[list[int]] = [[] for _ in prompts]
    num_growing = len(prompts)
    while num_growing:
        for event in engine.step():
            if event.token is not None:
                found[int(event.request_id)].append(event.token)
            num_growing -= event.finish_reason is not None
    engine.check()
    return found
