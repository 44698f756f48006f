"""What a request holds in the classes of layers that see a window or a chunk, as lines over steps.

    slots of a window                ╭ the tail of the prompt passes
                                   ╱ │
                                 ╱   ╰───────────────╮ each token takes the slot of one that passes
       chunks of the prompt    ╱                     │
      ─────────────────────── decode ────────────────┴── the end

A request holds its private entries of such a class, and *runs*: tails of its path, which came from the cache or
which it keeps for others at the end of its prompt. It holds a run as a whole until the last entry of it has
passed. docs/admission.md explains the counts.
"""

from collections.abc import Sequence as Seq
from collections.abc import Set
from typing import NamedTuple

import numpy as np

from lightkv.layer_groups import LayerClass, Lifetime
from lightkv.ledger import Match, Sequence

from .prefill_budget import PrefillWindow

NOBODY: Set[int] = frozenset()


class Entry(NamedTuple):
    """Slots that are held up to the end `end`: base + slope · e at an end e (`Forecast`)."""

    end: int
    base: int
    slope: int


class Run(NamedTuple):
    """The entries [first, end) of a class. `holders`: the rows that hold them, where a candidate hits them."""

    first: int
    end: int
    holders: Set[int] = NOBODY


class Held(NamedTuple):
    """What a request holds in a class: runs, and its private entries from `private` on."""

    runs: list[Run]
    private: int


class Pace(NamedTuple):
    """A request that takes one token in each step from `begin` on, when it has `length`, until `end`."""

    begin: int
    length: int
    end: int

    @classmethod
    def latest(cls, step: int, window: PrefillWindow, computed: int, final: int) -> "Pace":
        """Returns the pace of a request that has computed so many tokens of its prompt and grows to `final`, if
        the rest of its prompt is computed as late as may be. `step`: the next one."""
        begin, prompt = step + window.last + 1, computed + window.left
        return cls(begin, prompt, begin + final - prompt)

    @property
    def remaining(self) -> int:
        """The tokens that it takes."""
        return self.end - self.begin

    def passes(self, lifetime: Lifetime, entry: int) -> int:
        """Returns up to which end it holds what ends at `entry` in layers of this lifetime."""
        if lifetime.sees == "full":
            return self.end
        return min(self.begin + max(lifetime.rule.gone_at(entry - 1) - self.length, 0), self.end)


class Rise(NamedTuple):
    """A bound on the slots of the private entries of a request in prefill, and of the tails that it will keep:
    `width` for each entry from `firsts[i]` on, of up to `most[i]` of them, up to the end `ends[i]`."""

    width: int
    ends: tuple[int, int]
    firsts: tuple[int, int, int]
    most: tuple[int, int, int]

    def slots(self, points: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Returns the slots at each of the ends `points`, where the request has up to `lengths` tokens."""
        at = np.searchsorted(self.ends, points)
        return np.minimum(lengths - np.array(self.firsts)[at], np.array(self.most)[at]) * self.width


def held_by(sequence: Sequence) -> list[Held]:
    """Returns what an open sequence holds in each class of tokens."""
    found = [Held([Run(0, sequence.length)], sequence.length)]
    for hold in [hold for hold in sequence.holds if hold.of.width]:  # a state takes no slots of tokens
        found.append(Held([Run(end - tail.length, end) for tail, end in hold.tails()], hold.own))
    return found


def hit_by(classes: Seq[LayerClass], match: Match) -> list[Held]:
    """Returns what a sequence would hold in each class that is opened with this hit."""
    found = []
    for cls, one in enumerate(classes):
        runs, end, tip = list[Run](), match.num_tokens, match.tip
        for segment in match.path:
            length = tip or segment.length
            held = segment.tails.get(cls) if cls else segment
            if held is None or end <= one.lifetime.rule.first_kept(match.num_tokens):
                break
            count = held.length - (segment.length - length)
            if count > 0:
                runs.append(Run(end - count, end, held.holders))
            if count < length:
                break
            end, tip = end - length, 0
        found.append(Held(runs, match.num_tokens))
    return found


def decoding(classes: Seq[LayerClass], sequence: Sequence, pace: Pace) -> list[Entry]:
    """Returns what a sequence holds that decodes, or takes no more tokens, as if it shared nothing. The first
    entry is what it holds to its end."""
    begin, length, end = pace
    width = classes[0].num_groups
    base, slope = width * (length - begin), width
    passing: list[Entry] = []
    for one, (runs, private) in zip(classes[1:], held_by(sequence)[1:], strict=True):
        lifetime, width = one.lifetime, one.num_groups
        passed = 0
        if begin < end:
            for point in [point for point in sequence.points if private < point <= length]:
                first = max(private, lifetime.rule.first_kept(point))
                passed += first - private
                runs.append(Run(first, point))
                private = point
            first = max(private, lifetime.rule.first_kept(length))
            passed, private = passed + first - private, first
        passing.append(Entry(begin, width * passed, 0))
        for run in runs:
            passing.append(Entry(pace.passes(lifetime, run.end), width * (run.end - run.first), 0))
        # The private entries: up to the first that passes, each token adds one.
        passes = pace.passes(lifetime, private + 1)
        while passes < end and lifetime.sees == "chunk":
            first = lifetime.rule.first_kept(lifetime.rule.gone_at(private))
            passing.append(Entry(passes, width * (first - private), 0))
            private, passes = first, pace.passes(lifetime, first + 1)
        if begin == end:
            base += width * (length - private)
        elif passes == end:
            base += width * (length - begin - private)
            slope += width
        else:
            most = lifetime.size + lifetime.slack
            base += width * most
            passing.append(Entry(passes, width * (length - begin - private - most), width))
    base += sum([one.base for one in passing if one.end == end])
    return [Entry(end, base, slope), *[one for one in passing if one.end < end and one[1:] != (0, 0)]]


def prefilling(
    classes: Seq[LayerClass], held: Seq[Held], points: Seq[int], chunk: int, pace: Pace
) -> list[Rise]:
    """Returns what a request holds in each of these classes besides its runs, whenever its prompt is computed.

    points: where it will keep tails, ascending. chunk: the most tokens of its prompt in a step. pace: if its
    prompt is computed as late as may be.

    It holds at most the entries from its first private one on. There are never more of them than what it keeps,
    a chunk, and the tails. From `pace.begin` on, it keeps only what the end of its prompt sees, and once that
    has passed, only the length of a window.
    """
    rises, prompt, final = list[Rise](), pace.length, pace.length + pace.remaining
    for one, (_, private) in zip(classes, held, strict=True):
        lifetime = one.lifetime
        # Where a step is in flight, `decoding` counts a chunk that passes beside the token of the next step.
        late = lifetime.sees == "chunk"
        most, seen = lifetime.size + lifetime.slack + late, lifetime.rule.first_kept(prompt)
        kept, end = seen, private  # the first entry that is kept after the prompt; where the last tail ends
        tails = 0
        for point in [point for point in points if point > private]:
            first, end = max(end, lifetime.rule.first_kept(point)), point
            tails += point - first
            if point > seen:
                kept = min(kept, first)
        kept = max(kept, private)
        passed = lifetime.rule.gone_at(max(end, seen))
        later = max(lifetime.rule.first_kept(passed), private)
        rises.append(
            Rise(
                one.num_groups,
                (pace.begin, min(pace.begin + passed - prompt, pace.end)),
                (private, kept, later),
                (most - 1 + chunk + tails, max(passed - kept + late, min(most, final - later)), most),
            )
        )
    return rises
