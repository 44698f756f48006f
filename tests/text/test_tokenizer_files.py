"""Tests of unusual files of tokenizers: they are read as transformers reads them, or refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lightkv.router.engine.request import InvalidPrompt
from lightkv.router.text.tokenizer import Tokenizer, UnreadableTokenizer
from tests.support.tiny_files import byte_tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}{{ eos_token }}"
IMAGE, MAP = "{{ image_token }}{{ bos_token }}", "special_tokens_map.json"
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "chat_template": TEMPLATE,
}
MESSAGES = [{"role": "user", "content": "Hi"}]


def write(directory: Path, files: dict[str, Any]) -> Path:
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    config = {"vocab_size": 320, "max_position_embeddings": 99, "model_type": "llama"}
    for name, content in {"config.json": config, "tokenizer_config.json": SETTINGS, **files}.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def edited(**changes: Any) -> dict[str, Any]:
    """Returns the model's tokenizer.json with other parts."""
    content = {**json.loads(byte_tokenizer().to_str()), **changes}
    return {"tokenizer.json": {name: value for name, value in content.items() if value is not ...}}


def settings(**changes: Any) -> dict[str, Any]:
    content = {**SETTINGS, **changes}
    return {"tokenizer_config.json": {name: value for name, value in content.items() if value is not ...}}


READ: dict[str, dict[str, Any]] = {
    "end-token-as-an-object": settings(eos_token={"__type": "AddedToken", "content": "</s>", **FLAGS}),
    "no-end-token": settings(eos_token=...),
    "end-token-null": settings(eos_token=None),
    "end-token-that-is-new": settings(eos_token="<turn>"),
    "templates-in-a-list": settings(chat_template=[{"name": "default", "template": TEMPLATE}]),
    "templates-in-an-object": settings(chat_template={"default": TEMPLATE, "tool_use": "x"}),
    "tokens-of-the-model": settings(image_token="<image>", chat_template=IMAGE),
    "tokens-of-the-model-in-an-object": settings(
        extra_special_tokens={"image_token": "<image>", "eoi_token": "<tool>"}, chat_template=IMAGE
    ),
    "tokens-of-the-model-apart": settings(
        model_specific_special_tokens={"image_token": "<image>"}, chat_template=IMAGE
    ),
    "more-tokens-in-a-list": settings(extra_special_tokens=["<turn>", "<tool>"]),
    "more-tokens-null": settings(additional_special_tokens=None, extra_special_tokens=None),
    "a-map-that-says-otherwise": {MAP: {"eos_token": {"content": "<end>", **FLAGS}}},
    "a-map-beside-listed-tokens": {
        **settings(added_tokens_decoder={"258": {"content": "<end>", "special": True, **FLAGS}}),
        MAP: {"eos_token": "<s>"},
    },
    "a-map-with-null": {MAP: {"eos_token": None}},
    "fields-that-nothing-reads": settings(
        model_max_length=10**30, sp_model_kwargs={}, legacy=False, use_fast=False, processor_class="X", x=[1]
    ),
    "odd-truncation": edited(
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={"strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "<s>"},
    ),
    "no-version": edited(version=...),
    "merges-as-texts": edited(model={**json.loads(byte_tokenizer().to_str())["model"], "merges": []}),
}  # fmt: skip


@pytest.mark.parametrize("files", READ.values(), ids=READ.keys())
def test_read_as_in_transformers(tmp_path: Path, files: dict[str, Any]) -> None:
    tokenizer, expected = Tokenizer(write(tmp_path, files)), AutoTokenizer.from_pretrained(tmp_path)
    text = "Hello<image><tool><turn></s>\n<end>"
    ids = expected.encode(text, truncation=False, padding=False)
    assert tokenizer.encode(text).tolist() == ids
    assert tokenizer.decode(ids) == expected.decode(ids, skip_special_tokens=True)
    assert tokenizer.eos_ids == {expected.eos_token_id} - {None}
    rendered = expected.apply_chat_template(MESSAGES, tokenize=False)
    assert tokenizer.render_chat(MESSAGES) == rendered


SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}
NAMED = {"SpecialToken": {"id": "<x>", "type_id": 0}}
PAIR = [SEQUENCE, {"Sequence": {"id": "B", "type_id": 1}}]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a-special-token-without-ids": (
        edited(
            post_processor={
                "type": "TemplateProcessing", "single": [NAMED, SEQUENCE], "pair": PAIR, "special_tokens": {}
            }
        ),
        r"tokenizer\.json: is not a tokenizer \(PanicException",
    ),
    "a-broken-map-of-characters": (
        edited(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        r"tokenizer\.json: is not a tokenizer \(PanicException",
    ),
    "no-map-of-characters": (
        edited(normalizer={"type": "Precompiled", "precompiled_charsmap": None}),
        r"tokenizer\.json: is not a tokenizer",
    ),
    "a-pattern-that-is-none": (
        edited(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
        ),
        r"tokenizer\.json: is not a tokenizer",
    ),
    "an-unknown-model": (edited(model={"type": "Other"}), r"tokenizer\.json: is not a tokenizer"),
    "another-version": (edited(version="2.0"), r"tokenizer\.json: is not a tokenizer"),
    "an-empty-file": ({"tokenizer.json": {}}, r"tokenizer\.json: is not a tokenizer"),
    "an-id-that-is-a-list": ({"added_tokens.json": {"<a>": [1]}}, r"added_tokens\.json: names tokens"),
    "an-id-that-is-a-text": ({"added_tokens.json": {"<a>": "x"}}, r"added_tokens\.json: names tokens"),
    "listed-tokens-as-texts": (
        settings(added_tokens_decoder={"300": "<a>"}), r"tokenizer_config\.json: names tokens that cannot"
    ),
    "a-flag-that-is-null": (
        settings(added_tokens_decoder={"300": {"content": "<a>", "lstrip": None}}),
        r"tokenizer_config\.json: names tokens that cannot",
    ),
    "a-template-that-is-a-number": (settings(chat_template=3), r"_config\.json: has a chat template of type"),
    "templates-without-names": (settings(chat_template=[{"template": "a"}]), r"_config\.json: holds no chat"),
    "a-map-that-is-a-list": ({MAP: []}, r"special_tokens_map\.json: cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize(("files", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_in_one_line(tmp_path: Path, files: dict[str, Any], says: str) -> None:
    with pytest.raises(UnreadableTokenizer, match=says) as refused:
        Tokenizer(write(tmp_path, files))
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("length", [1, 5000])
def test_a_text_that_a_tokenizer_cannot_take(tmp_path: Path, length: int) -> None:
    """Its vocabulary lacks the token for unknown words: that is found out with the first of them."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<none>"}
    files = edited(model=model, pre_tokenizer={"type": "Whitespace"}, decoder=None, added_tokens=[])
    tokenizer = Tokenizer(write(tmp_path, files))
    tokenizer.prepare()
    assert tokenizer.encode("a " * length).size == length
    with pytest.raises(InvalidPrompt, match=r"tokenizer cannot take this text .*; send another"):
        tokenizer.encode("b " * length)
