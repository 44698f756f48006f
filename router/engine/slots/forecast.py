"""The forecast of slots: the most that the running requests will hold, where some layers see a window or a
chunk only.

It answers what `Forecast` (`lightkv/router/engine/forecast.py`) answers for models whose tokens take one slot
for as long as they are held; `make_forecast` chooses. Each request counts with its life (`lives.py`), as if it
shared nothing. What several requests hold, a segment or a segment's part in a class, counts once, until the
last of them leaves it: the others count less by it for as long as they hold it.

The count is exact for requests that decode, and for a prompt that is computed alone by a fixed budget. It is a
bound, which never rises while these run,

- for prompts whose chunks depend on other prompts or on time;
- in the step in which a chunk of a prompt passes a part that others hold, too;
- with two steps in flight, in a step in which a request releases something (`lives.decoding`);
- where a tail will lie in several segments: it counts as one run until it does.

So requests that state their length are never short of a slot. A request may be refused that would have fitted
by what a bound is too high.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from lightkv.errors import CheckFailed
from lightkv.ledger import Sequence
from lightkv.ledger.prefix_tree import Segment
from lightkv.ledger.windows import WindowedSequence
from lightkv.router.engine.forecast import Candidate, Forecast, Prefill
from lightkv.router.engine.ledger import Ledger

from .lives import Held, Life, Piece, Run, Start, Sums, decoding, grown, prefilling


def start_of(sequence: Sequence) -> Start:
    """Returns where a sequence of a ledger with layer groups stands."""
    assert isinstance(sequence, WindowedSequence)
    held = []
    for cls in range(1, len(sequence.lifetimes) + 1):
        runs = [Run(end - part.length, end, len(part.holders) > 1) for part, end in sequence.held_parts(cls)]
        held.append(Held(tuple(runs[::-1]), sequence.own(cls)))
    return Start(sequence.length, tuple(held), tuple(sequence.points))


def make_forecast(ledger: Ledger, lag: int) -> "Forecast | SlotForecast":
    """Returns the forecast that fits the ledger's layer groups."""
    return Forecast(ledger, lag) if ledger.groups.is_uniform else SlotForecast(ledger, lag)


def fitting(ledger: Ledger, sequence: Sequence | None, room: int) -> int:
    """Returns how many tokens an open sequence can be extended by with `room` slots that are available."""
    groups = ledger.groups
    if groups.is_uniform:
        return room
    assert isinstance(sequence, WindowedSequence)
    start = start_of(sequence)
    after = grown(groups, start, 1)
    released = start.num_slots(groups) + groups.num_groups - after.num_slots(groups)
    for cls, held in enumerate(after.held, start=1):
        for part, end in sequence.held_parts(cls):  # what others hold stays
            if end <= held.start and len(part.holders) > 1:
                released -= part.num_slots
    return (room + released) // groups.num_groups


class _Holder(NamedTuple):
    """A request that holds shared tokens: the last step in which it does, and how many of them."""

    last: int
    num_tokens: int


class SlotForecast:
    """Which sequences hold slots, and until when. An open sequence is in one of the states of `Forecast`:
    admitted, decoding or resting.

    It follows the ledger's `open`, `extend`, `publish` and `close`; `ledger.step` is the number of the next
    step. `lag`: 1 where a sequence's slots are freed a step after it has taken its last one, else 0.
    """

    def __init__(self, ledger: Ledger, lag: int = 0) -> None:
        self._ledger = ledger
        self._groups = ledger.groups
        self._lag = lag
        self._lives: dict[int, Life] = {}  # of the rows that decode or rest
        # The sequence of each of these, and where its oldest parts ended when its life was computed.
        self._known: dict[int, tuple[WindowedSequence, list[int]]] = {}
        self._end: dict[int, int] = {}  # row → the step before which it takes its last token, for the same
        self._ends: list[tuple[int, int]] = []  # (end, row), ascending
        self._final: dict[int, int] = {}  # row → the most tokens that its sequence will have
        self._sum_final = 0
        self._sums: Sums | None = None  # of `_lives`

    def admit(self, sequence: Sequence, final: int) -> None:
        """Adds an open sequence that computes its prefill. It will have up to `final` tokens, those found in
        the cache included."""
        self._final[sequence.row] = final
        self._sum_final += final

    def decode(self, sequence: Sequence, remaining: int, begin: int | None = None) -> None:
        """Notes that the sequence takes one token in each of `remaining` steps, from step `begin` on, which is
        the next one to plan unless another is given."""
        begin = self._ledger.step if begin is None else begin
        row, final = sequence.row, sequence.length + remaining
        self._remove(row)
        self._end[row] = begin + remaining
        insort(self._ends, (begin + remaining, row))
        self._final[row] = final
        self._sum_final += final
        self._foretell(sequence)

    def rest(self, sequence: Sequence, end: int) -> None:
        """Notes that the sequence takes no more tokens, as if it had taken the last one in step `end - 1`."""
        self.decode(sequence, 0, end)

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence that is about to close."""
        self._remove(sequence.row)
        del self._final[sequence.row]

    def _remove(self, row: int) -> None:
        self._sum_final -= self._final[row]
        if row in self._end:
            del self._ends[bisect_left(self._ends, (self._end.pop(row), row))]
            del self._lives[row], self._known[row]
        self._sums = None

    def _foretell(self, sequence: Sequence) -> None:
        """Computes the life of a sequence that decodes or rests, from now on."""
        assert isinstance(sequence, WindowedSequence)
        row = sequence.row
        remaining = self._final[row] - sequence.length
        begin = self._end[row] - remaining
        self._lives[row] = decoding(self._groups, start_of(sequence), begin, remaining, self._lag)
        self._known[row] = sequence, sequence.oldest[:]
        self._sums = None

    def note_kept(self, sequence: Sequence) -> None:
        """Notes that a sequence keeps a tail that it would not have kept (`TokenLedger.keep_branch`)."""
        if sequence.row in self._lives:
            self._foretell(sequence)

    def _refresh(self) -> None:
        """Computes the lives of those anew whose parts have changed: a tail that was one run may have become
        several parts, which it leaves one after the other."""
        for sequence, oldest in list(self._known.values()):
            if sequence.oldest != oldest:
                self._foretell(sequence)

    def steps_to_end(self) -> int:
        """Returns 1: slots may also be released before a sequence ends."""
        return 1

    def ended(self) -> set[int]:
        """Returns the rows of the decoding and resting sequences that take no token in the next step."""
        return {row for _, row in self._ends[: bisect_right(self._ends, (self._ledger.step + 1,))]}

    @property
    def total(self) -> int:
        """The most slots that the sequences would hold if none were shared or released."""
        return self._sum_final * self._groups.num_groups

    @property
    def num_sequences(self) -> int:
        """The sequences that count."""
        return len(self._final)

    def steps_to_wait(self, candidate: Candidate, limit: int, prefills: Seq[Prefill]) -> int:
        """Returns 0 if the peak stays within `limit` with the candidate, and else 1: it may fit in the next
        step. `prefills`: the admitted sequences, with the windows that they have beside the candidate."""
        return int(self._peak(prefills, candidate) > limit)

    def steps_to_wait_without(self, candidate: Candidate, evicted: Candidate, limit: int) -> int:
        """Returns 1: no request waits for longer than a step before it is asked for again."""
        return 1

    def peak(self, prefills: Seq[Prefill]) -> int:
        """Returns the most slots held at any time. `prefills`: the admitted sequences."""
        now = self._ledger.num_held if self._is_of_all else self.now(prefills)
        return max(now, self._peak(prefills, None))

    @property
    def _is_of_all(self) -> bool:
        """Whether every open sequence is in it."""
        return len(self._final) == self._ledger.num_open

    def now(self, prefills: Seq[Prefill]) -> int:
        """Returns the slots that are held by the lives' count once the last step planned has its slots."""
        self._refresh()
        step = np.array([self._ledger.step - 1])
        shared = self._shared({**self._lives, **self._prefilling(prefills)}, None)
        counted = self._of_decodes().at(step) + Sums(list(shared)).at(step)
        return int(counted[0]) + sum([start_of(one).num_slots(self._groups) for one, _ in prefills])

    def check(self, prefills: Seq[Prefill]) -> None:
        """Raises CheckFailed where the lives count less than is held."""
        if (num := self.now(prefills)) < self._ledger.num_held:
            raise CheckFailed(f"{self._ledger.num_held} slots are held, the forecast counts {num}")

    def _peak(self, prefills: Seq[Prefill], candidate: Candidate | None) -> int:
        """Returns the most slots that are held in a later step: those just before one of the drops."""
        self._refresh()
        step, lives = self._ledger.step, self._prefilling(prefills)
        opened = None if candidate is None else (candidate, self._life_of(candidate))
        pieces = [piece for life in lives.values() for piece in life.pieces]
        if opened is not None:
            pieces += opened[1].pieces
        decodes = self._of_decodes()
        ends = np.array([piece.last for piece in pieces], np.int64)
        points = np.concatenate([decodes.drops[np.searchsorted(decodes.drops, step) :], ends])
        if not len(points):
            return 0
        pieces += self._shared({**self._lives, **lives}, opened)
        return int((decodes.at(points) + Sums(pieces).at(points)).max())

    def _prefilling(self, prefills: Seq[Prefill]) -> dict[int, Life]:
        """Returns the lives of the sequences in prefill, by row."""
        found, step = {}, self._ledger.step
        for sequence, window in prefills:
            decodes = self._final[sequence.row] - sequence.length - window.left
            start = start_of(sequence)
            found[sequence.row] = prefilling(self._groups, start, step, window, decodes, self._lag)
        return found

    def _of_decodes(self) -> Sums:
        """Returns the sums over the sequences that decode or rest."""
        if self._sums is None:
            self._sums = Sums([piece for life in self._lives.values() for piece in life.pieces])
        return self._sums

    def _life_of(self, candidate: Candidate) -> Life:
        """Returns the life of a request that would be opened now."""
        (path, tip, num_hit), window, final, points = candidate
        held = []
        for cls, one in enumerate(self._groups.classes[1:], start=1):
            kept, end, runs = one.lifetime.first_kept(num_hit), num_hit, []
            for i, segment in enumerate(path):
                part, length = segment.parts.get(cls), segment.length if i else tip
                if part is None or end <= kept:
                    break
                count = part.length - (segment.length - length)
                if count <= 0:
                    break
                runs.append(Run(end - count, end, bool(part.holders)))
                if count < length:
                    break
                end -= length
            held.append(Held(tuple(runs[::-1]), num_hit))
        start, decodes = Start(num_hit, tuple(held), points), final - num_hit - window.left
        return prefilling(self._groups, start, self._ledger.step, window, decodes, self._lag)

    def _shared(self, lives: Mapping[int, Life], opened: tuple[Candidate, Life] | None) -> Iterator[Piece]:
        """Yields what the `lives` count too often, as pieces below zero: shared segments and parts, for as long
        as another request holds them. `opened`: a request that would be opened, and its life."""
        first, width = self._ledger.step - 1, self._groups.classes[0].num_groups
        widths = [one.num_groups for one in self._groups.classes]
        rows = None if self._is_of_all else self._final.keys()
        hit: dict[Segment, int] = {}  # segment on the candidate's path → how many of its tokens it hits
        if opened is not None:
            path, tip, _ = opened[0].match
            for segment in path:
                if segment.holders:
                    hit[segment] = tip or segment.length
                tip = 0
        depths: dict[Segment, int] = {}
        for segment in self._ledger.shared | hit.keys():
            holders = segment.holders if rows is None else segment.holders & rows
            found = [_Holder(lives[row].last, segment.length) for row in holders]
            if opened is not None and segment in hit:
                found.append(_Holder(opened[1].last, hit[segment]))
            yield from _once(found, first, width)
            for cls, part in segment.parts.items():
                end = _depth(segment, depths)
                run = Run(end - part.length, end)
                found = [
                    _Holder(hold.last, part.length)
                    for row in (part.holders if rows is None else part.holders & rows)
                    for hold in lives[row].holds[cls - 1]
                    if hold.run.begin <= run.begin and run.end <= hold.run.end
                ]
                if opened is not None and segment in hit:
                    end -= segment.length - hit[segment]
                    holds = opened[1].holds[cls - 1]
                    found += [_Holder(one.last, end - run.begin) for one in holds if one.run.end == end]
                yield from _once(found, first, widths[cls])


def _once(holders: Iterable[_Holder], first: int, width: int) -> Iterator[Piece]:
    """Yields what is counted too often of tokens that several hold, of which each holds as many of the first
    ones as its count says."""
    most = 0
    for last, count in sorted(holders, reverse=True):
        if often := min(count, most):
            yield Piece(first, last, -often * width, 0)
        most = max(most, count)


def _depth(segment: Segment, known: dict[Segment, int]) -> int:
    """Returns how many tokens there are from the root to the end of a segment; remembers it in `known`."""
    depth = known.get(segment)
    if depth is None:
        depth = known[segment] = sum([one.length for one in segment.up()])
    return depth
