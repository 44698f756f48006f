"""A decode step over rings as a CUDA graph, which moves lengths, positions and slots on by itself."""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from transformers import PreTrainedModel

from lightkv.attention import AttentionBackend, Batch, BatchShape, StaticStep
from lightkv.attention.forms.rings import over_rings
from lightkv.ledger.sequence import Sequence
from lightkv.memory.capture import Capture
from lightkv.memory.kv_memory import KVMemory
from lightkv.memory.staging import upload
from lightkv.triton_kernels.attention.lookups.ring_rows import ring_slots
from lightkv.triton_kernels.layout.ring import Ring

from .attention_call import compute
from .hf_model import PackedStep


class RingGraph:
    """The captured step of `size` sequences that are rings of one kind.

    A step of the same sequences as before needs an upload of their tokens and one launch. The memory must not
    allocate in it: their slots are there already.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        memory: KVMemory,
        backends: Seq[AttentionBackend],
        ring: Ring,
        size: int,
    ) -> None:
        self._model = model
        self._ring = ring
        self._static = StaticStep(BatchShape.of_decodes(size), memory)
        self._backends = backends
        self._input_ids = torch.zeros(size, dtype=torch.int64, device=memory.device)
        self._next: tuple[list[int], list[int]] | None = None  # rows and positions that the tensors hold
        self.load([], [])  # padding alone
        capture = Capture.new()
        with capture.rehearsal():
            self.compute()
        self._graph, self._logits = capture.graph(self.compute)

    def replay(self, sequences: Seq[Sequence], starts: list[int], token_ids: np.ndarray) -> torch.Tensor:
        """Computes a token of each sequence at positions `starts`. Returns the logits, `[size, vocabulary]`,
        which the next replay overwrites. `token_ids`: int64 `[size]`."""
        rows = [one.row for one in sequences]
        if self._next != (rows, starts):
            self.load(rows, starts)
        self._next = None  # in case this fails
        self._input_ids.copy_(upload([token_ids], self._input_ids.device)[0])
        self._graph.replay()
        self._next = rows, [start + 1 for start in starts]
        return self._logits

    def compute(self) -> torch.Tensor:
        """Runs what is captured: the step, and the move to the next one."""
        step = self._step
        # On the device, where the last step has moved the positions on.
        ring_slots(step.index, step.rows, step.position_ids, self._ring, step.slot_mapping)
        packed = PackedStep(step, self._backends)
        logits = compute(self._model, self._input_ids, step.position_ids, packed, None)
        active = step.rows > 0
        step.position_ids.add_(active)
        step.kv_lens.add_(active)
        return logits

    def load(self, rows: list[int], starts: list[int]) -> None:
        """Loads the numbers of a step at positions `starts`."""
        batch = Batch.of(rows, starts, [1] * len(rows), 0)
        self._next = None
        self._step = self._static.load(over_rings(batch, self._ring))
