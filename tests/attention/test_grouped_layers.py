"""Layers that share slots in groups attend as those of a memory in which each token has one slot for all."""

from array import array
from dataclasses import dataclass, field

import pytest
import torch

from lightkv import KVSpec
from lightkv.attention import AttentionOptions, Batch, BatchShape, LayerShape, StaticStep, Step, make_backends
from lightkv.layer_groups import FULL, Lifetime
from lightkv.ledger import TokenLedger
from lightkv.ledger.sequence import Sequence
from lightkv.memory.kv_memory import KVMemory
from lightkv.triton_kernels.attention.variants import Chunk, Window

WINDOW, CHUNK = Lifetime("window", 5), Lifetime("chunk", 6)
OPTIONS = {
    FULL: AttentionOptions(),
    WINDOW: AttentionOptions().plus(Window(WINDOW.size)),
    CHUNK: AttentionOptions().plus(Chunk(CHUNK.size)),
}
LIFETIMES = {
    "window": [WINDOW, FULL, WINDOW, WINDOW, WINDOW, FULL],
    "window and chunk": [CHUNK, WINDOW, FULL],
}
ROWS, ENTRIES, SLOTS = 3, 48, 400

# How many tokens each sequence computes in each step; those with one token in a step are decodes. Windows and
# chunks pass tokens in the second step, and slots are used again in the later ones.
STEPS = [[17, 5, 0], [1, 9, 3], [1, 1, 1], [1, 1, 14], *[[1, 1, 1]] * 4]


@dataclass
class Layers:
    """A memory with its ledger, and a backend for each layer."""

    name: str
    lifetimes: list[Lifetime]
    are_grouped: bool
    device: torch.device
    is_static: bool
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        lifetimes = self.lifetimes if self.are_grouped else None
        spec = KVSpec(len(self.lifetimes), 1, 16, 16, torch.float32, lifetimes=lifetimes)
        assert spec.groups.is_uniform != self.are_grouped
        self.ledger = TokenLedger(SLOTS, ROWS, ENTRIES, groups=spec.groups)
        self.memory = KVMemory(spec, SLOTS + 1, ROWS, ENTRIES, self.device)
        shapes = [LayerShape(2, 16, 1, OPTIONS[one]) for one in self.lifetimes]
        self.backends = make_backends(self.name, self.device, shapes)
        self.sequences += [self.ledger.open(array("i", [row] * 40).tobytes()) for row in range(ROWS)]
        self.static = StaticStep(BatchShape(32, ROWS + 1, ROWS), self.memory)

    def attend(self, counts: list[int], qkv: torch.Tensor) -> list[torch.Tensor]:
        """Returns the output of each layer for a step in which each sequence computes so many tokens, prefills
        first. qkv: `[layers, 4, T, 16]`, two heads of q, then k and v."""
        chosen = sorted((one for one in range(ROWS) if counts[one]), key=lambda one: counts[one] == 1)
        sequences = [self.sequences[one] for one in chosen]
        starts, counts = [one.length for one in sequences], [counts[one] for one in chosen]
        self.ledger.extend(sequences, counts)
        self.memory.apply(self.ledger.drain())
        self.memory.check(self.ledger.holdings())
        batch = Batch.of([one.row for one in sequences], starts, counts, len(counts) - counts.count(1))
        step = self.static.load(batch) if self.is_static else Step.of(batch, self.memory)
        size = sum(counts)
        found = []
        for backend, (q0, q1, k, v) in zip(self.backends, qkv, strict=True):
            padded = [self._placed(x, batch, step) for x in (torch.cat((q0, q1), -1), k, v)]
            out = backend.forward(*padded, step)
            found.append(out[self._places(batch, step)])
            assert len(found[-1]) == size
        return found

    def _places(self, batch: Batch, step: Step) -> torch.Tensor:
        """Returns where the tokens of the batch are in the step: in static tensors, decodes come first."""
        num_decodes = len(batch.rows) - batch.num_prefills
        places = torch.arange(len(batch.positions), device=self.device)
        return places if not self.is_static else places.roll(-num_decodes)

    def _placed(self, x: torch.Tensor, batch: Batch, step: Step) -> torch.Tensor:
        placed = x.new_zeros(step.num_tokens, x.shape[-1])
        placed[self._places(batch, step)] = x
        return placed


@pytest.mark.parametrize("is_static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("lifetimes", LIFETIMES)
def test_grouped_layers_attend_in_torch(lifetimes: str, is_static: bool, device: torch.device) -> None:
    compare("torch", LIFETIMES[lifetimes], is_static, device)


@pytest.mark.parametrize(
    ("lifetimes", "is_static", "num_steps"),
    [
        ("window and chunk", False, 3),
        *(
            pytest.param(name, is_static, len(STEPS), marks=pytest.mark.slow)
            for name in LIFETIMES
            for is_static in (False, True)
        ),
    ],
)
def test_grouped_layers_attend_by_kernels(
    lifetimes: str, is_static: bool, num_steps: int, device: torch.device
) -> None:
    compare("triton", LIFETIMES[lifetimes], is_static, device, num_steps)


def compare(
    backend: str, of: list[Lifetime], is_static: bool, device: torch.device, num_steps: int = len(STEPS)
) -> None:
    """Attends over both memories in each step, and compares the outputs of each layer."""
    torch.manual_seed(0)
    grouped = Layers(backend, of, True, device, is_static)
    uniform = Layers(backend, of, False, device, is_static)
    for counts in STEPS[:num_steps]:
        qkv = torch.randn(len(of), 4, sum(counts), 16, device=device)
        for found, expected in zip(grouped.attend(counts, qkv), uniform.attend(counts, qkv), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    groups = grouped.memory.pool.spec.groups
    used = grouped.memory.capacity - grouped.memory.num_free
    lengths = [one.length for one in grouped.sequences]
    assert used == grouped.ledger.num_held < groups.num_groups * sum(lengths), "windows have passed tokens"


def test_a_lane_is_one_buffer(device: torch.device) -> None:
    spec = KVSpec(6, 1, 16, 16, torch.float32, lifetimes=LIFETIMES["window"])
    pool = KVMemory(spec, 50, ROWS, ENTRIES, device).pool
    assert (spec.groups.num_lanes, spec.groups.widths) == (2, (1, 2))
    addresses = [pool.k(layer).data_ptr() for layer in range(6)]
    of_lane = {lane: addresses[layer] for layer, (_, lane) in spec.groups.places.items()}
    assert addresses == [of_lane[spec.groups.places[layer][1]] for layer in range(6)]
    assert len(set(addresses)) == len(pool.buffers) == 2
    assert pool.num_bytes == 50 * spec.bytes_per_slot == 50 * 2 * 32 * 4
