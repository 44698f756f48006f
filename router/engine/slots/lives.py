"""How many slots a request holds in each of its steps, where some layers see a window or a chunk only.

A request takes a slot for each of its tokens in every layer group. Before it grows, it gives back those that a
class of layers no longer sees. What came from the cache, and the tail of its prompt, it holds as *runs*, each
whole until its last token has passed:

    slots of a class with a window                    ╭───── the end, after which all is freed
                                      ╱│              │
                                    ╱  │ the prompt's tail passes
         ╭──╮ a chunk's end       ╱    ╰───────────────
      ╭──╯  ╰─╮                 ╱        one token comes, one passes
    ╭─╯       ╰───────────────╱
    └──────────────────────────────────────────────────── step
       chunks of the prompt   decode

Between two such *drops* the slots never fall, so the most that a set of requests holds is what it holds now or
just before a drop. A life is therefore a list of *pieces*: steps over which its slots are a line. They are in
steps of the ledger (`TokenLedger.step`), so they stay as they are while a request decodes.

Integers only: nothing here knows the ledger.
"""

from bisect import bisect_right
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from lightkv.layer_groups import LayerGroups, Lifetime
from lightkv.router.engine.prefill_budget import PrefillWindow


class Piece(NamedTuple):
    """Slots over the steps from `first` to `last`: base + slope · step."""

    first: int
    last: int
    base: int
    slope: int


class Run(NamedTuple):
    """The entries [begin, end) of a class, which are held as a whole until the last of them has passed.
    `shared`: whether others hold them, too."""

    begin: int
    end: int
    shared: bool = False


class Hold(NamedTuple):
    """A run and the last step in which it is held, at the latest."""

    run: Run
    last: int


class Held(NamedTuple):
    """What a sequence holds in a class that does not see everything: `runs`, one after the other, up to the
    entry `own`, and its own entries from there on."""

    runs: tuple[Run, ...] = ()
    own: int = 0

    @property
    def start(self) -> int:
        """The first entry that is held."""
        return self.runs[0].begin if self.runs else self.own

    def kept_at(self, point: int, lifetime: Lifetime) -> "Held":
        """Returns what is held once the tail of a prompt that ends at `point` has become a run."""
        if self.own >= point:
            return self
        left = self.left(lifetime.first_kept(point))
        return Held((*left.runs, Run(left.own, point)), point)

    def left(self, passed: int) -> "Held":
        """Returns what is held once the entries before `passed` are seen no more."""
        if self.start >= passed:
            return self
        return Held(tuple([run for run in self.runs if run.end > passed]), max(self.own, passed))


class Life(NamedTuple):
    """The slots of a request over its steps, and of each class from 1 on, the runs that it holds."""

    pieces: list[Piece]
    holds: list[list[Hold]]
    last: int  # the last step in which it holds anything


class Start(NamedTuple):
    """Where a request stands: its tokens, what it holds in each class from 1 on, and the points that it has not
    passed at which it keeps a tail for others, ascending: the end of its prompt, and perhaps others."""

    length: int
    held: tuple[Held, ...]
    points: tuple[int, ...]

    def num_slots(self, groups: LayerGroups) -> int:
        """Returns how many slots it holds."""
        slots = self.length * groups.classes[0].num_groups
        for one, held in zip(groups.classes[1:], self.held, strict=True):
            slots += (self.length - held.start) * one.num_groups
        return slots


class Sums:
    """Pieces of any number of lives, by where they begin and by where they end, with the sums up to each: so
    the slots of any step are two look-ups.

    drops: the steps in which a piece ends, ascending. The slots fall after none but these.
    """

    def __init__(self, pieces: Seq[Piece]) -> None:
        columns = np.array(pieces, np.int64).reshape(-1, 4)
        lines = columns[:, 2:]
        begin, end = columns[:, 0].argsort(), columns[:, 1].argsort()
        self._begins = columns[begin, 0]
        self._ends = columns[end, 1]
        self.drops = np.unique(self._ends)
        self._begun = _sums(lines[begin])
        self._ended = _sums(lines[end])

    def at(self, steps: np.ndarray) -> np.ndarray:
        """Returns the slots in each of these steps."""
        sums = self._begun[np.searchsorted(self._begins, steps, side="right")]
        sums = sums - self._ended[np.searchsorted(self._ends, steps, side="left")]
        return sums[:, 0] + sums[:, 1] * steps


def _sums(lines: np.ndarray) -> np.ndarray:
    sums = np.zeros((len(lines) + 1, 2), np.int64)
    np.cumsum(lines, axis=0, out=sums[1:])
    return sums


def most_kept(lifetime: Lifetime) -> int:
    """Returns the most entries of its own that a sequence keeps when it grows, in such a class."""
    return lifetime.size - 1 + lifetime.slack


def most_slots(groups: LayerGroups, length: int, most: int) -> int:
    """Returns the most slots that a request of up to `length` tokens holds at any time, whatever it hits and
    however its prompt is cut into chunks of up to `most` tokens. This is a bound, not the exact number: it is
    reached where a run as long as a tail may be passes just after a whole chunk has come."""
    slots = 0
    for one in groups.classes:
        count = length
        if one.lifetime.sees != "full":
            count = min(length, 2 * most_kept(one.lifetime) + most)
        slots += count * one.num_groups
    return slots


def longest_held(groups: LayerGroups, capacity: int, most: int) -> int:
    """Returns how many tokens a request may have so that it can run in a pool of `capacity` slots, in chunks of
    up to `most` tokens, whatever it hits: 0 where none fits."""
    if groups.is_uniform:
        return capacity
    return bisect_right(range(1, capacity + 1), capacity, key=lambda length: most_slots(groups, length, most))


def decoding(groups: LayerGroups, start: Start, begin: int, remaining: int, lag: int) -> Life:
    """Returns the life, from the step before `begin` on, of a request that takes one token in each of
    `remaining` steps from `begin` on. It is freed `lag` steps after it has taken the last one.

    It is exact without a lag. With one, a request that ends early is held for a step in which it does not grow,
    so that it releases nothing: what it would release of a class in a step counts in that step, too.
    """
    now = start.num_slots(groups)
    pieces = [Piece(begin - 1, begin - 1, now, 0)]
    end = begin + remaining
    last = end - 1 + lag
    if not remaining:
        if lag:
            pieces.append(Piece(begin, last, now, 0))
        return Life(pieces, [[Hold(run, last) for run in held.runs] for held in start.held], last)
    length, offset = start.length, begin - start.length  # the step in which a length grows, less the length
    width = groups.classes[0].num_groups
    pieces.append(Piece(begin, end - 1, (1 - offset) * width, width))
    final, holds = (length + remaining) * width, []
    for one, old in zip(groups.classes[1:], start.held, strict=True):
        held = _settled(one.lifetime, old, length, start.points)
        released = [run for run in old.runs if run.end <= held.start]
        holds.append([Hold(run, begin - 1 + lag) for run in released])
        for run in held.runs:
            passes = one.lifetime.gone_at(run.end - 1) - 1 + offset
            holds[-1].append(Hold(run, passes + lag if passes < end - 1 else last))
        width, kept = one.num_groups, old.start
        for first, until, base, slope in _lines(one.lifetime, held, length, length + remaining):
            line = (base - slope * offset) * width
            pieces.append(Piece(first + offset, until + offset, line, slope * width))
            if lag:
                late = _late(released + list(held.runs), kept, first + 1 - base - slope * first)
                pieces.append(Piece(first + offset, first + offset, late * width, 0))
                kept = until + 1 - base - slope * until
        in_the_end = held.left(one.lifetime.first_kept(length + remaining - 1))
        final += (length + remaining - in_the_end.start) * width
    if lag:
        pieces.append(Piece(end, last, final, 0))
    return Life(pieces, holds, last)


def _late(runs: list[Run], kept: int, keeps: int) -> int:
    """Returns how many entries to count for one more step, of those that are released when the first one that
    is kept becomes `keeps` instead of `kept`: all of the runs, and its own but for the one that a new token
    makes up for."""
    of_runs = sum([run.end - run.begin for run in runs if kept <= run.begin and run.end <= keeps])
    return of_runs + max(keeps - kept - of_runs - 1, 0)


def prefilling(
    groups: LayerGroups, start: Start, step: int, window: PrefillWindow, decodes: int, lag: int
) -> Life:
    """Returns the life from `step` on, which is planned next, of a request that computes the rest of its prompt
    as `window` says and then takes one token in each of `decodes` steps.

    It is exact where the window is `fixed`. In the step of a chunk it counts with what it holds before or after
    it, whichever is more, since the decodes of the step have got their slots by then; what others hold, too,
    counts with both. Where the window is not
    fixed, the life is a bound: in every step the slots are no fewer than those of any way to compute the
    prompt, and they are no more than those that were foretold a step before (`_bound`).
    """
    if not window.fixed:
        return _bound(groups, start, step, window, decodes, lag)
    pieces: list[Piece] = []
    holds: list[list[Hold]] = [[] for _ in start.held]
    left, count, slots = window.left, window.now, start.num_slots(groups)
    while True:
        before = slots
        stays = 0  # slots of shared runs that the chunk releases
        if count:
            held = start.held
            start = grown(groups, start, count)
            slots = start.num_slots(groups)
            for one, found, old, new in zip(groups.classes[1:], holds, held, start.held, strict=True):
                for run in old.runs:
                    if run.end <= new.start:
                        found.append(Hold(run, step if run.shared else step - 1))
                        stays += (run.end - run.begin) * one.num_groups * run.shared
        pieces.append(Piece(step, step, max(before, slots + stays), 0))
        step, left = step + 1, left - count
        if not left:
            break
        count = min(window.most, left)
    rest = decoding(groups, start, step, decodes, lag)
    return Life(pieces + rest.pieces[1:], [a + b for a, b in zip(holds, rest.holds, strict=True)], rest.last)


def grown(groups: LayerGroups, start: Start, count: int) -> Start:
    """Returns where a request stands once it has grown by `count` tokens."""
    length, points = start.length, start.points
    held = [
        _settled(one.lifetime, held, length, points)
        for one, held in zip(groups.classes[1:], start.held, strict=True)
    ]
    return Start(length + count, tuple(held), tuple([point for point in points if point > length]))


def _settled(lifetime: Lifetime, held: Held, length: int, points: Seq[int]) -> Held:
    """Returns what a sequence of `length` tokens holds of a class before it grows."""
    for point in points:
        if point <= length:
            held = held.kept_at(point, lifetime)
    return held.left(lifetime.first_kept(length))


def _lines(lifetime: Lifetime, held: Held, length: int, end: int) -> Iterator[Piece]:
    """Yields the entries that a settled sequence holds once it has grown by one token, for each length from
    `length` to `end` - 1 that it has before: pieces over lengths."""
    for run in held.runs:
        until = min(lifetime.gone_at(run.end - 1), end) - 1
        if length <= until:
            yield Piece(length, until, 1 - run.begin, 1)
            length = until + 1
    first = held.own
    while length < end:
        first = max(first, lifetime.first_kept(length))
        until = min(lifetime.gone_at(first), end) - 1
        if lifetime.sees == "window" and until == length:  # one comes, one passes
            yield Piece(length, end - 1, length + 1 - first, 0)
            return
        yield Piece(length, until, 1 - first, 1)
        length = until + 1


def _bound(
    groups: LayerGroups, start: Start, step: int, window: PrefillWindow, decodes: int, lag: int
) -> Life:
    """Returns a life that bounds those of all ways to compute the prompt within the window.

    Its own entries of a class are at most its tokens if the prompt is computed as early as may be, and at most
    as many as any future of it holds (`_most_own`); neither can become more while it runs. A run is held for as
    long as it may be, if the prompt is computed as late as may be.
    """
    left, first = window.left, window.first
    length, end = start.length, start.length + left
    last = step + window.last + decodes + lag
    tokens = []  # pieces of its tokens, if all is as early as may be
    if first:
        tokens.append(Piece(step, step, length + window.now, 0))
    if first > 1:
        base = length + window.now - step * window.most
        tokens.append(Piece(step + 1, step + first - 1, base, window.most))
    begin = step + first
    tokens.append(Piece(begin, begin + decodes, end - begin, 1))
    if begin + decodes < last:
        tokens.append(Piece(begin + decodes + 1, last, end + decodes, 0))
    width = groups.classes[0].num_groups
    pieces = [Piece(a, b, base * width, slope * width) for a, b, base, slope in tokens]
    holds: list[list[Hold]] = []
    for one, held in zip(groups.classes[1:], start.held, strict=True):
        width = one.num_groups
        most = _most_own(one.lifetime, held, start, window)
        for piece in tokens:
            for a, b, base, slope in _capped(piece, held.own, most):
                pieces.append(Piece(a, b, base * width, slope * width))
        holds.append([])
        for run in held.runs:
            released = max(one.lifetime.gone_at(run.end - 1), end)  # the length by which it has passed
            until = step + window.last + released - end + lag if released < end + decodes else last
            pieces.append(Piece(step, until, (run.end - run.begin) * width, 0))
            holds[-1].append(Hold(run, until))
    return Life(pieces, holds, last)


def _most_own(lifetime: Lifetime, held: Held, start: Start, window: PrefillWindow) -> int:
    """Returns a bound on the entries of a class that are its own now or become so, at any time: what it keeps
    and a chunk, and the tails that will be runs beside them."""
    most, own = most_kept(lifetime) + window.most, held.own
    for point in start.points:
        if point > own:
            most += point - max(lifetime.first_kept(point), own)
            own = point
    return most


def _capped(piece: Piece, own: int, most: int) -> Iterator[Piece]:
    """Yields the entries from `own` on of a piece of tokens, at most `most`."""
    first, last, base, slope = piece
    base -= own
    if base + slope * last <= most:
        yield Piece(first, last, base, slope)
        return
    over = (most - base) // slope + 1 if slope else first  # the first step in which they are more
    if over > first:
        yield Piece(first, over - 1, base, slope)
    yield Piece(max(over, first), last, most, 0)
