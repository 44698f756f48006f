"""Random operations on the slot kernels and their references against a model: a Python set of free slots.

They run over pools of small blocks, so that one operation crosses many of them. After each, slots, metadata and
flags are compared with the model's.
"""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightkv.triton_kernels.slots import allocate
from lightkv.triton_kernels.slots.allocate import new_slot_state
from lightkv.triton_kernels.slots.slot_search import CountTiles
from tests.support.slot_model import (
    KERNELS,
    REFERENCES,
    Model,
    Operations,
    in_programs,
    in_two_kernels,
    number,
    poisoned,
)

POOL = st.tuples(st.integers(1, 40), st.sampled_from([1, 4, 16, 64]))  # slots, and those of a block
STEPS = st.lists(
    st.one_of(
        # The length of the output, and the count.
        st.tuples(st.just("alloc"), st.integers(0, 20), st.integers(-1, 24)),
        st.tuples(st.just("run"), st.integers(0, 42), st.just(0)),
        # Slots in use, by their place among these, and any numbers.
        st.tuples(st.just("free"), st.lists(st.integers(0, 60), max_size=12), st.booleans()),
        st.tuples(st.just("free any"), st.lists(st.integers(-5, 45), max_size=6), st.booleans()),
    ),
    max_size=12,
)


def replay(
    operations: Callable[[], Operations], device: torch.device, pool: tuple[int, int], steps: list
) -> None:
    num_slots, block_slots = pool
    state, model = new_slot_state(num_slots, device, block_slots), Model(num_slots)
    model.check(state)
    for name, what, detail in steps:
        alloc_slots, alloc_run, free_slots = operations()
        if name == "alloc":
            out = poisoned(what, device)
            alloc_slots(state, out, number(detail, device))
            assert out.tolist() == model.alloc(what, max(detail, 0))
        elif name == "run":
            out = poisoned(what, device)
            alloc_run(state, out)
            assert out.tolist() == model.alloc_run(what)
        else:
            used = sorted(set(range(1, num_slots)) - model.free)
            if name == "free":
                what = list(dict.fromkeys(used[i % len(used)] for i in what)) if used else []
            dtype = torch.int64 if detail else torch.int32
            free_slots(state, torch.tensor(what, dtype=dtype, device=device))
            model.free_slots(what)
        model.check(state)


IN_KERNELS = {
    "kernels": nullcontext,
    "several programs": lambda: in_programs(4, CountTiles(4, 8)),
    "two kernels": lambda: in_two_kernels(CountTiles(4, 8)),
}


@pytest.mark.parametrize(
    ("operations", "launched", "max_examples"),
    [
        (REFERENCES, nullcontext, 40),
        *((KERNELS, IN_KERNELS[name], 8) for name in ("kernels", "two kernels")),
        *(pytest.param(KERNELS, launched, 40, marks=pytest.mark.slow) for launched in IN_KERNELS.values()),
    ],
    ids=["references", "kernels", "two kernels", *(f"{name}, many examples" for name in IN_KERNELS)],
)
def test_allocations_and_frees_match_the_set(
    device: torch.device,
    operations: Operations,
    launched: Callable[[], AbstractContextManager[object]],
    max_examples: int,
) -> None:
    @given(pool=POOL, steps=STEPS)
    @settings(max_examples=max_examples, deadline=None, derandomize=True)
    def behaves(pool: tuple[int, int], steps: list) -> None:
        replay(lambda: operations, device, pool, steps)

    with launched():
        behaves()


@given(pool=POOL, steps=STEPS, seed=st.integers(0, 1000))
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
def test_kernels_and_references_keep_the_same_metadata(
    device: torch.device, pool: tuple[int, int], steps: list, seed: int
) -> None:
    """Kernels and references take turns on one pool, each on the state that the other has left."""
    rng = random.Random(seed)
    with mock.patch.object(allocate, "MAX_IN_ONE_KERNEL", 8):
        replay(lambda: rng.choice([KERNELS, REFERENCES]), device, pool, steps)
