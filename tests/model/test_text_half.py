"""Tests of the text half of wrappers (router/model/loading/text_half.py): whole tiny wrappers are saved, and
their text runs on lightkv, without their towers. test_models.py runs the text half of every wrapper in
transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel
from typer.testing import CliRunner

from lightkv.errors import UnsupportedModel
from lightkv.router import LLM, EngineConfig, SamplingParams
from lightkv.router.cli.app import app
from lightkv.router.model import loader
from lightkv.router.model.info import model_info
from lightkv.router.model.loader import ModelTooLarge, load_model
from lightkv.router.model.loading.text_half import left_out_of
from lightkv.router.model.model_config import load_supported_config
from lightkv.router.model_files import UnreadableWeights
from tests.support.byte_model import save_byte_model
from tests.support.combinations import slow
from tests.support.served import starting
from tests.support.tiny_architectures import answers, own_answers, prompts
from tests.support.tiny_wrappers import FAMILIES, tiny_wrapper, whole_wrapper

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
# One whose stored names differ from the model's, one with the head below the text model, one with M-RoPE.
QUICK = ("gemma3", "qwen2_5_vl")


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole Gemma-3, whose head is tied."""
    return save(whole_wrapper("gemma3"), tmp_path_factory.mktemp("models") / "gemma3")


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "gemma3"))


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in FAMILIES if name not in QUICK))])
def test_texts_and_bytes_are_those_of_the_wrapper_and_its_text_model(name: str, tmp_path: Path) -> None:
    whole = whole_wrapper(name)
    text = whole.config.get_text_config()
    directory = save(whole, tmp_path)
    load_supported_config(directory)
    lines: list[str] = []
    model = load_model(directory, CPU, "auto", lines.append)

    assert not [line for line in lines if "unknown" in line]
    with torch.device("meta"):
        alone = sum(one.numel() for one in AutoModel.from_config(text, dtype=torch.float32).parameters())
    is_tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    head = 0 if is_tied else text.vocab_size * text.hidden_size
    assert sum(one.numel() for one in model.parameters()) == alone + head
    with safe_open(str(directory / "model.safetensors"), "pt") as file:
        stored = sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118 (not a dict)
    kept = sum({one.data_ptr(): one.nbytes for one in model.state_dict().values()}.values())
    assert sum(left_out_of(model).values()) == stored - kept
    assert left_out_of(model)
    assert answers(model, prompts(), prefill_chunk=16) == own_answers(whole, prompts())


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> Path:
    """A whole Gemma-3 with a tokenizer of bytes, and a processor's chat template."""
    save_byte_model(tmp_path)
    whole_wrapper("gemma3", vocab_size=300).save_pretrained(tmp_path)
    template = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    return tmp_path


def test_llm_runs_a_chat_and_refuses_an_image_by_name(with_tokenizer: Path) -> None:
    llm = LLM(EngineConfig(model=str(with_tokenizer), device="cpu", max_total_tokens=300))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    text, chat = (
        llm.generate([prompt], params)[0] for prompt in ("abc", [{"role": "user", "content": "abc"}])
    )
    assert chat.prompt_token_ids == text.prompt_token_ids
    assert chat.outputs[0].token_ids == text.outputs[0].token_ids
    assert llm.info.left_out.keys() == {"model.vision_tower", "model.multi_modal_projector"}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    with pytest.raises(TypeError, match="part of type image_url"):
        llm.chat([image], params)


@pytest.mark.slow
def test_a_service_answers_a_chat_and_says_what_is_left_out(with_tokenizer: Path, tmp_path: Path) -> None:
    with starting(with_tokenizer, tmp_path / "log", tmp_path / "s") as begin:
        served = begin().wait_ready()
        assert served.complete("abc")
        content: Any = [{"type": "text", "text": "abc"}]
        asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
        status, answer, _ = served.request("/v1/chat/completions", asked)
        assert (status, answer["usage"]["prompt_tokens"]) == (200, 1)  # "abc" is one token
        content.append({"type": "image_url", "image_url": {"url": "data:,"}})
        status, answer, _ = served.request("/v1/chat/completions", asked)
        assert status == 400
        assert "a part of type image_url" in answer["error"]["message"]
        runner = served.request("/server_info")[1]["runner"]
        assert runner["architecture"] == "Gemma3ForConditionalGeneration"
        assert runner["left_out"].keys() == {"model.vision_tower", "model.multi_modal_projector"}
        assert served.request("/v1/models")[1]["data"][0]["max_model_len"] == 128
    assert "only texts run here; left out: model." in (tmp_path / "log").read_text()


@pytest.mark.parametrize("is_tied", [True, *slow(False)])
def test_heads_may_be_tied_or_not(is_tied: bool, tmp_path: Path) -> None:
    whole = whole_wrapper("qwen2_vl", tie_word_embeddings=is_tied)
    whole.config.tie_word_embeddings = is_tied
    model = load_model(save(whole, tmp_path), CPU, "auto", print)
    own_tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == own_tied
    assert answers(model, prompts()[:2], prefill_chunk=16) == own_answers(whole, prompts()[:2])


def test_the_check_of_the_memory_counts_what_is_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(saved, CPU, "auto", print)
    num_bytes = sum(one.nbytes for one in model.parameters())
    assert sum(left_out_of(model).values()) > 0
    monkeypatch.setattr(loader, "_memory", lambda device: (num_bytes, 10 * num_bytes))
    load_model(saved, CPU, "auto", print)  # fits exactly
    monkeypatch.setattr(loader, "_memory", lambda device: (num_bytes - 1, 10 * num_bytes))
    with pytest.raises(ModelTooLarge):
        load_model(saved, CPU, "auto", print)


def test_info_says_what_is_left_out(saved: Path) -> None:
    info = model_info(EngineConfig(str(saved), device="cpu", max_total_tokens=100), saved)
    assert info["architecture"] == "Gemma3ForConditionalGeneration"
    assert info["left_out"].keys() == {"model.vision_tower", "model.multi_modal_projector"}
    stored = sum(one.nbytes for one in load_file(saved / "model.safetensors").values())
    assert info["weight_bytes"] + sum(info["left_out"].values()) == stored
    shown = CliRunner().invoke(app, ["info", "--model", str(saved), "--device", "cpu"])
    assert shown.exit_code == 0, shown.stderr
    (row,) = [line for line in shown.stdout.splitlines() if line.startswith("left out ")]
    assert "that texts do not need: " in row
    assert "model.vision_tower (" in row


def test_a_checkpoint_without_towers_loads(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    text = {name: one for name, one in tensors.items() if "language_model" in name or "lm_head" in name}
    assert 0 < len(text) < len(tensors)
    save_file(text, directory / "model.safetensors", {"format": "pt"})
    model = load_model(directory, CPU, "auto", print)
    assert left_out_of(model) == {}
    assert answers(model, prompts()[:1], 16) == answers(whole_wrapper("gemma3"), prompts()[:1], 16)


def test_a_missing_text_weight_is_an_error_and_an_unknown_one_is_told(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    norm = next(
        name for name in tensors if name.endswith("layers.0.mlp.up_proj.weight") and "language" in name
    )
    tensors["language_model.strange"] = torch.zeros(3)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    lines: list[str] = []
    load_model(directory, CPU, "auto", lines.append)
    assert [line for line in lines if "unknown" in line and "strange" in line]
    del tensors[norm]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnreadableWeights, match="lacks 1 of the model's tensors"):
        load_model(directory, CPU, "auto", print)


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        ("text_config", "num_hidden_layers", 10**9),
        ("vision_config", "num_hidden_layers", 10**9),
        ("vision_config", "depth", 10**9),
        ("text_config", "part", {"config": {"decoder_layers": 10**9}}),
    ],
)
def test_damaged_fields_of_the_halves_are_told(place: str, name: str, value: Any, directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config[place][name] = value
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnreadableWeights, match=f"{'decoder_layers' if name == 'part' else name} is 1000000000"
    ):
        load_supported_config(directory)


REFUSED = {
    "florence2": "encoder-decoder",
    "gemma4_assistant": "drafts for another model",
    "kimi_k25": "latent",
    "inkling2": "convolutions of keys and values",
    "mllama": "of 4 layers, 3 call the attention interface",
    "paligemma": "in both directions",
    "qwen4_exp": "keys that an index selects",
}


@pytest.mark.parametrize(("name", "reason"), REFUSED.items(), ids=REFUSED)
def test_a_wrapper_whose_text_cannot_run_is_refused_without_its_weights(
    name: str, reason: str, tmp_path: Path
) -> None:
    tiny_wrapper(name).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        load_supported_config(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gemma3", "llama4", "mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_texts_in_cuda_graphs_are_those_of_the_wrapper(name: str, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}  # of heads of 32
    sections = {"rope_parameters": rope} if "_vl" in name else {}
    whole = whole_wrapper(name, hidden_size=128, head_dim=32, **sections)
    model = load_model(save(whole, tmp_path), torch.device("cuda"), torch.float32, lambda line: None)
    assert answers(model, prompts(), prefill_chunk=16) == own_answers(whole, prompts())
