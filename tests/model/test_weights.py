"""Tests of router/model/model_config.py and loader.py: models are refused or loaded; random models are made."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.common.random_model import random_model
from lightkv.errors import UnsupportedModel
from lightkv.router.model import loader
from lightkv.router.model.loader import ModelTooLarge, load_model
from lightkv.router.model.model_config import check_supported, position_limit
from lightkv.router.model_files import UnreadableWeights, resolve
from tests.support.tiny_files import save_tiny, tiny_config

CPU = torch.device("cpu")


@pytest.fixture
def tiny_dir(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny")


@pytest.fixture
def lines() -> list[str]:
    return []


# Supported and refused models

SUPPORTED = [
    "Llama", "Mistral", "Ministral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma", "Gemma2", "Gemma3Text",
    "Phi", "Phi3", "Olmo2", "Olmo3", "SmolLM3", "Granite", "Cohere2", "Glm4", "Starcoder2", "GPTNeoX", "GPT2",
    "OPT", "GptOss", "Gemma3nText", "Llama4Text", "Bloom", "Falcon", "GPTJ", "GPTNeo", "Mpt", "Nemotron",
    "StableLm", "Gemma3", "Llava", "BioGpt", "CodeGen", "XGLM", "Bamba", "FalconH1",
    "GraniteMoeHybrid", "Lfm2", "Lfm2Vl", "MiniMax", "NemotronH", "OlmoHybrid", "Qwen3Next", "Qwen3_5",
    "Zamba2",
]  # fmt: skip
UNSUPPORTED = {
    "T5": "encoder-decoder",
    "Bart": "encoder-decoder",
    "Bert": "encoder",
    "Roberta": "encoder",
    "ViT": "not a causal language model",
    "DeepseekV3": "latent",
    "Mamba": "Mamba-1",
    "RecurrentGemma": "RG-LRU",
    "KimiLinear": "KDA",
    "Zaya": "CCA",
    "PaliGemma": "in both directions",
    "CpmAnt": "AttentionInterface",
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported(name: str) -> None:
    check_supported(getattr(transformers, f"{name}Config")())


@pytest.mark.parametrize(("name", "reason"), UNSUPPORTED.items(), ids=UNSUPPORTED.keys())
def test_unsupported(name: str, reason: str) -> None:
    config = getattr(transformers, f"{name}Config")()
    config.architectures = [f"{name}ForSomething" if name in {"ViT", "Bart"} else f"{name}ForCausalLM"]
    with pytest.raises(UnsupportedModel, match=reason) as raised:
        check_supported(config)
    assert raised.value.architecture == config.architectures[0]
    assert config.architectures[0] in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["full_attention", "conv"]}, "layers of type conv"),
        ({"kv_lora_rank": 8}, "latent"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
    ],
    ids=["conv", "latent", "bidirectional", "classifier"],
)
def test_fields_that_make_a_llama_unsupported(changes: dict[str, Any], reason: str) -> None:
    config = tiny_config()
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModel, match=reason):
        check_supported(config)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LIMITS = {
    "default": (tiny_config(), None),
    "yarn": (tiny_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}), None),
    "learned": (transformers.GPT2Config(), None),
    "dynamic": (tiny_config(rope_parameters=dict(DYNAMIC)), 128),
    "dynamic-old-style": (tiny_config(rope_scaling={"type": "dynamic", "factor": 2.0}), 128),
    "longrope": (tiny_config(rope_parameters=LONG | {"original_max_position_embeddings": 32}), 32),
    "longrope-alone": (tiny_config(rope_parameters=dict(LONG)), 128),
    "phi3": (
        transformers.Phi3Config(
            hidden_size=32,
            num_attention_heads=4,
            max_position_embeddings=128,
            original_max_position_embeddings=64,
            rope_parameters=dict(LONG),
        ),
        64,
    ),
    "by-layer": (
        transformers.Gemma3TextConfig(
            head_dim=8,
            max_position_embeddings=128,
            rope_parameters={
                "full_attention": LONG | {"original_max_position_embeddings": 48},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        48,
    ),
}


@pytest.mark.parametrize(("config", "limit"), LIMITS.values(), ids=LIMITS.keys())
def test_position_limit(config: Any, limit: int | None) -> None:
    assert position_limit(config) == limit


def test_unknown_architecture(tiny_dir: Path, lines: list[str]) -> None:
    config = json.loads((tiny_dir / "config.json").read_text())
    config |= {
        "model_type": "novel",
        "architectures": ["NovelForCausalLM"],
        "auto_map": {"AutoConfig": "novel.Novel"},
    }
    (tiny_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"NovelForCausalLM.*does not know 'novel'.*never run"):
        load_model(tiny_dir, CPU, "auto", lines.append)


# Loading


def test_loads_what_was_saved(tiny_dir: Path, lines: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    model = load_model(tiny_dir, CPU, "auto", lines.append)
    saved = load_file(tiny_dir / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved[name])
        assert not parameter.requires_grad
    assert not model.training
    assert "loading 0.00 GB" in lines[0]
    assert "loaded LlamaForCausalLM" in lines[-1]
    assert capfd.readouterr() == ("", "")  # transformers shows neither progress bars nor warnings


def test_loads_in_the_dtype_asked_for(tiny_dir: Path, lines: list[str]) -> None:
    assert load_model(tiny_dir, CPU, torch.float16, lines.append).dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
def test_too_large_is_refused_before_it_is_loaded(
    tiny_dir: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    parameters = load_model(tiny_dir, CPU, dtype, lines.append).parameters()
    needed = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    monkeypatch.setattr(loader, "_memory", lambda device: (needed, 10 * needed))
    load_model(tiny_dir, CPU, dtype, lines.append)  # fits exactly
    monkeypatch.setattr(loader, "_memory", lambda device: (needed - 1, 10 * needed))
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("was loaded"))
    with pytest.raises(ModelTooLarge, match=r"tiny: .* GB of weights do not fit"):
        load_model(tiny_dir, CPU, dtype, lines.append)


def test_the_meta_device_holds_any_model(
    tiny_dir: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_memory", lambda device: (0, 0))
    assert load_model(tiny_dir, torch.device("meta"), "auto", lines.append).device.type == "meta"


def test_bytes_once_loaded() -> None:
    stored = Counter({"F64": 80, "BF16": 20, "I64": 8, "F8_E4M3": 3})
    assert (
        loader._loaded_bytes(stored, 4) == 40 + 40 + 8 + 3
    )  # types that loading does not cast keep their size


def test_memory_of_the_cpu() -> None:
    free, total = loader._memory(CPU)
    assert 0 < free <= total


def test_loads_shards(tiny_dir: Path, lines: list[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    (tiny_dir / "model.safetensors").unlink()
    model.save_pretrained(tiny_dir, max_shard_size="20KB")
    assert len(list(tiny_dir.glob("*.safetensors"))) > 2
    loaded = load_model(resolve(str(tiny_dir), lines.append), CPU, "auto", lines.append)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)


INDEXES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "weight_map-alone": lambda index: {"weight_map": index["weight_map"]},
    "null": lambda index: index | {"metadata": None},
    "list": lambda index: index | {"metadata": [1]},
    "text": lambda index: index | {"metadata": "bf16"},
    "number": lambda index: index | {"metadata": 12},
    "empty": lambda index: index | {"metadata": {}},
    "odd-size": lambda index: index | {"metadata": {"total_size": "large"}},
    "other-fields": lambda index: {"format": "pt", "version": 2, "weight_map": index["weight_map"]},
    "unknown-tensor": lambda index: {
        "weight_map": index["weight_map"] | {"x": "model-00001-of-00003.safetensors"}
    },
    "a-tensor-for-each-shard": lambda index: {
        "weight_map": {shard: shard for shard in index["weight_map"].values()}
    },
    "names-the-wrong-shards": lambda index: {
        "weight_map": dict(zip(index["weight_map"], reversed(index["weight_map"].values()), strict=True))
    },
}


@pytest.mark.parametrize("changed", INDEXES.values(), ids=INDEXES.keys())
def test_an_index_of_shards_needs_their_names_alone(
    tiny_dir: Path, lines: list[str], changed: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Converters and merging tools write indexes without `metadata`, or with one of their own."""
    weights = load_file(tiny_dir / "model.safetensors")
    (tiny_dir / "model.safetensors").unlink()
    place = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(weights)}
    for shard in set(place.values()):
        part = {name: weights[name] for name in weights if place[name] == shard}
        save_file(part, tiny_dir / shard)
    path = tiny_dir / "model.safetensors.index.json"
    path.write_text(json.dumps(changed({"metadata": {"total_size": 1}, "weight_map": place})))
    before = path.read_text()
    loaded = load_model(resolve(str(tiny_dir), lines.append), CPU, "auto", lines.append)
    for name, weight in weights.items():
        assert torch.equal(loaded.get_parameter(name), weight)
    assert path.read_text() == before


def test_tied_weights_are_not_missing(tmp_path: Path, lines: list[str]) -> None:
    random_model(tiny_config(tie_word_embeddings=True), CPU, torch.float32).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load_model(tmp_path, CPU, "auto", lines.append)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[:-1], "not a whole safetensors file .*file not fully covered"),
        (lambda data: data + b"x", "not a whole safetensors file .*file not fully covered"),
        (lambda data: data[:100], "not a whole safetensors file"),
        (lambda data: b"", "not a whole safetensors file"),
        (lambda data: bytes(len(data)), "not a whole safetensors file"),
        (lambda data: data[:8] + b"[" + data[9:], "not a whole safetensors file"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "Git-LFS pointer"),
    ],
    ids=["a-byte-short", "a-byte-long", "no-tensors", "empty", "zeros", "broken-header", "lfs-pointer"],
)
def test_damaged_file(tiny_dir: Path, lines: list[str], damage: Callable[[bytes], bytes], says: str) -> None:
    path = tiny_dir / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UnreadableWeights, match=says) as raised:
        load_model(tiny_dir, CPU, "auto", lines.append)
    assert "\n" not in str(raised.value)
    assert "replace it" in str(raised.value)


def test_missing_tensor(tiny_dir: Path, lines: list[str]) -> None:
    path = tiny_dir / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UnreadableWeights, match=r"lacks 1 of .* model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(tiny_dir, CPU, "auto", lines.append)


def test_tensor_of_another_shape(tiny_dir: Path, lines: list[str]) -> None:
    path = tiny_dir / "model.safetensors"
    save_file(load_file(path) | {"model.norm.weight": torch.ones(7)}, path, metadata={"format": "pt"})
    with pytest.raises(UnreadableWeights, match=r"model\.norm\.weight first, have another shape"):
        load_model(tiny_dir, CPU, "auto", lines.append)


def test_an_unknown_tensor_is_reported(tiny_dir: Path, lines: list[str]) -> None:
    path = tiny_dir / "model.safetensors"
    save_file(load_file(path) | {"extra": torch.ones(7)}, path, metadata={"format": "pt"})
    load_model(tiny_dir, CPU, "auto", lines.append)
    assert any("left out 1 tensors" in line and "extra" in line for line in lines)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model_type": "llama", "hidden_size": "wide"}'])
def test_damaged_configuration(tiny_dir: Path, lines: list[str], content: str) -> None:
    (tiny_dir / "config.json").write_text(content)
    with pytest.raises(UnreadableWeights, match=r"config\.json") as raised:
        load_model(tiny_dir, CPU, "auto", lines.append)
    assert "\n" not in str(raised.value)


OTHER_FILES = [
    "index.safetensors.index.json",
    "adapter_model.bin",
    "model.safetensors",
    "../tiny/x.safetensors",
    5,
    "",
]


@pytest.mark.parametrize("name", OTHER_FILES)
def test_a_configuration_cannot_name_the_file_of_weights(tiny_dir: Path, lines: list[str], name: Any) -> None:
    weights_file = tiny_dir / "model.safetensors"
    (tiny_dir.parent / "secret.safetensors").write_bytes(weights_file.read_bytes())
    secret = dict.fromkeys(load_file(weights_file), "../secret.safetensors")
    (tiny_dir / "index.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": secret}))
    (tiny_dir / "adapter_model.bin").write_bytes(b"a pickle, for all that its name says")
    (tiny_dir / "x.safetensors").write_bytes(weights_file.read_bytes())
    path = tiny_dir / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"transformers_weights": name}))
    with pytest.raises(UnreadableWeights, match=r"config\.json: .*transformers_weights") as raised:
        load_model(tiny_dir, CPU, "auto", lines.append)
    assert "\n" not in str(raised.value)
    renamed = {"attribute_map": {"transformers_weights": "alias"}, "alias": name}
    path.write_text(json.dumps(config | renamed))
    with pytest.raises(UnreadableWeights, match=r"config\.json: .*transformers_weights"):
        load_model(tiny_dir, CPU, "auto", lines.append)
    path.write_text(json.dumps(config | {"transformers_weights": None}))
    load_model(tiny_dir, CPU, "auto", lines.append)
    (tiny_dir / "adapter_config.json").write_text("{}")
    with pytest.raises(UnreadableWeights, match=r"holds an adapter_config\.json; merge the adapter"):
        load_model(tiny_dir, CPU, "auto", lines.append)


@pytest.mark.parametrize(
    ("device", "declared", "stored", "expected"),
    [
        ("cpu", torch.bfloat16, {"BF16"}, torch.float32),
        ("cuda", torch.bfloat16, {"BF16"}, torch.bfloat16),
        ("cuda", torch.float16, {"F16"}, torch.float16),
        ("cuda", None, {"F16"}, torch.float16),
        ("cuda", torch.float32, {"F32"}, torch.bfloat16),
        ("cuda", None, {"F32", "F16"}, torch.bfloat16),
    ],
)
def test_auto_dtype(
    device: str, declared: torch.dtype | None, stored: set[str], expected: torch.dtype
) -> None:
    assert loader._auto_dtype(torch.device(device), declared, stored) == expected


# Random weights

RANDOM = {
    "llama": tiny_config(rope_parameters={"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0}),
    "tied": tiny_config(tie_word_embeddings=True),
    "qwen2-biases": transformers.Qwen2Config(**{**tiny_config().to_dict(), "model_type": "qwen2"}),
    "gemma2-scale": transformers.Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    ),
    "gpt2": transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}  # fmt: skip


@pytest.mark.parametrize("config", RANDOM.values(), ids=RANDOM.keys())
def test_random_model_has_the_shape_of_a_real_one(config: Any, device: torch.device) -> None:
    torch.manual_seed(0)
    model = random_model(config, device, torch.float32)
    real = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    assert shapes == {name: (tensor.shape, tensor.dtype) for name, tensor in real.state_dict().items()}
    assert all(parameter.device.type == device.type for parameter in model.parameters())
    buffers = dict(model.named_buffers())
    for name, buffer in real.named_buffers():
        assert torch.equal(buffers[name].cpu(), buffer), name
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in real.parameters()
    )  # ties kept
    logits = model(torch.arange(1, 21, device=device)[None]).logits
    assert torch.isfinite(logits).all()
    assert 0.1 < logits.std() < 10.0


def test_random_model_is_repeatable() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(7)
        models.append(random_model(tiny_config(), CPU, torch.float16))
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert one.dtype == torch.float16
        assert torch.equal(one, other)


def test_random_model_of_an_unsupported_architecture() -> None:
    with pytest.raises(UnsupportedModel):
        random_model(transformers.T5Config(), CPU, torch.float32)


@pytest.mark.gpu
def test_loads_onto_the_gpu(tiny_dir: Path, lines: list[str]) -> None:
    model = load_model(tiny_dir, torch.device("cuda"), "auto", lines.append)
    saved = load_file(tiny_dir / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert parameter.is_cuda
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.cpu(), saved[name].bfloat16())
    assert all(buffer.is_cuda for buffer in model.buffers())
