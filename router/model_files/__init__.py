"""A model's files: where they are found, whether they are whole, and the default model's conversion. No torch.

A model's directory has the Hugging Face layout (config.json, model.safetensors or its shards, tokenizer.json).
`router/model/loader.py` makes a model of the files.
"""

from .files import (
    DEFAULT_MODEL,
    ModelNotFound,
    UnreadableWeights,
    in_line,
    missing_files,
    one_line,
    read_json,
    require_whole,
    weight_files,
)
from .search import resolve

__all__ = [
    "DEFAULT_MODEL",
    "ModelNotFound",
    "UnreadableWeights",
    "in_line",
    "missing_files",
    "one_line",
    "read_json",
    "require_whole",
    "resolve",
    "weight_files",
]
