"""Compares the lives of requests of models with layer groups with a simulation of every step."""

import random
from operator import ge
from typing import NamedTuple

import numpy as np
import pytest

from lightkv.layer_groups import FULL, LayerGroups, Lifetime
from lightkv.router.engine.prefill_budget import PrefillWindow
from lightkv.router.engine.slots.lives import (
    Held,
    Life,
    Run,
    Start,
    Sums,
    decoding,
    most_kept,
    most_slots,
    prefilling,
)
from tests.support.combinations import slow
from tests.support.slot_steps import Row, Window, layers, simulate

STEP = 7  # the number of the next step


def random_groups(rng: random.Random) -> LayerGroups:
    classes = [(FULL, rng.randint(1, 3))]
    for _ in range(rng.randint(1, 3)):
        size = rng.choice((1, 2, 3, 5, 9))
        classes.append((Lifetime(rng.choice(("window", "chunk")), size), rng.randint(1, 4)))
    return layers(*classes)


class Case(NamedTuple):
    """A request as the lives take it, and as the simulation does."""

    start: Start
    row: Row
    left: int  # tokens of its prompt that are not computed
    decodes: int

    def runs(self, cls: int) -> dict[Run, dict[int, object]]:
        """Returns the runs of a class, each with the slots that it has in the simulation."""
        return dict(zip(self.start.held[cls].runs, self.row.windows[cls].runs, strict=True))


def random_case(rng: random.Random, groups: LayerGroups, prefill: bool, most: int = 1000) -> Case:
    """Returns a request of any length that has hit a prefix of any length, or none. Its last chunk had up to
    `most` tokens."""
    longest = rng.choice((4, 12, 12, 12, 30))
    hit = rng.choice((0, rng.randint(0, longest)))
    prompt = hit + rng.randint(1, longest)
    length = rng.randint(hit, prompt - 1) if prefill else prompt
    decodes = rng.choice((rng.randint(0, 5), rng.randint(0, 3 * longest)))
    points = [point for point in sorted({rng.randint(0, prompt), prompt}) if max(hit, length) <= point]
    if not prefill and rng.random() < 0.3:
        points = []  # as of one that goes on decoding
    held, windows = [], []
    for one in groups.classes[1:]:
        lifetime = one.lifetime
        before = rng.randint(max(hit, length - most), length)  # the length before its last growth
        kept = lifetime.first_kept(before)
        runs: list[Run] = []
        end = hit
        while end > kept:  # as a hit has mapped them: whole
            begin = rng.randint(max(end - lifetime.size - 70, 0), end - 1)
            runs.insert(0, Run(begin, end))
            end = begin
        own = max(hit, kept)
        held.append(Held(tuple(runs), own))
        entries = [{p: object() for p in range(run.begin, run.end)} for run in runs]
        windows.append(Window(lifetime, entries, range(own, length)))
    start = Start(length, tuple(held), tuple(points))
    row = Row(groups, length, windows, list(points), prompt, decodes)
    return Case(start, row, prompt - length, decodes)


def slots_of(lives: list[Life], num: int) -> list[int]:
    """Returns the slots of these lives in each of `num` steps, from STEP on."""
    pieces = [piece for life in lives for piece in life.pieces]
    return Sums(pieces).at(np.arange(STEP, STEP + num)).tolist()


def peak_of(lives: list[Life]) -> int:
    """Returns their peak from STEP on, from what is held just before their drops alone."""
    sums = Sums([piece for life in lives for piece in life.pieces])
    ends = sums.drops[np.searchsorted(sums.drops, STEP) :]
    return int(sums.at(ends).max(initial=0))


def fixed_window(rng: random.Random, left: int) -> PrefillWindow:
    most = rng.randint(1, rng.choice((4, 100)))
    now = rng.choice((0, min(left, most), rng.randint(0, min(left, most))))
    last = -(-(left - now) // most)
    return PrefillWindow(left, now, most, last, fixed=True)


def chunks_of(window: PrefillWindow) -> list[int]:
    chunks = [window.now]
    while (left := window.left - sum(chunks)) > 0:
        chunks.append(min(left, window.most))
    return chunks


def check_exact(seed: int, num_cases: int) -> None:
    rng = random.Random(seed)
    for _ in range(num_cases):
        groups, lag = random_groups(rng), rng.randint(0, 1)
        cases = [random_case(rng, groups, False) for _ in range(rng.randint(0, 4))]
        lives = [decoding(groups, case.start, STEP, case.decodes, lag) for case in cases]
        chunks: list[dict[int, int]] = []
        if rng.random() < 0.7 or not cases:
            case = random_case(rng, groups, True)
            window = fixed_window(rng, case.left)
            lives.append(prefilling(groups, case.start, STEP, window, case.decodes, lag))
            chunks = [{len(cases): count} for count in chunks_of(window)]
            cases.append(case)
        mosts, _ = simulate(groups, [case.row for case in cases], lag, chunks)
        slots = slots_of(lives, len(mosts))
        assert max(life.last for life in lives) == STEP + len(mosts) - 1 or not mosts
        assert peak_of(lives) == max(slots, default=0)
        assert slots == mosts if not lag else all(map(ge, slots, mosts))


@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_a_life_is_what_the_simulation_holds_in_every_step(seed: int) -> None:
    check_exact(seed, 1500)


def start_of(row: Row) -> Start:
    """Returns where a row of the simulation stands."""
    held = []
    for window in row.windows:
        runs = tuple([Run(min(run), max(run) + 1) for run in window.runs])
        held.append(Held(runs, min(window.own, default=max(row.length, runs[-1].end if runs else 0))))
    return Start(row.length, tuple(held), tuple(row.points))


def check_bound(seed: int, num_cases: int) -> None:
    """Computes prompts in any way that their windows allow. What is held is never more than was foretold, and
    what is foretold never becomes more, from any step to the end."""
    rng = random.Random(seed)
    for _ in range(num_cases):
        groups, lag = random_groups(rng), rng.randint(0, 1)
        most = rng.randint(1, 9)
        case = random_case(rng, groups, True, most)
        row, left = case.row, case.left
        now = rng.randint(0, min(left, most))
        last = -(-(left - now) // most) + rng.randint(0, 6)
        life = prefilling(groups, case.start, 0, PrefillWindow(left, now, most, last), case.decodes, lag)
        foretold = Sums(life.pieces).at(np.arange(life.last + 1))
        assert life.last == last + case.decodes + lag
        step, room = 0, now
        while left:
            needed = left - (last - step) * most  # so that the rest can be computed in time
            count = rng.choice((max(needed, 0), rng.randint(max(needed, 0), min(left, room))))
            if count:
                row.release()
                row.take(count)
            assert row_slots(groups, row) <= foretold[step]
            left, step, room = left - count, step + 1, most
            last = rng.randint(step + max(-(-left // most) - 1, -1), last)
            if not left:
                life = decoding(groups, start_of(row), step, case.decodes, lag)
            else:
                fixed = rng.random() < 0.2 and step + -(-left // most) - 1 <= last
                window = PrefillWindow(left, min(left, most), most, last - step, fixed)
                if fixed:
                    window = window._replace(last=-(-left // most) - 1)
                again = prefilling(groups, start_of(row), step, window, case.decodes, lag)
                steps = np.arange(step, len(foretold))
                assert (Sums(again.pieces).at(steps) <= foretold[step:]).all()
                if not fixed:
                    foretold[step:] = Sums(again.pieces).at(steps)
        steps = np.arange(step, len(foretold))
        assert (Sums(life.pieces).at(steps) <= foretold[step:]).all()


def row_slots(groups: LayerGroups, row: Row) -> int:
    return start_of(row).num_slots(groups)


@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_a_bound_is_never_too_low_and_never_rises(seed: int) -> None:
    check_bound(seed, 3000)


def test_no_request_holds_more_than_the_most() -> None:
    rng = random.Random(5)
    for _ in range(1500):
        groups, most = random_groups(rng), rng.randint(1, 9)
        case = random_case(rng, groups, True, most)
        tails = [most_kept(one.lifetime) for one in groups.classes[1:]]
        held = zip(tails, case.start.held, strict=True)
        if any(run.end - run.begin > tail for tail, one in held for run in one.runs):
            continue  # no tail is as long
        window = PrefillWindow(case.left, min(case.left, most), most, -(-case.left // most) - 1, fixed=True)
        life = prefilling(groups, case.start, 0, window, case.decodes, 0)
        slots = Sums(life.pieces).at(np.arange(life.last + 1))
        assert slots.max() <= most_slots(groups, case.row.end, most)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_lives_and_bounds_in_many_cases(seed: int) -> None:
    check_exact(seed, 20_000)
    check_bound(seed, 20_000)


def test_a_request_that_ends_early_holds_no_more_than_was_foretold() -> None:
    """With two steps in flight, it is held for one more step, in which it releases nothing."""
    rng = random.Random(6)
    fell = 0
    for _ in range(1500):
        groups = random_groups(rng)
        case = random_case(rng, groups, False)
        row = case.row
        life = decoding(groups, case.start, 0, case.decodes, 1)
        foretold = Sums(life.pieces).at(np.arange(life.last + 1)).tolist()
        for step in range(rng.randint(0, case.decodes)):
            row.release()
            row.take(1)
            assert row_slots(groups, row) <= min(foretold[step : step + 2])
            fell += foretold[step] > foretold[step + 1]
    assert fell > 1000


def test_without_a_lag_a_drop_counts_at_once() -> None:
    """The window's 4 tokens and the slack of 4 stay, and the prompt's tail until it has passed."""
    groups = layers((FULL, 1), (Lifetime("window", 4), 2))
    start = Start(10, (Held((), 3),), (10,))
    steps = np.arange(10)
    slots = Sums(decoding(groups, start, 1, 9, 0).pieces).at(steps) - np.arange(10, 20)
    assert slots.tolist() == [14, 16, 18, 20, 22, 24, 26, 28, 16, 16]
    slots = Sums(decoding(groups, start, 1, 9, 1).pieces).at(steps) - np.arange(10, 20)
    assert slots.tolist() == [14, 16, 18, 20, 22, 24, 26, 28, 30, 16]
