"""The passes of a step over layers with states: eager ones, and those in tensors that never move."""

import random
from itertools import accumulate

import numpy as np
import pytest
import torch

from lightkv.integrations.model.mixers.mixer import mixers_of
from lightkv.memory.kv_spec import KVSpec
from lightkv.memory.state_memory import StateMemory, StateSlots
from lightkv.memory.state_passes import CHUNK, SHORT, StatePass, StaticPasses, state_passes
from tests.support.hybrid_models import hybrid

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
MIXER = mixers_of(hybrid("Qwen3_5ForCausalLM"))[0]
SPEC = KVSpec(1, 1, 8, 8, torch.float32, states=[MIXER.tensors])


def memory(seed: int) -> StateMemory:
    """Returns states of noise, of which each row reads one and writes another."""
    states = StateMemory(SPEC, 60, 12, 1, CPU)
    generator = torch.Generator().manual_seed(seed)
    for tensor in states.tensors:
        tensor[1:] = torch.randn(tensor[1:].shape, generator=generator)
    states.of_rows[1:] = [(row, row + 1) for row in range(1, 25, 2)]
    return states


def computed(states: StateMemory, x: torch.Tensor, passes: list[StatePass]) -> torch.Tensor:
    (state,) = states.layers
    with torch.no_grad():
        return MIXER.forward(x, passes, state)


@pytest.mark.parametrize("seed", range(3))
def test_static_passes_compute_what_eager_ones_do(seed: int) -> None:
    """Prompts in one piece and in two, beside decodes. In static tensors decodes come first, then prompts, then
    padding."""
    rng = random.Random(seed)
    rows, counts, earlier = list[int](), list[int](), dict[int, tuple[int, int]]()
    for row in range(1, rng.randint(2, 5)):
        pieces = [rng.randint(1, 90)] + [rng.randint(1, SHORT)] * (rng.random() < 0.6)
        if len(pieces) > 1:  # it writes a snapshot, from which the second goes on
            earlier[len(rows)] = 2 * row - 1, 30 + row
        rows += [row] * len(pieces)
        counts += pieces
    num_prefills = len(rows)
    decodes = list(range(6, 6 + rng.randint(0, 3)))
    rows, counts = rows + decodes, counts + [1] * len(decodes)
    eager, static = memory(seed), memory(seed)
    for states in (eager, static):
        for part, known in earlier.items():
            states.of_rows[rows[part]] = known[1], states.of_rows[rows[part]][1]
    x = torch.randn(sum(counts), 32, generator=torch.Generator().manual_seed(seed))
    wanted = computed(eager, x, state_passes(eager, rows, counts, num_prefills, earlier))

    places, num_tokens = 10, sum(counts) + 7
    passes = StaticPasses(static, num_tokens, places, 4)
    assert passes.fits(rows, counts, num_prefills)
    begins = list(accumulate([len(decodes), *counts[:num_prefills]]))
    begins += [begins[-1]] * (places - len(begins)) + [num_tokens]
    num_prompt = sum(counts[:num_prefills])
    placed = torch.cat((x[num_prompt:], x[:num_prompt], torch.zeros(7, 32)))
    q_starts = torch.tensor(begins, dtype=torch.int32)
    for _ in range(2):  # what an earlier step has left does not matter
        loaded = passes.load(rows, counts, num_prefills, earlier, q_starts)
        kept = [tensor.clone() for tensor in static.tensors]
        found = computed(static, placed, loaded)
        after = [tensor.clone() for tensor in static.tensors]
        for tensor, before in zip(static.tensors, kept, strict=True):
            tensor.copy_(before)
    found = torch.cat((found[len(decodes) : len(decodes) + num_prompt], found[: len(decodes)]))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(after, eager.tensors, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert not ours[0].any()


def test_pieces_that_static_tensors_have_no_room_for() -> None:
    passes = StaticPasses(memory(0), 400, 5, 4)
    assert passes.fits([1, 1, 2], [90, SHORT, 1], 2)
    assert not passes.fits([1, 1, 2], [90, SHORT + 1, 1], 2)  # the second piece is long
    assert not passes.fits([1, 1, 1], [9, 9, 9], 3)  # a third piece


@pytest.mark.parametrize("counts", [[1], [64], [65, 0, 200], [0, 3, 128]])
def test_chunks_stand_in_order_and_behind_them_none_that_has_tokens(counts: list[int]) -> None:
    starts = torch.tensor([5, *(5 + np.cumsum(counts))], dtype=torch.int32)
    wanted = [(i, j) for i, count in enumerate(counts) for j in range(-(-count // CHUNK))]
    one = StatePass(slice(0, 400), starts, StateSlots(torch.zeros(1), torch.zeros(1)), len(wanted) + 3)
    last, num = len(counts) - 1, -(-counts[-1] // CHUNK)
    behind = [(last, num + more) for more in range(3)]
    assert one.chunks.places.tolist() == [list(pair) for pair in [*wanted, *behind]]
    assert one.chunks.bounds.tolist() == starts.tolist()
