"""Tests of router/text/tokenizer.py against tokenizers' own decode, transformers' templates and str.find."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, processors

from lightkv.router.model_files import DEFAULT_MODEL, resolve
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.text.banned_words import token_sequences, with_banned_ids
from lightkv.router.text.detokenizer import Detokenizer, StopChecker
from lightkv.router.text.tokenizer import (
    ChatTemplateError,
    Tokenizer,
    UnreadableTokenizer,
)

TEXTS = {
    "plain": "Hello, world! It's 12 345 o'clock.",
    "newlines": "a\n\n  1\r\n\tb \n",
    "emoji": "😀👩‍👩‍👧‍👦🇫🇷 ok 👍🏽",
    "cjk": "你好，世界。日本語のテキスト 한국어",
    "combining": "e\u0301 a\u0308\u0323 ก็ नमस्ते",
    "replacement": "a\ufffdb\ufffd",
    "empty": "",
}
texts = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())


@pytest.fixture(scope="module")
def default_dir() -> Path:
    return resolve(DEFAULT_MODEL, print)


@pytest.fixture(scope="module")
def byte_level(default_dir: Path) -> Tokenizer:
    return Tokenizer(default_dir)


def write_model(directory: Path, **tokenizer_config: Any) -> Path:
    """Writes a tokenizer like that of sentencepiece models: spaces are ▁, and unknown letters become bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"Helo,wrd!ab", "▁H", "▁w", "el", "lo", "▁Hel", "▁Hello", "日"]
    merges = [("▁", "H"), ("▁", "w"), ("e", "l"), ("l", "o"), ("▁H", "el"), ("▁Hel", "lo")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {token: token_id for token_id, token in enumerate(tokens)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "vocab_size": 300,
        "max_position_embeddings": 99,
        "eos_token_id": 2,
        "model_type": "llama",
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, **tokenizer_config}
        )
    )
    return directory


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model(tmp_path_factory.mktemp("byte_fallback")))


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


def pieces_of(tokenizer: Tokenizer, token_ids: list[int], size: int = 1) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token_ids[i : i + size]) for i in range(0, len(token_ids), size)]
    return [*pieces, detokenizer.finish()]


def test_texts_of_tokens_are_all_made_at_the_start(default_dir: Path, byte_level: Tokenizer) -> None:
    """Else the memory of the API process would grow with every token that is sampled for the first time."""
    prepared = Tokenizer(default_dir)
    prepared.prepare()
    num_known = len(prepared._whole_text_of), len(prepared._text_of)
    assert num_known == (prepared.vocab_size, 0)
    for token_id in range(prepared.vocab_size):
        assert prepared.token_text(token_id) == byte_level.decode([token_id], skip_special_tokens=False)
        text, piece = prepared.whole_text(token_id), prepared.token_bytes(token_id)
        assert text is None or text.encode() == piece
    assert len(prepared._whole_text_of) == prepared.vocab_size
    assert len(prepared._text_of) == len(prepared.special_ids)


def test_special_tokens_are_shown_between_the_bytes_of_a_character(byte_level: Tokenizer) -> None:
    """A token that is whole characters is decoded by itself, unless bytes of another character wait for it."""
    ids = [
        *byte_level.encode("a\U0001f600b\u4e2d", add_special_tokens=False).tolist(),
        2,
        *byte_level.encode("c").tolist(),
    ]
    cut = [ids[0], ids[1], *ids[-2:]]  # the character is never completed
    for token_ids in (ids, cut):
        for skips in (True, False):
            detokenizer = Detokenizer(byte_level, skips)
            pieces = [detokenizer.push([token_id]) for token_id in token_ids]
            assert "".join([*pieces, detokenizer.finish()]) == byte_level.decode(token_ids, skips)


# Encoding, decoding, templates


def test_attributes_come_from_the_files(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    assert byte_level.eos_ids == {2}
    assert (byte_level.vocab_size, byte_level.max_model_len) == (49152, 8192)
    assert byte_fallback.eos_ids == {2}
    assert (byte_fallback.vocab_size, byte_fallback.max_model_len) == (300, 99)


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert Tokenizer(directory).eos_ids == {2, 7, 9}


@texts
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert token_ids.dtype == "int32"
    assert tokenizer.decode(token_ids) == text  # also not truncated, although tokenizer.json asks for it


def test_same_ids_as_transformers(default_dir: Path, byte_level: Tokenizer) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(default_dir)
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 + 12?  3\n"},
        {"role": "assistant", "content": "16 😀"},
    ]
    for text in TEXTS.values():
        assert byte_level.encode(text).tolist() == reference.encode(text)
    for messages in (chat, chat[1:], chat[:2]):
        for prompt in (True, False):
            expected = reference.apply_chat_template(
                messages, add_generation_prompt=prompt, return_dict=False
            )
            assert byte_level.encode_chat(messages, prompt).tolist() == expected


@pytest.mark.parametrize("added", [True, False, None], ids=["added", "not-added", "unsaid"])
def test_special_tokens_around_a_text_as_in_transformers(tmp_path: Path, added: bool | None) -> None:
    from transformers import AutoTokenizer

    flags = {} if added is None else {"add_bos_token": added, "add_eos_token": added}
    directory = write_model(tmp_path, tokenizer_class="LlamaTokenizer", **flags)
    reference = AutoTokenizer.from_pretrained(directory)
    tokenizer = Tokenizer(directory)
    for special in (True, False):
        expected = reference.encode("Hel wo", add_special_tokens=special, truncation=False, padding=False)
        assert tokenizer.encode("Hel wo", add_special_tokens=special).tolist() == expected


def test_lone_surrogates_become_replacements(byte_level: Tokenizer) -> None:
    assert byte_level.decode(byte_level.encode("a\ud800b \ud83d\ude00")) == "a\ufffdb 😀"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'skip' %}{% break %}{% endif %}\n {{ m.role }}\n{% endfor %}",
        "{% generation %}{{ messages[0].content | tojson }}{% endgeneration %}{{ bos_token, eos_token }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    ],
    ids=["loop-controls-and-blocks", "generation-and-tojson", "namespace"],
)
def test_template_renders_as_in_transformers(tmp_path: Path, template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    directory = write_model(tmp_path)
    (directory / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": '<é> & "q"'}, {"role": "skip", "content": "x"}]
    expected = PreTrainedTokenizerFast.from_pretrained(directory).apply_chat_template(
        messages, tokenize=False
    )
    assert Tokenizer(directory).render_chat(messages, add_generation_prompt=False) == expected


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chat"}]
    assert Tokenizer(write_model(tmp_path, chat_template=named)).render_chat([]) == "chat"


# Of SmolVLM's kind, which takes a content as parts only, and of Qwen2.5-VL's, which takes both.
PARTS = "{% for part in m.content %}{% if part.type == 'image' %}<i>{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"  # noqa: E501
BOTH = "{% if m.content is string %}{{ m.content }}!{% else %}" + PARTS + "{% endif %}"


@pytest.mark.parametrize(
    ("content", "text"), [(PARTS, "[Hi][yes]"), (BOTH, "[Hi!][yes!]")], ids=["parts", "both"]
)
@pytest.mark.parametrize("continues", [False, True])
def test_the_template_of_a_processor_gets_a_text_as_it_takes_it(
    content: str, text: str, continues: bool, tmp_path: Path
) -> None:
    directory = write_model(tmp_path)
    template = "{% for m in messages %}[" + content + "]{% endfor %}"
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes"}]
    rendered = Tokenizer(directory).render_chat(messages, continues_last=continues)
    assert rendered == (text.rpartition("yes")[0] + "yes" if continues else text)


def test_a_model_of_several_modalities_names_sizes_and_ends_of_its_text(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    text = {"vocab_size": 400, "max_position_embeddings": 77, "eos_token_id": 5}
    fields = {"model_type": "gemma3", "eos_token_id": [6, 7], "max_position_embeddings": None}
    (directory / "config.json").write_text(json.dumps(fields | {"text_config": text}))
    tokenizer = Tokenizer(directory)
    assert (tokenizer.vocab_size, tokenizer.max_model_len) == (400, 77)
    assert {6, 7} <= tokenizer.eos_ids
    assert 5 not in tokenizer.eos_ids


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "no chat template; use plain completions"),
        ("{% for %}", "does not parse"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|immutable|not safely callable"),
        ("{{ raise_exception.__globals__.os }}", "unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}", "too big"),
        ("{% include '/etc/passwd' %}", "refuses"),
    ],
    ids=[
        "none",
        "syntax",
        "raised",
        "type",
        "undefined",
        "class",
        "mutation",
        "globals",
        "endless",
        "include",
    ],
)
def test_bad_templates_are_refused(tmp_path: Path, template: str | None, says: str) -> None:
    tokenizer = Tokenizer(write_model(tmp_path, chat_template=template))
    with pytest.raises(ChatTemplateError, match=says):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.encode("Hello").size == 2  # completions still work


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
@pytest.mark.parametrize("content", [None, "{", "[]"], ids=["missing", "cut-off", "other-json"])
def test_damaged_files(tmp_path: Path, name: str, content: str | None) -> None:
    path = write_model(tmp_path) / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(UnreadableTokenizer, match=name):
        Tokenizer(tmp_path)


def test_loads_neither_torch_nor_transformers(default_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lightkv.router.text.tokenizer import Tokenizer;"
        f"Tokenizer(Path({str(default_dir)!r})).encode('a');"
        "sys.exit(' '.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Streams


@texts
@pytest.mark.parametrize("size", [1, 2, 5])
def test_stream_equals_decode(tokenizer: Tokenizer, text: str, size: int) -> None:
    pieces = pieces_of(tokenizer, tokenizer.encode(text).tolist(), size)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)  # no piece ends within a character


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_stream_of_any_ids_equals_decode(byte_level: Tokenizer, data: st.DataObject) -> None:
    # The first ids are special tokens and single bytes, most of which are not UTF-8; the last are unknown.
    some_id = st.one_of(st.integers(0, 300), st.integers(0, 49151), st.integers(49152, 49160))
    token_ids = data.draw(st.lists(some_id, max_size=40))
    pieces = pieces_of(byte_level, token_ids, data.draw(st.integers(1, 4)))
    assert "".join(pieces) == byte_level.decode(token_ids)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=30), size=st.integers(1, 4))
def test_stream_of_any_text_equals_decode(byte_fallback: Tokenizer, text: str, size: int) -> None:
    token_ids = byte_fallback.encode(text).tolist()
    assert "".join(pieces_of(byte_fallback, token_ids, size)) == byte_fallback.decode(token_ids)


def test_text_comes_as_soon_as_it_is_certain(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("Hello world!", add_special_tokens=False).tolist()
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for i, token_id in enumerate(token_ids):
        shown += detokenizer.push([token_id])
        assert shown == tokenizer.decode(token_ids[: i + 1])


def test_push_costs_the_same_however_long_the_stream(
    byte_fallback: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode: Callable[..., str] = Tokenizer.decode

    def counting(self: Tokenizer, token_ids: list[int], skip_special_tokens: bool) -> str:
        decoded.append(len(token_ids))
        return decode(self, token_ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    detokenizer = Detokenizer(byte_fallback)
    for token_id in [*range(3, 259)] * 4:  # a series of bytes, most of which never complete a character
        decoded.clear()
        detokenizer.push([token_id])
        assert sum(decoded) <= 51  # 17 shown last, 17 held, and those 17 again when they are shown


def test_byte_level_stream_decodes_nothing_twice(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = byte_level.encode("one two three").tolist()
    monkeypatch.setattr(Tokenizer, "decode", None)
    assert "".join(pieces_of(byte_level, token_ids)) == "one two three"


# Stop strings


def first_stop(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """Returns (end, start, stop) of the first stop string, by comparing all occurrences."""
    return min(
        (
            (start + len(stop), start, stop)
            for stop in stops
            for start in range(len(text))
            if text.find(stop, start) == start
        ),
        default=None,
    )


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text("ab\n", max_size=5), max_size=8),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    include_stop=st.booleans(),
)
def test_stops_where_a_search_of_the_whole_text_does(
    pieces: list[str], stops: list[str], include_stop: bool
) -> None:
    text = "".join(pieces)
    checker = StopChecker(stops, include_stop)
    shown = ""
    for i, piece in enumerate(pieces):
        shown += checker.push(piece)
        so_far = "".join(pieces[: i + 1])
        if checker.hit is None:
            # Everything is shown except what might begin a stop string.
            begun = [n for stop in stops for n in range(1, len(stop)) if so_far.endswith(stop[:n])]
            assert shown == so_far[: len(so_far) - max(begun, default=0)]
    shown += checker.finish()
    found = first_stop(text, stops)
    if found is None:
        assert (shown, checker.hit) == (text, None)
    else:
        end, start, stop = found
        assert (shown, checker.hit) == (text[: end if include_stop else start], stop)
    assert checker.finish() == ""


@settings(max_examples=120, deadline=None)
@given(
    skipped=st.lists(st.text("ab\n", max_size=4), max_size=4),
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=6),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
)
def test_no_stop_string_ends_in_skipped_text(skipped: list[str], pieces: list[str], stops: list[str]) -> None:
    checker = StopChecker(stops)
    shown = "".join([*map(checker.skip, skipped), *map(checker.push, pieces)]) + checker.finish()
    num_skipped, text = len("".join(skipped)), "".join(skipped + pieces)
    ends = [
        (start + len(stop), start, stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > num_skipped
    ]
    _, start, stop = min(ends, default=(len(text), len(text), None))
    assert (shown, checker.hit) == (text[:start], stop)


def test_stop_string_across_pieces() -> None:
    checker = StopChecker(["\n\nUser:"])
    assert [checker.push(piece) for piece in ["Hi.", "\n", "\nUs", "e", "r: x", "more"]] == ["Hi.", *[""] * 5]
    assert checker.hit == "\n\nUser:"
    assert checker.finish() == ""


def test_text_that_only_began_like_a_stop_string_is_shown() -> None:
    checker = StopChecker(["</s>"])
    assert [checker.push(piece) for piece in ["a<", "/", "b", "</"]] == ["a", "", "</b", ""]
    assert checker.finish() == "</"
    assert checker.hit is None


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        StopChecker(["a", ""])


def test_a_word_is_banned_at_the_beginning_of_a_text_and_after_a_space(byte_level: Tokenizer) -> None:
    both = [tuple(byte_level.encode(text, add_special_tokens=False).tolist()) for text in ("cat", " cat")]
    assert both[0] != both[1]
    assert token_sequences(["cat"], byte_level) == both
    asked = SamplingParams(bad_words=["cat"], bad_words_ids=[(5, 6)])
    assert with_banned_ids(asked, byte_level) == SamplingParams(bad_words_ids=[(5, 6), *both])
