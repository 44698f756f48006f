"""Finds a model's files, checks that they are complete, and converts the default model. Loads no torch.

A model's directory has the Hugging Face layout: config.json, tokenizer.json, model.safetensors or its shards.
`router/model/loader.py` makes a model of the files.
"""

from .files import (
    DEFAULT_MODEL,
    INDEX,
    ModelNotFound,
    StoredTensor,
    UnreadableWeights,
    in_line,
    list_some,
    missing_files,
    one_line,
    read_json,
    refuse_pointer,
    require_whole,
    stored_tensors,
    weight_files,
)
from .search import local_models, resolve

__all__ = [
    "DEFAULT_MODEL",
    "INDEX",
    "ModelNotFound",
    "StoredTensor",
    "UnreadableWeights",
    "in_line",
    "list_some",
    "local_models",
    "missing_files",
    "one_line",
    "read_json",
    "refuse_pointer",
    "require_whole",
    "resolve",
    "stored_tensors",
    "weight_files",
]
