"""A decode step over rings as a CUDA graph, which moves lengths, positions and slots on by itself."""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from transformers import PreTrainedModel

from lightkv.ledger.sequence import Sequence
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

    def __init__(self, model: PreTrainedModel, step: PackedStep, ring: Ring, size: int) -> None:
        self._model = model
        self._ring = ring
        self._metadata = step.metadata.create_cuda_graph_metadata(size)
        self._step = PackedStep(self._metadata, step.backends)
        self._input_ids = torch.zeros(size, dtype=torch.int64, device=self._metadata.memory.device)
        self._next: tuple[list[int], list[int]] | None = None  # rows and positions that the tensors hold
        self._graph, self._logits = self._capture()

    def replay(self, sequences: Seq[Sequence], starts: list[int], token_ids: np.ndarray) -> torch.Tensor:
        """Computes a token of each sequence at positions `starts`. Returns the logits, `[size, vocabulary]`,
        which the next replay overwrites. `token_ids`: int64 `[size]`."""
        rows = [one.row for one in sequences]
        if self._next != (rows, starts):
            self._metadata.prepare(rows, starts, [1] * len(rows), 0, ring=self._ring)
        self._next = None  # in case this fails
        self._input_ids.copy_(upload([token_ids], self._input_ids.device)[0])
        self._graph.replay()
        self._next = rows, [start + 1 for start in starts]
        return self._logits

    def compute(self) -> torch.Tensor:
        """Runs what is captured: the step, and the move to the next one."""
        metadata = self._metadata
        rows, positions = metadata.rows, metadata.position_ids
        ring_slots(metadata.index, rows, positions, self._ring, metadata.slot_mapping)
        logits = compute(self._model, self._input_ids, positions, self._step, None)
        active = rows > 0
        positions.add_(active)
        metadata.kv_lens.add_(active)
        return logits

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        self._metadata.prepare([], [], [], 0, ring=self._ring)  # padding alone
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.compute()  # compiles kernels and lets libraries set themselves up
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            logits = self.compute()
        return graph, logits
