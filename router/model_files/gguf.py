"""Writes the default model's GGUF file as Hugging Face files.

Only the llama layout of GGUF with SmolLM's tokenizer is supported.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .files import DEFAULT_MODEL_REMEDY, UnreadableWeights

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens


def write_llama(source: Path, directory: Path) -> None:
    """Writes the llama GGUF at `source` as Hugging Face files into `directory`.

    The weights become float32: no 16-bit type holds every value of Q4_1 (float16 scale · 4 bits + float16
    minimum) and Q8_0 (float16 scale · 8 bits). transformers reads GGUF too, but needs torch and 20 s, and
    drops the "smollm" pre-tokenizer's rule that each digit is a token of its own.

    Raises UnreadableWeights if `source` cannot be read, OSError or a library's error if `directory` cannot be
    written, and other errors if the file is not a GGUF, or not of this kind.
    """
    try:
        reader = GGUFReader(source)
    except OSError as error:
        raise UnreadableWeights(source, f"cannot be read ({error})", DEFAULT_MODEL_REMEDY) from error

    def value(name: str) -> Any:
        return reader.fields[name].contents()

    kind = [value(name) for name in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")]
    if kind != ["llama", "gpt2", "smollm"]:
        raise ValueError(f"architecture, tokenizer and pre-tokenizer are {kind}")

    num_heads = value("llama.attention.head_count")
    num_kv_heads = value("llama.attention.head_count_kv")
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        name, weight = _llama_weight(tensor.name, weight, num_heads, num_kv_heads)
        tensors[name] = np.ascontiguousarray(weight, dtype=np.float32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    tokens = value("tokenizer.ggml.tokens")
    ids = {
        "bos": value("tokenizer.ggml.bos_token_id"),
        "eos": value("tokenizer.ggml.eos_token_id"),
        "pad": value("tokenizer.ggml.padding_token_id"),
        "unk": value("tokenizer.ggml.unknown_token_id"),
    }
    max_length = value("llama.context_length")
    hidden_size = value("llama.embedding_length")
    generation_config = {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "dtype": "float32",
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": value("llama.feed_forward_length"),
        "max_position_embeddings": max_length,
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": value("llama.block_count"),
        "num_key_value_heads": num_kv_heads,
        # GGUF holds a float32; this is its shortest decimal, 1e-05.
        "rms_norm_eps": float(str(np.float32(value("llama.attention.layer_norm_rms_epsilon")))),
        "rope_parameters": {"rope_theta": value("llama.rope.freq_base"), "rope_type": "default"},
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "vocab_size": len(tokens),
        **generation_config,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": value("tokenizer.chat_template"),
        **{f"{name}_token": tokens[token_id] for name, token_id in ids.items()},
    }
    for file, content in (
        ("config.json", config),
        ("generation_config.json", generation_config),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (directory / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    token_types = value("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, token_types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer = _smollm_tokenizer(tokens, value("tokenizer.ggml.merges"), special)
    tokenizer.save(str(directory / "tokenizer.json"))


def _llama_weight(name: str, weight: np.ndarray, num_heads: int, num_kv_heads: int) -> tuple[str, np.ndarray]:
    part, _, rest = name.partition(".")
    if part != "blk":
        return f"{_OTHER_NAMES[part]}.weight", weight
    layer_idx, layer_name, _ = rest.split(".")
    if layer_name in ("attn_q", "attn_k"):
        # GGUF stores the two elements of a rotary pair side by side, Hugging Face in the two halves of a head.
        heads = num_heads if layer_name == "attn_q" else num_kv_heads
        weight = weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
    return f"model.layers.{layer_idx}.{_LAYER_NAMES[layer_name]}.weight", weight


def _smollm_tokenizer(tokens: list[str], merges: list[str], special: list[str]) -> Tokenizer:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE({token: token_id for token_id, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer
