"""The objects that the runner and its CUDA graphs share."""

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedModel

from lightkv.attention import AttentionBackend
from lightkv.memory.kv_memory import KVMemory

from .sampler import Sampler


class RunnerParts(NamedTuple):
    """The model, the attention backend of each layer, the memory and the sampler."""

    model: PreTrainedModel
    backends: Sequence[AttentionBackend]
    memory: KVMemory
    sampler: Sampler
