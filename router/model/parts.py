"""What the parts of a model runner share."""

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedModel

from lightkv.attention import AttentionBackend
from lightkv.memory.kv_memory import KVMemory

from .sampler import Sampler


class RunnerParts(NamedTuple):
    """What a step runs on: the model, its attention layer by layer, the memory and the sampler."""

    model: PreTrainedModel
    backends: Sequence[AttentionBackend]
    memory: KVMemory
    sampler: Sampler
