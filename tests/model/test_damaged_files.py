"""Tests of damaged model files: each is refused in one line, unless the wrong value does not matter."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightkv.errors import LightKVError, UnsupportedModel
from lightkv.router import LLM, EngineConfig
from lightkv.router.model.loader import load_model
from lightkv.router.model.model_config import load_supported_config
from lightkv.router.model.sizes import EngineSizes
from lightkv.router.model_files import UnreadableWeights, resolve
from lightkv.router.text.tokenizer import Tokenizer, UnreadableTokenizer
from tests.support.combinations import slow
from tests.support.hybrid_models import save_hybrid
from tests.support.tiny_files import save_tiny

META = torch.device("meta")
DEEP = "[" * 100_000 + "]" * 100_000
# Values, as JSON, that are wrong for most fields.
WRONG = ["null", "true", "-1", "1e400", "NaN", str(2**70), '"text"', "[]", '[{"a": [null]}]', "{}", DEEP]
WRONG += ["5", '[["a"]]', '[1, "x"]', '["a\\nb"]']
# Fields that the config.json of a llama does not have, but that lightkv or transformers reads.
OTHER_FIELDS = {
    "config.json": [
        "num_experts", "rope_scaling", "quantization_config", "auto_map", "is_encoder_decoder", "is_decoder",
        "add_cross_attention", "use_bidirectional_attention", "kv_lora_rank", "num_kv_shared_layers",
        "layer_types", "layers_block_type", "attention_chunk_size", "is_heterogeneous",
        "sub_configs", "text_config", "decoder", "text_encoder", "attribute_map", "transformers_weights",
        "n_positions", "n_ctx", "max_seq_len",
    ],
}  # fmt: skip
FILES: dict[str, Any] = {
    "config.json": None,
    "tokenizer_config.json": {
        "chat_template": "a",
        "added_tokens_decoder": {},
        "bos_token": "a",
        "eos_token": {"content": "b"},
    },
    "generation_config.json": {"eos_token_id": [2], "bos_token_id": 1, "pad_token_id": 0, "top_k": 20},
    "special_tokens_map.json": {"eos_token": "b", "pad_token": {"content": "a"}},
    "model.safetensors.index.json": {"metadata": {}, "weight_map": {"lm_head.weight": "model-1.safetensors"}},
    "tokenizer.json": None,
}
# By file and field: the values in WRONG that are accepted. All others have to be refused.
ACCEPTED: dict[str, dict[str, list[str]]] = {
    "config.json": {
        "hidden_size": [],
        "vocab_size": ["5"],
        "rope_parameters": ["null", "{}"],
        "layers_block_type": ["null", "[]", "{}"],
        "sub_configs": [],
        "transformers_weights": ["null"],
    },
    "tokenizer_config.json": {
        "chat_template": ["null", '"text"', "[]", "{}"],
        "added_tokens_decoder": ["null", "{}"],
    },
    "generation_config.json": {"eos_token_id": ["null", "[]", "5"], "top_k": ["null", "-1", "5"]},
    "special_tokens_map.json": {"eos_token": [wrong for wrong in WRONG if wrong is not DEEP]},
    "model.safetensors.index.json": {  # nothing reads the metadata
        "metadata": [wrong for wrong in WRONG if wrong is not DEEP],
        "weight_map": [],
    },
    "tokenizer.json": {"added_tokens": ["[]"], "padding": ["null"], "model": []},
}
GARBAGE = {
    "empty": b"",
    "invalid-utf8": b'{"a": "\xff\xfe"}',
    "deep-lists": DEEP.encode(),
    "deep-objects": b'{"a":' * 100_000,
    "no-object": b"[]",
    "long-number": b'{"a": ' + b"9" * 10_000 + b"}",
    "zeros": bytes(1000),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny(tmp_path_factory.mktemp("models") / "tiny")
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    for name, content in FILES.items():
        if content is not None:
            (directory / name).write_text(json.dumps(content))
    return directory


@pytest.fixture
def directory(whole: Path) -> Iterator[Path]:
    """A complete model, whose files are restored after each test."""
    before = {name: (whole / name).read_bytes() for name in FILES}
    yield whole
    for name, content in before.items():
        (whole / name).write_bytes(content)


OF_THE_WEIGHTS = ("generation_config.json", "model.safetensors.index.json")


def read_with_all_readers(name: str, directory: Path) -> None:
    """Calls every function that reads the file `name`. The weights go to the meta device."""
    found = resolve(str(directory), lambda line: None)
    if name == "config.json":
        text = load_supported_config(found).get_text_config()
        assert EngineSizes(EngineConfig(), torch.device("cpu"), text).limits
    Tokenizer(found)
    if name in OF_THE_WEIGHTS:
        load_model(found, META, "auto", lambda line: None)


def refusal(name: str, directory: Path) -> str | None:
    try:
        read_with_all_readers(name, directory)
    except LightKVError as error:
        return str(error)
    return None


@pytest.mark.parametrize("step", [15, *slow(1)], ids=["one-each", "all"])
@pytest.mark.parametrize("name", FILES)
def test_any_value_of_a_wrong_type(directory: Path, name: str, step: int) -> None:
    """The fields in `ACCEPTED` get all values of `WRONG`. Of the others each gets every `step`-th, and the next
    field those after them."""
    path = directory / name
    content = json.loads(path.read_text())
    accepted: dict[str, list[str]] = {}
    for idx, key in enumerate([*content, *OTHER_FIELDS.get(name, [])]):
        for wrong in WRONG if key in ACCEPTED[name] else WRONG[idx % step :: step]:
            marked = json.dumps({**content, key: "the wrong value"})
            path.write_text(marked.replace('"the wrong value"', wrong))
            said = refusal(name, directory)
            assert said is None or (said.isprintable() and len(said) < 1000), (key, wrong)
            if said is None:
                accepted.setdefault(key, []).append(wrong)
    assert {key: accepted.get(key, []) for key in ACCEPTED[name]} == ACCEPTED[name]


def rope(name: str, value: Any) -> dict[str, Any]:
    """Returns the configuration of a rotary embedding for one type of layer, in which `name` is `value`."""
    whole = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
        "factor": 2.0,
    }
    return {"rope_parameters": {"full_attention": {**whole, name: value}}}


FIELDS_TOGETHER: dict[str, dict[str, Any]] = {
    **{f"rope-type-{value}": rope("rope_type", value) for value in (None, 5, True, [], {})},
    **{
        f"rope-length-{value}": rope("original_max_position_embeddings", value)
        for value in (None, 0, -1, 1.5, True, "32", [], {})
    },
    "texts": {"text_encoder": {}, "decoder": {}},
}


@pytest.mark.parametrize("fields", FIELDS_TOGETHER.values(), ids=FIELDS_TOGETHER.keys())
def test_fields_that_are_read_together(directory: Path, fields: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    for read in (load_supported_config, lambda found: load_model(found, META, "auto", lambda line: None)):
        with pytest.raises(UnreadableWeights, match=r"config\.json: ") as raised:
            read(directory)
        assert str(raised.value).isprintable()


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
@pytest.mark.parametrize("name", FILES)
def test_garbage_is_refused(directory: Path, name: str, garbage: bytes) -> None:
    (directory / name).write_bytes(garbage)
    with pytest.raises((UnreadableWeights, UnreadableTokenizer)) as raised:
        read_with_all_readers(name, directory)
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("count", ["0", "-4", "1.5", "true", str(10**9), str(10**30)])
def test_number_of_layers(directory: Path, count: str) -> None:
    path = directory / "config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 2', f'"num_hidden_layers": {count}'))
    with pytest.raises(UnreadableWeights, match=r"num_hidden_layers is .*, and can be 1 to"):
        load_supported_config(directory)


@pytest.mark.parametrize("field", ["linear_num_value_heads", "linear_key_head_dim", "intermediate_size"])
def test_sizes_far_above_what_the_files_hold(hybrid_directory: Path, field: str) -> None:
    """transformers would make tensors of these sizes before it finds that those in the files are smaller."""
    for size in (10**6, 10**9):
        changed(hybrid_directory, {field: size})
        with pytest.raises(
            UnreadableWeights, match=r"config\.json: describes [\d,]+ parameters, and the files"
        ):
            load_supported_config(hybrid_directory)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"linear_num_value_heads": 0}, "a size of a state's tensor is 0"),
        ({"linear_conv_kernel_dim": 0}, "a size of a state's tensor is -1"),
        ({"linear_conv_kernel_dim": -3}, "describes no model that can be made"),
        ({"layer_types": ["linear_attention"]}, "is refused by transformers"),
        ({"layer_types": ["linear_attention"] * 4}, "0 call the attention interface, and 4 keep a state"),
    ],
)
def test_sizes_that_no_states_can_have(hybrid_directory: Path, fields: dict[str, Any], said: str) -> None:
    changed(hybrid_directory, fields)
    with pytest.raises((UnreadableWeights, UnsupportedModel), match=said):
        load_supported_config(hybrid_directory)


@pytest.fixture(scope="module")
def saved_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp("models") / "hybrid")


@pytest.fixture
def hybrid_directory(saved_hybrid: Path) -> Iterator[Path]:
    before = (saved_hybrid / "config.json").read_bytes()
    yield saved_hybrid
    (saved_hybrid / "config.json").write_bytes(before)


def changed(directory: Path, fields: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


TEMPLATES = {
    "invalid-utf8": b"\xff",
    "deep-expression": b"{{ " + b"(" * 10_000,
    "no-loop": b"{% for %}",
    "deep-blocks": b"{% if a %}" * 5000,
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_chat_template(directory: Path, template: bytes) -> None:
    path = directory / "chat_template.jinja"
    path.write_bytes(template)
    try:
        with pytest.raises(LightKVError) as raised:
            Tokenizer(directory).render_chat([{"role": "user", "content": "?"}])
        assert "\n" not in str(raised.value)
    finally:
        path.unlink()


def header(text: str, size: int | None = None) -> bytes:
    """Returns the beginning of a safetensors file. `size`: the stated size of the header, if it is wrong."""
    return (len(text) if size is None else size).to_bytes(8, "little") + text.encode()


HEADERS = {
    "2**63": header("{}", 2**63),
    "1e9": header("{}" * 100, 10**9),
    "deep": header(DEEP),
    "fraction": header('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4.5]}}'),
    "backwards": header('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}'),
    "dtype": header('{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 0]}}'),
    "shape": header('{"a": {"dtype": "F32", "shape": "?", "data_offsets": [0, 0]}}'),
    "number": header('{"a": 5}'),
    "no-object": header("[5]"),
}


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS.keys())
def test_header_of_weights(tmp_path: Path, content: bytes) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UnreadableWeights) as raised:
        load_model(tmp_path, torch.device("cpu"), "auto", lambda line: None)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("length", [2**31, 10**12, 2**70])
def test_a_context_too_long_for_any_memory(directory: Path, length: int) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": length}))
    with pytest.raises(LightKVError) as raised:
        LLM(EngineConfig(str(directory), device="cpu", max_total_tokens=100))
    assert "\n" not in str(raised.value)
