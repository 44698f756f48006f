"""A checkpoint of two random layers on which benchmarks run in a test."""

from pathlib import Path

import pytest
import torch

from bench.common import random_checkpoint
from bench.common.random_model import random_model
from tests.support.two_layers import TWO_LAYERS


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two random layers with a tokenizer that has a text for every token."""
    directory = tmp_path_factory.mktemp("bench") / "tiny"
    directory.mkdir()
    torch.manual_seed(0)
    model = random_model(TWO_LAYERS, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight[:256] = 0.0  # these are single bytes, many of which are no text
    model.save_pretrained(directory)
    random_checkpoint.save_tokenizer(directory, TWO_LAYERS.vocab_size)
    return directory
