"""Tests of models in the forms in which they are published: they answer as in transformers, or are refused with
a remedy."""

import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lightkv.errors import LightKVError
from lightkv.router import LLM, EngineConfig, SamplingParams
from lightkv.router.api.requests.dialect import ChatDialect
from lightkv.router.api.requests.prompts import Chat
from lightkv.router.api.requests.tools import Function, ToolUse
from lightkv.router.engine.request import InvalidPrompt
from lightkv.router.model.loader import load_model
from lightkv.router.model_files import UnreadableWeights, require_whole, resolve
from lightkv.router.sampling_params import Grammar
from lightkv.router.service.api_settings import ApiSettings
from lightkv.router.text.tokenizer import Tokenizer, UnreadableTokenizer
from tests.support.tiny_files import byte_tokenizer, save_published

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PROMPTS = ["Hello you", "abc"]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_published(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture
def directory(published: Path, tmp_path: Path) -> Path:
    """A copy of a complete model, for one test to change."""
    return Path(shutil.copytree(published, tmp_path / "model"))


def load(directory: Path) -> LLM:
    return LLM(EngineConfig(str(directory), device="cpu", max_total_tokens=300))


def answers(directory: Path) -> list[list[int]]:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    return [output.outputs[0].token_ids for output in load(directory).generate(PROMPTS, greedy)]


def expected_answers(directory: Path) -> list[list[int]]:
    """Returns the answers of transformers to `PROMPTS`, from the same files."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        found.append(model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist())
    return found


def edit(path: Path, **changes: Any) -> None:
    """Changes fields of a JSON file; `...` removes one."""
    fields = (json.loads(path.read_text()) if path.is_file() else {}) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


def shard(directory: Path) -> list[Path]:
    """Splits the weights in three shards, and returns these."""
    tensors = list(load_file(directory / "model.safetensors").items())
    (directory / "model.safetensors").unlink()
    shards = [directory / f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    for i, path in enumerate(shards):
        save_file(dict(tensors[i::3]), path, metadata={"format": "pt"})
    weight_map = {name: shards[i % 3].name for i, (name, _) in enumerate(tensors)}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return shards


# Files that are missing, or stand in another form


def rename(directory: Path, name: str, other: str) -> None:
    (directory / name).rename(directory / other)


OTHER_FORMS = {
    "sentencepiece": (
        lambda d: rename(d, "tokenizer.json", "tokenizer.model"),
        r"lacks tokenizer\.json; tokenizer\.model is sentencepiece.*: pip install sentencepiece protobuf && "
        r"python -c .*AutoTokenizer",
    ),
    "tekken": (
        lambda d: rename(d, "tokenizer.json", "tekken.json"),
        r"lacks tokenizer\.json; tekken\.json is .*: pip install mistral-common && "
        r"python -c .*convert_tekken_tokenizer",
    ),
    "pickle": (
        lambda d: rename(d, "model.safetensors", "pytorch_model.bin"),
        r"lacks model\.safetensors; its \*\.bin weights are pickle, which lightkv never loads.*save_pretrained",
    ),
    "pth": (lambda d: rename(d, "model.safetensors", "consolidated.00.pth"), r"\*\.pth weights are pickle"),
    "gguf": (lambda d: rename(d, "model.safetensors", "model-Q4_0.gguf"), r"no \.gguf file can be given"),
    "mistral": (lambda d: rename(d, "model.safetensors", "consolidated.safetensors"), r"is Mistral's own form"),
    "params": (lambda d: rename(d, "config.json", "params.json"), r"lacks config\.json.*is Mistral's own form"),
    "variant": (lambda d: rename(d, "model.safetensors", "model.fp16.safetensors"), r"the name model\."),
    "adapter": (lambda d: rename(d, "config.json", "adapter_config.json"), "it is an adapter: merge it"),
    "shard": (lambda d: shard(d)[1].unlink(), r"lacks model-00002-of-\d+\.safetensors; replace it"),
    "index": (
        lambda d: (shard(d), (d / "model.safetensors.index.json").unlink()),
        r"lacks model\.safetensors\.index\.json; replace it",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "says"), OTHER_FORMS.values(), ids=OTHER_FORMS.keys())
def test_what_is_missing_is_named_with_its_remedy(
    directory: Path, change: Callable[[Path], Any], says: str
) -> None:
    change(directory)
    with pytest.raises(UnreadableWeights, match=says) as raised:
        require_whole(resolve(str(directory), lambda line: None))
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
def test_a_pointer_of_git_lfs(directory: Path, name: str) -> None:
    (directory / name).write_text(POINTER)
    with pytest.raises(LightKVError, match=rf"{name}: .*a Git-LFS pointer: run git lfs pull"):
        load(directory)


def test_a_truncated_shard(directory: Path) -> None:
    second = shard(directory)[1]
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(UnreadableWeights, match=rf"{second.name}: is not a whole safetensors file"):
        load(directory)


# Weights


def change_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def as_stored_in_two_types(directory: Path) -> None:
    change_weights(
        directory,
        lambda tensors: tensors.update(
            {name: tensor.bfloat16() for name, tensor in tensors.items() if "norm" not in name}
        ),
    )
    edit(directory / "config.json", dtype="bfloat16")


def with_more_tensors(directory: Path) -> None:
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.2.mlp.up_proj.weight": torch.ones(3, 3),
    }
    change_weights(directory, lambda tensors: tensors.update(more))


def with_a_gguf_beside(directory: Path) -> None:
    (directory / "model-Q4_0.gguf").write_bytes(b"GGUF")


CHECKPOINTS: dict[str, Callable[[Path], Any]] = {
    "shards": shard,
    "bf16-with-float32-norms": as_stored_in_two_types,
    "more-tensors-and-a-gguf": lambda d: (with_more_tensors(d), with_a_gguf_beside(d)),
    "torch-dtype": lambda d: edit(d / "config.json", dtype=..., torch_dtype="float16"),
    "no-dtype-nor-architecture": lambda d: edit(d / "config.json", dtype=..., architectures=...),
    "tensors-without-the-prefix": lambda d: change_weights(
        d,
        lambda tensors: [tensors.update({n[6:]: tensors.pop(n)}) for n in list(tensors) if n[:6] == "model."],
    ),
}


@pytest.mark.parametrize("change", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_weights_are_those_of_transformers(directory: Path, change: Callable[[Path], Any]) -> None:
    change(directory)
    require_whole(directory)
    loaded = load_model(directory, torch.device("cpu"), "auto", lambda line: None).state_dict()
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


def test_tied_weights(directory: Path) -> None:
    change_weights(directory, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(UnreadableWeights, match=r'lm_head\.weight first; .* set "tie_word_embeddings": true'):
        load_model(directory, torch.device("cpu"), "auto", lambda line: None)
    edit(directory / "config.json", tie_word_embeddings=True)
    test_weights_are_those_of_transformers(directory, lambda d: None)


def test_a_package_that_weights_in_fewer_bits_need(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: Any, **settings: Any) -> Any:
        raise ImportError("Loading a GPTQ quantized model requires optimum")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", load)
    with pytest.raises(
        UnreadableWeights, match=r"requires optimum\); give the model with weights in 16 bits"
    ):
        load_model(directory, torch.device("cpu"), "auto", lambda line: None)


def test_answers_are_those_of_transformers(directory: Path) -> None:
    """A checkpoint with many of these at once, a padded vocabulary, and end tokens that end the answers."""
    change_weights(
        directory,
        lambda tensors: tensors.update(
            {name: torch.cat([one, 2 * one[:61]]) for name, one in tensors.items() if len(one) == 259}
        ),
    )
    as_stored_in_two_types(directory)
    with_more_tensors(directory)
    shard(directory)
    edit(directory / "config.json", dtype=..., architectures=..., vocab_size=320)
    whole = expected_answers(directory)
    assert any(token >= 259 for tokens in whole for token in tokens)  # it has no text
    ends = [whole[0][5], whole[1][3]]
    edit(directory / "generation_config.json", eos_token_id=ends)
    expected = expected_answers(directory)
    assert [tokens[-1] in ends for tokens in expected] == [True, True]
    assert answers(directory) == expected


# Tokens


ADDED = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
TOKENS_ELSEWHERE: dict[str, dict[str, dict[str, Any]]] = {
    "added-tokens-decoder": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "260": {"content": "you", "special": False, **ADDED},
                "259": {"content": "<turn>", "special": True, **ADDED},
            },
            "eos_token": "<turn>",
        }
    },
    "added-tokens": {
        "added_tokens.json": {"you": 260, "<turn>": 259},
        "special_tokens_map.json": {"eos_token": {"content": "<turn>", **ADDED}},
        "tokenizer_config.json": {"eos_token": ...},
    },
    "special-tokens": {
        "tokenizer_config.json": {"eos_token": "<turn>", "additional_special_tokens": ["<tool>", "you"]}
    },
}


@pytest.mark.parametrize("files", TOKENS_ELSEWHERE.values(), ids=TOKENS_ELSEWHERE.keys())
def test_tokens_that_tokenizer_json_lacks(directory: Path, files: dict[str, dict[str, Any]]) -> None:
    for name, fields in files.items():
        edit(directory / name, **fields)
    edit(directory / "config.json", vocab_size=320)
    text = "Hello you<turn><tool></s>\n"
    expected = AutoTokenizer.from_pretrained(directory)
    tokenizer = Tokenizer(directory)
    ids = tokenizer.encode(text).tolist()
    assert ids == expected.encode(text)
    assert max(ids) >= 259
    assert tokenizer.decode(ids) == expected.decode(ids, skip_special_tokens=True)
    assert tokenizer.eos_ids == {257, expected.eos_token_id}


@pytest.mark.parametrize(
    "wrong",
    [5, [], {"259": "<turn>"}, {"259": {"special": True}}, {"x": {"content": "a"}}, {"1": {"content": 5}}],
)
def test_tokens_that_cannot_be_added(directory: Path, wrong: Any) -> None:
    edit(directory / "tokenizer_config.json", added_tokens_decoder=wrong)
    with pytest.raises(
        UnreadableTokenizer, match=r"tokenizer_config\.json: names tokens that cannot be added"
    ):
        Tokenizer(directory)


def test_end_tokens(directory: Path) -> None:
    edit(directory / "generation_config.json", eos_token_id=[257, 258, 259])  # the vocabulary ends before 259
    assert Tokenizer(directory).eos_ids == {257, 258}
    edit(directory / "generation_config.json", eos_token_id=None)
    edit(directory / "config.json", eos_token_id=[258], vocab_size=...)
    assert Tokenizer(directory).eos_ids == {257, 258}


def test_a_tokenizer_longer_than_the_embedding(directory: Path) -> None:
    byte_tokenizer("<turn>", "you").save(str(directory / "tokenizer.json"))
    edit(directory / "generation_config.json", eos_token_id=[257, 259])
    llm = load(directory)
    with pytest.raises(InvalidPrompt, match="token ids from 188 to 260; the model's go from 0 to 258"):
        llm.generate("you\0")
    wanted = SamplingParams(
        temperature=0, max_tokens=9, grammar=Grammar("regex", "[ab]{3}you"), bad_words=["you"]
    )
    answer = llm.generate("abc", wanted)[0].outputs[0]
    assert (len(answer.text), answer.text[-3:], answer.finish_reason) == (6, "you", "stop")
    assert answer.token_ids[-1] == 257


# Chat templates

CHAT = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
NAMED = [
    {"name": "default", "template": "{{ bos_token }}default {{ messages[0].content }}"},
    {"name": "tool_use", "template": "tools {{ tools | length }}"},
]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


TEMPLATES: dict[str, Callable[[Path], Any]] = {
    "file": lambda d: write(d / "chat_template.jinja", "file {{ messages[0].content }}"),
    "file-before-settings": lambda d: (
        edit(d / "tokenizer_config.json", chat_template=NAMED),
        write(d / "chat_template.jinja", "file"),
    ),
    "file-and-folder": lambda d: (
        write(d / "chat_template.jinja", "file"),
        write(d / "additional_chat_templates" / "tool_use.jinja", "folder {{ tools | length }}"),
    ),
    "settings": lambda d: edit(d / "tokenizer_config.json", chat_template=NAMED),
}


@pytest.mark.parametrize("change", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_templates_are_found_as_in_transformers(directory: Path, change: Callable[[Path], Any]) -> None:
    change(directory)
    reference, tokenizer = AutoTokenizer.from_pretrained(directory), Tokenizer(directory)
    for tools in (None, TOOLS):
        expected = reference.apply_chat_template(CHAT, tools=tools, tokenize=False)
        assert tokenizer.render_chat(CHAT, False, tools=tools) == expected


def test_the_template_of_a_processor(directory: Path) -> None:
    edit(directory / "chat_template.json", chat_template="processor {{ messages[0].content }}")
    assert Tokenizer(directory).render_chat(CHAT) == "processor Hello"
    edit(directory / "tokenizer_config.json", chat_template="settings")  # it comes first
    assert Tokenizer(directory).render_chat(CHAT) == "settings"


@pytest.mark.parametrize("content", ["{", "[]", '{"chat_template": 5}', '{"chat_template": [{"name": "a"}]}'])
def test_a_damaged_template_of_a_processor(directory: Path, content: str) -> None:
    (directory / "chat_template.json").write_text(content)
    with pytest.raises(UnreadableTokenizer, match=r"chat_template\.json: "):
        Tokenizer(directory)


def test_the_dialect_of_a_template_for_tools(directory: Path) -> None:
    hermes = "{{ tools }}<tool_call>\n{'name': …}\n</tool_call>"
    named = [NAMED[0], {"name": "tool_use", "template": hermes}]
    edit(directory / "tokenizer_config.json", chat_template=named)
    dialect = ChatDialect(Tokenizer(directory), ApiSettings(served_model_name=("m",)))
    use = ToolUse([Function(name="look", parameters={"type": "object"}, strict=None)])
    told = dialect.prepared(Chat(CHAT), use)
    assert [tool["function"]["name"] for tool in told.tools or ()] == ["look"]


# Sampling

RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}


def test_sampling_as_the_model_recommends(directory: Path) -> None:
    others = {"do_sample": True, "max_new_tokens": 5, "num_beams": 1, "transformers_version": "4.37.0"}
    edit(directory / "generation_config.json", **RECOMMENDED, **others)
    assert Tokenizer(directory).recommended == RECOMMENDED
    edit(directory / "generation_config.json", **dict.fromkeys(RECOMMENDED, ...) | {"top_k": 1})
    llm = load(directory)
    assert llm.default_params == SamplingParams(top_k=1)
    greedy = llm.generate("abc", SamplingParams(temperature=0, max_tokens=9))[0].outputs[0].token_ids
    assert [chunk.token_ids[0] for chunk in islice(llm.stream("abc"), 9)] == greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("min_p", True),
    ],
)
def test_a_recommended_value_that_no_request_may_have(directory: Path, field: str, value: Any) -> None:
    edit(directory / "generation_config.json", **{field: value})
    with pytest.raises(
        UnreadableTokenizer, match=rf"generation_config\.json: has a wrong value: {field} is .*; give"
    ):
        Tokenizer(directory)
