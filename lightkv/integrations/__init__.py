"""Adapters to Hugging Face models. Importing one raises MissingExtra if transformers is not installed."""

from importlib.util import find_spec

from lightkv.errors import MissingExtra

if find_spec("transformers") is None:
    raise MissingExtra("transformers")
