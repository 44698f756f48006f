"""Finds a model's files, checks that they are complete, and converts the default model. Loads no torch.

A model's directory has the Hugging Face layout: config.json, tokenizer.json, model.safetensors or its shards.
`router/model/loader.py` makes a model of the files.
"""

from .files import DEFAULT_MODEL as DEFAULT_MODEL
from .files import INDEX as INDEX
from .files import ModelNotFound as ModelNotFound
from .files import StoredTensor as StoredTensor
from .files import UnreadableWeights as UnreadableWeights
from .files import in_line as in_line
from .files import list_some as list_some
from .files import one_line as one_line
from .files import read_json as read_json
from .files import refuse_pointer as refuse_pointer
from .files import require_whole as require_whole
from .files import stored_tensors as stored_tensors
from .files import weight_files as weight_files
from .search import local_models as local_models
from .search import resolve as resolve
