"""Thousands of replays of a decode step's memory work in a CUDA graph, with eager verbs in between.

The graph is the one that `router/model/cuda_graph.py` captures: a kernel that allocates slots and writes them
into the table, and an increment of the positions. The same edits are applied one by one, without a graph, to a
second memory on the CPU. Free slots, tables and the order of slots have to be equal in both. Only the
comparisons synchronise.
"""

import random
from array import array

import numpy as np
import pytest
import torch

from lightkv import KVSpec, OutOfRows, OutOfTokens, SequenceTooLong, TokenLedger
from lightkv.edits import Alloc
from lightkv.ledger.sequence import Sequence
from lightkv.memory.kv_memory import KVMemory
from lightkv.memory.staging import upload
from lightkv.triton_kernels.slots.allocate import TableEntries

SPEC = KVSpec(num_layers=1, num_kv_heads=1, k_dim=1, v_dim=1, dtype=torch.float32)
CAPACITY, ROWS, ENTRIES, BATCH = 3000, 24, 400, 24
NUM_REPLAYS = 10_000
DEVICE = torch.device("cuda")

pytestmark = pytest.mark.gpu


class DecodeStep:
    """One graph that allocates a slot for each row of a batch, writes it into the table, and increments every
    row's position. It reads only device memory."""

    def __init__(self, memory: KVMemory) -> None:
        self.memory = memory
        device = memory.device
        self.rows = torch.zeros(BATCH, dtype=torch.int64, device=device)
        self.positions = torch.zeros(BATCH, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self.slots = torch.zeros(BATCH, dtype=torch.int32, device=device)
        self.next: Alloc | None = None  # the edit that the tensors are ready for
        self.num_uploads = 0
        self._step()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()

    def _step(self) -> None:
        entries = TableEntries(self.memory.table.req_to_token, self.positions, self.rows)
        self.memory.allocator.alloc_into(self.slots, self.count, entries)
        self.positions.add_(self.rows > 0)

    def replay(self, alloc: Alloc) -> None:
        """Applies the edit. Uploads nothing if it follows the one before."""
        num = len(alloc.rows)
        if alloc != self.next:
            numbers = np.zeros((2, BATCH), dtype=np.int64)
            numbers[0, :num], numbers[1, :num] = alloc.rows, alloc.starts
            rows, positions = upload([numbers[0], numbers[1]], self.memory.device)
            self.rows.copy_(rows)
            self.positions.copy_(positions)
            self.count.fill_(num)
            self.num_uploads += 1
        self.memory.allocator.claim(num)
        self.graph.replay()
        self.next = alloc._replace(starts=tuple(start + 1 for start in alloc.starts))


def test_replays_and_eager_verbs_mix_freely() -> None:
    rng = random.Random(0)
    ledger = TokenLedger(CAPACITY, ROWS, ENTRIES)
    memory = KVMemory(SPEC, CAPACITY + 1, ROWS, ENTRIES, DEVICE)
    mirror = KVMemory(SPEC, CAPACITY + 1, ROWS, ENTRIES, torch.device("cpu"))
    step = DecodeStep(memory)
    open_now: list[Sequence] = []
    kept: list[torch.Tensor] = []  # of each KeepEntries that is not applied yet
    families = [[rng.randrange(4) for _ in range(120)] for _ in range(4)]
    num_verbs = num_released_again = 0

    def verb() -> None:
        nonlocal num_released_again
        kind = rng.choice(
            ["open", "open", "fork", "truncate", "release", "keep", "close", "publish", "evict"]
        )
        chosen = rng.choice(open_now) if open_now else None
        if kind == "open":
            prompt = rng.choice(families)[: rng.randint(2, 120)]
            sequence = ledger.open(array("i", prompt).tobytes())
            open_now.append(sequence)
            ledger.extend([sequence], [len(prompt) - sequence.length])
        elif kind == "evict":
            ledger.evict(rng.randint(0, min(50, ledger.num_cached)))
        elif chosen is None:
            return
        elif kind == "fork":
            open_now.append(ledger.fork(chosen))
        elif kind == "truncate":
            ledger.truncate(chosen, rng.randint(0, chosen.length))
        elif kind == "release":
            sink_tokens = chosen.gap.start if chosen.dropped else min(4, chosen.length)
            num_released_again += chosen.dropped > 0
            ledger.release(chosen, rng.randint(0, chosen.length - sink_tokens), sink_tokens)
        elif kind == "keep":
            choice = range(max(chosen.shared, chosen.gap.start), chosen.length)
            entries = rng.sample(choice, rng.randint(0, len(choice)))
            if ledger.keep(chosen, len(entries)):
                kept.append(torch.tensor(entries, dtype=torch.int64))
        elif kind == "publish":
            ledger.publish(chosen)
            ledger.confirm(ledger.step)
        elif kind == "close":
            open_now.remove(chosen)
            ledger.close(chosen, array("i", [5] * 20).tobytes(), rng.random() < 0.7)

    def agree() -> None:
        ledger.check()
        memory.check(ledger.holdings())
        mirror.check(ledger.holdings())
        assert memory.num_free == mirror.num_free == ledger.num_free == int(memory.allocator.counters[0])
        assert torch.equal(memory.allocator.mem_state.cpu(), mirror.allocator.mem_state)
        for s in ledger.sequences:
            slots = memory.table.slots(s.row, 0, s.length).cpu()
            assert torch.equal(slots, mirror.table.slots(s.row, 0, s.length))
            positions = memory.positions(s.row, s.length).cpu()
            assert torch.equal(positions, mirror.positions(s.row, s.length))

    def one_step() -> None:
        nonlocal num_verbs
        if rng.random() < 0.2:
            try:
                verb()
                num_verbs += 1
            except (OutOfRows, OutOfTokens, SequenceTooLong):
                pass
        growing = [s for s in open_now if s.length < ENTRIES][:BATCH]
        while growing and ledger.num_available < len(growing):
            ledger.close(open_now.pop(0), cache=False)
            growing = [s for s in open_now if s.length < ENTRIES][:BATCH]
        ledger.extend(growing, [1] * len(growing))
        edits = ledger.drain()
        mirror.apply(edits, kept)
        on_device = [upload([entries.numpy()], memory.device)[0] for entries in kept]
        kept.clear()
        if growing:
            assert isinstance(edits[-1], Alloc)
            memory.apply(edits[:-1], on_device)
            step.replay(edits[-1])
        else:
            memory.apply(edits, on_device)

    for _ in range(NUM_REPLAYS // 1000):
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(1000):
                one_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        agree()
    assert num_verbs > NUM_REPLAYS / 20
    assert num_released_again > NUM_REPLAYS / 1000
    assert NUM_REPLAYS / 20 < step.num_uploads < NUM_REPLAYS / 2
