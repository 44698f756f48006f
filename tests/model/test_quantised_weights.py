"""Tests of models whose weights are stored in 8 or 4 bits (router/model/loading/quantised_layers.py,
lightkv/integrations/weights/). The checkpoints are written by the published layouts of their formats."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from bench.common.quantised_checkpoint import FORMATS, save_mxfp4, save_quantised
from lightkv.errors import UnsupportedModel
from lightkv.integrations.model.linears import size_of
from lightkv.integrations.weights.config import weight_format
from lightkv.integrations.weights.experts import QuantisedExperts
from lightkv.integrations.weights.fp8 import Fp8Format
from lightkv.integrations.weights.quantised import CannotDivide, QuantisedWeight
from lightkv.integrations.weights.weight_part import WeightPart
from lightkv.router import EngineConfig
from lightkv.router.model import loader
from lightkv.router.model.info import model_info
from lightkv.router.model.loader import load_model
from lightkv.router.model_files import UnreadableWeights
from tests.support.combinations import slow_cases
from tests.support.tiny_architectures import answers, own_answers, prompts, random_weights, tiny
from tests.support.tiny_wrappers import whole_wrapper

pytestmark = pytest.mark.usefixtures("one_thread")
CPU, META = torch.device("cpu"), torch.device("meta")
# Sizes of which each format has whole blocks, also of the parts of two ranks.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 128, "num_hidden_layers": 2}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "qwen3": {},
    "glm4_moe": {"moe_intermediate_size": 128, "first_k_dense_replace": 1},
    "qwen3_moe": {"moe_intermediate_size": 128, "mlp_only_layers": [0]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}
# Each format is read by `test_bytes_are_those_that_are_held`, too, and computed with alone.
CASES: list[Any] = [("llama", "fp8"), ("llama", "nvfp4"), ("qwen3_moe", "fp8"), ("lfm2", "fp8")]
CASES += [("olmo_hybrid", "awq")]
CASES += slow_cases(*[("llama", form) for form in FORMATS if form not in ("fp8", "nvfp4")])
CASES += slow_cases(("qwen3", "fp8"), ("olmo_hybrid", "fp8"), ("qwen3_moe", "w4a16"))
LEFT_OUT = ("lm_head", "gate", "a_proj", "b_proj")  # as small layers are in published checkpoints


def saved(directory: Path, form: str, family: str = "llama", **fields: Any) -> PreTrainedModel:
    """Saves a tiny model in a format, and returns the model of the weights that are stored, made dense."""
    model = random_weights(tiny(family, fields=SIZES | OF_FAMILY[family] | fields))
    save_quantised(model, directory, form, LEFT_OUT)
    return model


def loaded(directory: Path, **arguments: Any) -> PreTrainedModel:
    return load_model(directory, CPU, torch.float32, lambda line: None, **arguments)


def parts(model: PreTrainedModel) -> list[WeightPart]:
    return [module for module in model.modules() if isinstance(module, WeightPart)]


@pytest.mark.parametrize(("family", "form"), CASES)
def test_answers_are_those_of_the_dense_model(tmp_path: Path, family: str, form: str) -> None:
    dense = saved(tmp_path, form, family)
    own, model = own_answers(dense, prompts()), loaded(tmp_path)
    linears = [name for name, one in dense.named_modules() if type(one) is nn.Linear]
    assert len(parts(model)) == sum(not name.endswith(LEFT_OUT) for name in linears)
    experts = [
        one for module in model.modules() for one in vars(module).values() if type(one) is QuantisedExperts
    ]
    assert len(experts) == (2 if family == "qwen3_moe" else 0)
    assert answers(model, prompts(), prefill_chunk=16) == own
    assert any(part.of.shape[0] > part.out_features for part in parts(model))  # q, k and v as one product
    if form == "fp8":
        assert answers(loaded(tmp_path), prompts(), prefill_chunk=16, fuse=False) == own
    plain = loaded(tmp_path, dequantise=True)
    assert not parts(plain)
    for name, parameter in dense.named_parameters():
        torch.testing.assert_close(plain.get_parameter(name), parameter, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", FORMATS)
def test_a_weight_is_what_its_numbers_stand_for(form: str) -> None:
    written = FORMATS[form]
    found = []
    for n in (256, 384):
        stored = written.quantise(torch.randn(n, 512) * 0.1)
        weight = format_of(form).weight(stored.tensors, torch.randn(n), torch.float32)
        torch.testing.assert_close(weight.dense().double(), stored.dense, rtol=1e-6, atol=0)
        assert weight.nbytes < stored.dense.numel() * 1.3
        found.append(weight)
    joined = QuantisedWeight.join(found)
    assert joined is not None
    x = torch.randn(2, 3, 512)
    each = torch.cat([one.matmul(x) for one in found], -1)
    torch.testing.assert_close(joined.matmul(x), each)
    assert torch.equal(joined.dense(), torch.cat([one.dense() for one in found]))
    rows = joined.part(0, [(128, 128), (384, 128)])
    assert torch.equal(rows.dense(), torch.cat([joined.dense()[128:256], joined.dense()[384:512]]))
    columns = joined.part(1, [(128, 256)])
    assert torch.equal(columns.dense(), joined.dense()[:, 128:384])
    assert columns.bias is joined.bias
    assert torch.equal(rows.bias[128:], joined.bias[384:512])


def format_of(form: str) -> Any:
    config = tiny("llama")
    config.quantization_config = FORMATS[form].config
    return weight_format(config)


def test_parts_of_blocks_are_refused() -> None:
    tensors = FORMATS["fp8"].quantise(torch.randn(256, 320)).tensors
    weight = format_of("fp8").weight(tensors, None, torch.float32)
    assert weight.part(1, [(256, 64)]).shape == (256, 64)  # the last block is a smaller one
    for dim, span in ((0, (64, 128)), (1, (0, 160))):
        with pytest.raises(CannotDivide, match="for each 128 cannot be held by themselves; choose"):
            weight.part(dim, [span])


@pytest.mark.parametrize("form", FORMATS)
def test_bytes_are_those_that_are_held(tmp_path: Path, form: str) -> None:
    saved(tmp_path, form)
    lines: list[str] = []
    num_parameters, num_bytes = size_of(load_model(tmp_path, CPU, torch.float32, lines.append))
    config = EngineConfig(str(tmp_path), device="cpu", dtype="float32", max_total_tokens=40)
    info = model_info(config, tmp_path)
    assert (info["num_parameters"], info["weight_bytes"]) == (num_parameters, num_bytes)
    dense = list(loaded(tmp_path, dequantise=True).parameters())
    assert num_parameters == sum(parameter.numel() for parameter in dense)
    assert any("14 linear layers are in " in line and line.endswith("kept so") for line in lines)
    assert num_bytes < 0.55 * sum(parameter.nbytes for parameter in dense)


def test_the_text_half_of_a_wrapper_runs_quantised(tmp_path: Path) -> None:
    whole = whole_wrapper("qwen3_vl", **SIZES)
    save_quantised(whole, tmp_path, "fp8", LEFT_OUT)  # its tower, too, of which nothing is read
    model = loaded(tmp_path)
    assert len(parts(model)) == 2 * 7
    assert answers(model, prompts(), prefill_chunk=16) == own_answers(whole, prompts())


def test_experts_in_mxfp4_answer_as_the_dense_model(tmp_path: Path) -> None:
    dense = random_weights(tiny("gpt_oss", fields={"intermediate_size": 64}))
    save_mxfp4(dense, tmp_path)
    own, model = own_answers(dense, prompts()), loaded(tmp_path)
    names = [name for name, _ in dense.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
    assert len(names) == 2 * dense.config.num_hidden_layers
    for name in names:
        of, _, last = name.rpartition(".")
        one, parameter = getattr(model.get_submodule(of), last), dense.get_parameter(name)
        assert (type(one), one.shape) == (QuantisedExperts, parameter.shape)
        assert torch.equal(one.dense(), parameter)
        assert one.nbytes == parameter.numel() * (16 + 1) // 32
    assert answers(model, prompts(), prefill_chunk=16) == own
    assert answers(loaded(tmp_path, dequantise=True), prompts(), prefill_chunk=16) == own
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.experts.down_proj_scales"))
    with pytest.raises(
        UnreadableWeights, match=r"down_proj_scales is missing, and has to be U8 \[.* in MXFP4"
    ):
        loaded(tmp_path)


def test_experts_of_parts_of_blocks_run_dense_alone(tmp_path: Path) -> None:
    dense = saved(tmp_path, "fp8", "qwen3_moe", moe_intermediate_size=64)
    with pytest.raises(CannotDivide, match=r"experts of 64 outputs with a scale for each 128.*--dequantise"):
        load_model(tmp_path, META, torch.float32, lambda line: None)
    model = loaded(tmp_path, dequantise=True)
    assert answers(model, prompts(), prefill_chunk=16) == own_answers(dense, prompts())


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_info_counts_what_a_rank_holds_of_experts(tmp_path: Path, family: str) -> None:
    if family == "gpt_oss":
        save_mxfp4(random_weights(tiny("gpt_oss", fields={"intermediate_size": 64})), tmp_path)
    else:
        saved(tmp_path, "fp8", family, moe_intermediate_size=256)
    config = EngineConfig(str(tmp_path), device="cpu", dtype="float32", max_total_tokens=40)
    whole = model_info(config, tmp_path)
    half = model_info(replace(config, tensor_parallel=2), tmp_path)
    for name in ("num_parameters", "weight_bytes"):
        assert 0.5 * whole[name] <= half[name] < 0.7 * whole[name]


def test_layers_that_transformers_does_not_build_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As layers that predict several tokens, of which released checkpoints have one. They need no memory."""
    dense = saved(tmp_path, "fp8", "glm4_moe")
    layer = f"model.layers.{46}.mlp.down_proj"
    more = {"weight": torch.ones(4096, 4096).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(32, 32)}
    monkeypatch.setattr(loader, "_memory", lambda device: (16 * 2**20, 2**30))
    rewrite(tmp_path, lambda tensors: tensors.update({f"{layer}.{name}": one for name, one in more.items()}))
    assert answers(loaded(tmp_path), prompts(), prefill_chunk=16) == own_answers(dense, prompts())


def test_a_quantised_head_that_is_tied_is_refused(tmp_path: Path) -> None:
    fields = SIZES | OF_FAMILY["llama"] | {"vocab_size": 256, "tie_word_embeddings": False}
    model = random_weights(tiny("llama", fields=fields))
    save_quantised(model, tmp_path, "fp8", ())
    assert type(loaded(tmp_path).lm_head) is WeightPart
    configure(tmp_path, lambda one: one.update(tie_word_embeddings=True))
    with pytest.raises(UnreadableWeights, match=r'lm_head in fp8, .* set "tie_word_embeddings": false'):
        loaded(tmp_path)


# What compressed-tensors' own files have, too, by its versions 0.4 to 0.20


def configure(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def test_early_files_name_their_configuration_otherwise(tmp_path: Path) -> None:
    dense = saved(tmp_path, "w4a16")
    configure(tmp_path, lambda one: one.update(compression_config=one.pop("quantization_config")))
    assert answers(loaded(tmp_path), prompts(), prefill_chunk=16) == own_answers(dense, prompts())


def test_fp8_without_quantised_inputs_is_named_naive() -> None:
    config = tiny("llama")
    config.quantization_config = json.loads(
        json.dumps(FORMATS["fp8-channel"].config).replace("float-quantized", "naive-quantized")
    )
    config.quantization_config["config_groups"]["group_0"]["input_activations"] = None
    assert weight_format(config) == Fp8Format(".weight_scale", (1, 0), rounds_input=False)


@pytest.mark.parametrize("form", ["fp8-channel", None])
def test_attention_may_be_quantised_beside_weights_or_alone(tmp_path: Path, form: str | None) -> None:
    """Its zero points are stored in fp8, also where they are 0."""
    if form is None:
        dense = random_weights(tiny("llama", fields=SIZES))
        dense.save_pretrained(tmp_path)
        (tmp_path / "tokenizer.json").touch()
    else:
        dense = saved(tmp_path, form)
    numbers = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    group = {"targets": ["LlamaAttention"], "weights": None, "input_activations": numbers, "format": "dense"}

    def add(config: dict[str, Any]) -> None:
        named = config.setdefault("quantization_config", {"quant_method": "compressed-tensors"})
        named["kv_cache_scheme"] = numbers
        named.setdefault("config_groups", {})["group_1"] = group

    configure(tmp_path, add)
    zeros = {
        f"model.layers.{layer}.self_attn.{own}_zero_point": torch.zeros(1).to(torch.float8_e4m3fn)
        for layer in range(2)
        for own in "qkv"
    }
    rewrite(tmp_path, lambda tensors: tensors.update(zeros))
    model = loaded(tmp_path)
    assert len(parts(model)) == (14 if form else 0)
    assert answers(model, prompts(), prefill_chunk=16) == own_answers(dense, prompts())


# Refused before a weight is read


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one.pop(f"{Q}.weight_scale_inv"), f"has no weight_scale_inv for {Q}.weight"),
        (lambda one: one.pop(f"{Q}.weight"), f"{Q}.weight is missing, and has to be F8_E4M3"),
        (
            lambda one: one.update({f"{Q}.weight_scale_inv": torch.ones(3, 1)}),
            rf"{Q}.weight_scale_inv is F32 \[3, 1\], and has to be F32 or BF16 or F16 \[4, 1\] in fp8, a scale",
        ),
        (
            lambda one: one.update({f"{Q}.weight": torch.ones(512, 128)}),
            rf"{Q}.weight is F32 \[512, 128\], and has to be F8_E4M3 \[512, 128\]",
        ),
        (lambda one: one.update({f"{Q}.bias": torch.ones(512)}), f"has a {Q}.bias, unlike the model"),
        (
            lambda one: one.update({f"{Q}.pre_quant_scale": torch.ones(128)}),
            f"has pre_quant_scale for {Q}, which",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    saved(tmp_path, "fp8", attention_bias=False)
    rewrite(tmp_path, change)
    for device in (CPU, META):
        with pytest.raises(UnreadableWeights, match=message):
            load_model(tmp_path, device, torch.float32, lambda line: None)


def test_parts_of_a_layer_alone_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "awq", attention_bias=False)
    rewrite(tmp_path, lambda tensors: tensors.pop(f"{Q}.qweight"))
    with pytest.raises(UnreadableWeights, match=f"has no qweight for {Q}.qzeros, {Q}.scales"):
        load_model(tmp_path, META, torch.float32, lambda line: None)


def _plain_zeros(tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name in [one for one in tensors if one.endswith("weight_zero_point")]:
        words, num_rows = tensors[name], len(tensors[name.replace("zero_point", "scale")])
        eights = (words.unsqueeze(1) >> torch.arange(0, 32, 4).view(1, -1, 1)) & 15
        tensors[name] = (eights.flatten(0, 1)[:num_rows] - 8).to(dtype)


def test_zeros_are_read_as_earlier_versions_store_them(tmp_path: Path) -> None:
    saved(tmp_path, "w4a16-zeros")
    before = loaded(tmp_path, dequantise=True).state_dict()
    rewrite(tmp_path, lambda tensors: _plain_zeros(tensors, torch.int8))
    after = loaded(tmp_path, dequantise=True).state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    saved(tmp_path, "w4a16-zeros")
    rewrite(tmp_path, lambda tensors: _plain_zeros(tensors, torch.int32))
    wanted = r"_proj.weight_zero_point is I32 .*, and has to be I32 \[\d+, \d\] or I8 \[\d+, \d\]"
    with pytest.raises(UnreadableWeights, match=wanted):
        load_model(tmp_path, META, torch.float32, lambda line: None)


def test_groups_in_another_order_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "gptq", attention_bias=False)
    rewrite(tmp_path, lambda tensors: tensors.update({f"{Q}.g_idx": tensors[f"{Q}.g_idx"].flip(0)}))
    with pytest.raises(UnreadableWeights, match="groups of inputs in another order"):
        load_model(tmp_path, META, torch.float32, lambda line: None)


NAMES_KNOWN = ".*lightkv reads fp8"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"quant_method": "hqq"}, UnsupportedModel, f"quantised as 'hqq'{NAMES_KNOWN}"),
        ({"weight_block_size": [64, 64]}, UnsupportedModel, r"in blocks of \[64, 64\].* 128 x 128"),
        (
            {"weight_block_size": None},
            UnreadableWeights,
            r"weight_scale_inv is F32 \[.*has to be .* \[\] or \[1\]",
        ),
        ({"quant_method": "modelopt", "quant_algo": "MIXED"}, UnsupportedModel, "by modelopt as 'MIXED'"),
        ({"fmt": "e5m2"}, UnsupportedModel, "kind e5m2"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {}}},
            UnsupportedModel,
            f"no usable 'weights'{NAMES_KNOWN}",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}}, UnsupportedModel, "no usable"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            UnsupportedModel,
            f"without their zeros, as sparse-24-bitmask{NAMES_KNOWN}",
        ),
        (
            None,
            UnreadableWeights,
            r"stores model.layers.* in fp8, and config.json has no quantization_config",
        ),
    ],
)
def test_configurations_that_are_not_known_are_refused(
    tmp_path: Path, fields: dict[str, Any] | None, error: type[Exception], message: str
) -> None:
    saved(tmp_path, "fp8")
    if fields is None:
        configure(tmp_path, lambda config: config.pop("quantization_config"))
    else:
        configure(tmp_path, lambda config: config["quantization_config"].update(fields))
    with pytest.raises(error, match=message):
        load_model(tmp_path, META, torch.float32, lambda line: None)


def test_a_configuration_for_plain_weights_is_refused(tmp_path: Path) -> None:
    random_weights(tiny("llama")).save_pretrained(tmp_path)
    configure(tmp_path, lambda config: config.update(quantization_config=FORMATS["fp8"].config))
    with pytest.raises(UnreadableWeights, match="has no tensor …weight_scale_inv, though"):
        load_model(tmp_path, META, torch.float32, lambda line: None)
