"""The classes of layers that do not see everything: what sequences hold and leave there, in slots.

A sequence keeps in such a class what its next tokens see, and `SLACK` positions more, since it may go back by
so many. Where a prompt or an answer ends, and where a second prompt has turned off, this *tail* becomes parts
of the segments of the path (`parts.py`), from which a later sequence goes on: it hits as many tokens as every
class can continue after.

The state's verbs (`state.py`) call this file where there is more than one class.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from lightkv.edits import Edit, FreePart, FreePartRange, MapPart, MapSegments, StorePart
from lightkv.errors import CheckFailed
from lightkv.layer_groups import LayerClass

from .parts import Parts, is_turn_off, last_reachable, ranges_of
from .prefix_tree import NO_PARTS, TOKEN_BYTES, Match, Part, PrefixTree, Segment
from .sequence import Sequence
from .windows import Agenda, Branch, Need, WindowedSequence


class State(Protocol):
    """What the tails need of the ledger's state (`LedgerState`), which owns them."""

    tree: PrefixTree
    sequences: dict[int, Sequence]
    width: int
    step: int
    confirmed: int

    def emit(self, edit: Edit) -> None: ...

    def count(self, free: int = 0, cached: int = 0) -> None: ...

    def free_range(self, row: int, start: int, end: int) -> None: ...

    def split(self, segment: Segment, at: int) -> Segment: ...

    def publish_tail(self, sequence: Sequence, tokens: bytes) -> None: ...


class Tails:
    """What is held and cached in the classes from 1 on, of one ledger's state. Every verb takes time in
    proportion to the segments that a window reaches."""

    def __init__(self, state: State, classes: Seq[LayerClass]) -> None:
        self._state = state
        self._parts = Parts()
        self.lifetimes = [one.lifetime for one in classes]
        self.agenda = Agenda(self.lifetimes)
        self.widths = [one.num_groups for one in classes]
        self._classes = range(1, len(classes) + 1)
        # What `find_branch` last looked for, and the sequences that have passed it in all classes.
        self._sought: tuple[Segment | None, int] = (None, 0)
        self._passed: set[Sequence] = set()

    # Hits

    def find_branch(self, match: Match) -> Branch | None:
        """Returns where a prompt turns off, of which the tree has this, from a sequence that still has, as its
        own, what classes see there for which no part is there."""
        path, point = match.path, match.num_tokens
        needs: list[Need] = []
        for cls, lifetime in zip(self._classes, self.lifetimes, strict=True):
            ranges = ranges_of(path[::-1], cls)
            if last_reachable(lifetime, ranges, point) < point:
                needs.append(Need(cls, lifetime.first_seen(point), ranges[-1] if ranges else (0, 0)))
        if needs and self._sought != (path[0], point):  # a prompt that waits is looked for in every step
            self._sought, self._passed = (path[0], point), set()
        for row in path[0].holders if needs else ():
            sequence = self._state.sequences[row]
            if sequence in self._passed or not isinstance(sequence, WindowedSequence):
                continue
            if min(map(sequence.own, self._classes)) >= point:
                self._passed.add(sequence)
            if sequence.still_has(point, needs):
                more = sum([(point - sequence.own(cls)) * self.widths[cls - 1] for cls, *_ in needs])
                return Branch(sequence, point, tuple([cls for cls, *_ in needs]), more)
        return None

    def keep_branch(self, branch: Branch) -> None:
        """Makes parts of what is seen where a prompt turns off (`find_branch`).

        The step that is being planned may compute and read any of the sequence's own entries. So those before
        become parts, too, which it leaves when it grows, and which are the first to be evicted then."""
        sequence, point, classes, _ = branch
        self._split_path(sequence, point)
        for cls in classes:
            own, first = sequence.own(cls), self.lifetimes[cls - 1].first_kept(point)
            if own < first:
                self._split_path(sequence, first)
            self._share(sequence, cls, point, (sequence.node, sequence.shared), sequence.published_in)
            for segment, end in sequence.segments_up():
                if own < end <= first:
                    self._parts.supersede(segment.parts[cls])

    def enter(self, sequence: WindowedSequence, matched: int) -> None:
        """Gives an opened sequence the parts that its next tokens see. `matched`: the tokens of its prompt that
        the tree has."""
        state, hit = self._state, sequence.length
        sequence.set_points(hit, matched)
        for cls in self._classes:
            kept = sequence.passed(cls)
            held: list[Segment] = []
            for segment, end in sequence.segments_up():
                part = segment.parts.get(cls)
                if end <= kept or part is None:
                    break
                self._hold(part, sequence.row)
                held.append(segment)
                if not part.is_whole:
                    break
            sequence.set_own(cls, hit)
            sequence.note_oldest(cls)
            if held:
                ids = tuple([segment.id for segment in reversed(held)])
                state.emit(MapPart(cls, sequence.row, hit, ids))

    # Growth

    def settle(self, sequence: WindowedSequence) -> None:
        """Brings a sequence up to date with the tokens that it has: it shares what the tree has got meanwhile,
        publishes what follows, keeps the tails of the points that it has passed, and leaves the parts that have
        passed."""
        length = sequence.length
        if sequence.shared < min(length, len(sequence.prompt) // TOKEN_BYTES):
            self._adopt(sequence)
            end = min(sequence.published, sequence.num_publishable)
            if sequence.node.indexed and sequence.shared < end:
                tokens = sequence.prompt[sequence.shared * TOKEN_BYTES : end * TOKEN_BYTES]
                self._state.publish_tail(sequence, tokens)
        while sequence.points and sequence.points[0] <= length:
            self._keep_tail(sequence, sequence.points.pop(0))
        for cls in self._classes:
            if sequence.oldest[cls - 1]:
                self._leave_passed(sequence, cls, sequence.passed(cls))

    def _adopt(self, sequence: WindowedSequence) -> None:
        """Shares tokens of the prompt that are in the tree, too, and frees the sequence's own."""
        state, tree, start = self._state, self._state.tree, sequence.shared
        node, tokens = sequence.node, sequence.prompt
        if not node.indexed or tokens[start * TOKEN_BYTES : (start + 1) * TOKEN_BYTES] not in node.children:
            return
        path, matched = tree.find(node, tokens, start * TOKEN_BYTES, sequence.length * TOKEN_BYTES)
        if matched < len(path[-1].tokens):
            path[-1] = state.split(path[-1], matched // TOKEN_BYTES)
        found = sum(segment.length for segment in path)
        state.free_range(sequence.row, start, start + found)
        state.count(cached=-(tree.add_holder(path, sequence.row) * state.width))
        tree.hit(path)
        state.emit(MapSegments(sequence.row, start, tuple([segment.id for segment in path])))
        sequence.shared += found
        sequence.node = path[-1]

    def _keep_tail(self, sequence: WindowedSequence, point: int) -> None:
        """Makes parts of what is seen at `point`, which the sequence has reached; not where its path ends
        before."""
        if point > sequence.shared:
            return
        if point < sequence.shared:
            self._split_path(sequence, point)
        for cls, lifetime in zip(self._classes, self.lifetimes, strict=True):
            if sequence.own(cls) < point:
                first = lifetime.first_kept(point)
                self._leave_passed(sequence, cls, first)
                self._free_own(sequence, cls, first)
                self._share(sequence, cls, point, (sequence.node, sequence.shared), self._state.step - 1)

    def _split_path(self, sequence: WindowedSequence, at: int) -> None:
        """Has a segment of the sequence's path end at entry `at`."""
        for segment, end in sequence.segments_up():
            if end - segment.length < at < end:
                self._state.split(segment, at - end + segment.length)

    def _leave_passed(self, sequence: WindowedSequence, cls: int, passed: int) -> None:
        """Has a sequence leave the parts that end before entry `passed`."""
        if not 0 < sequence.oldest[cls - 1] <= passed:
            return
        for part, end in sequence.held_parts(cls):
            if end <= passed:
                self._let_go(part, sequence.row)
        sequence.note_oldest(cls)

    def growth(self, sequences: Seq[WindowedSequence], count: int) -> int:
        """Returns how many slots sequences take for `count` more tokens each, less what they give back."""
        alike = [one.distances for one in sequences if one.length < one.event] if count == 1 else []
        due = [one for one in sequences if one.event <= one.length] if alike else sequences
        slots = count * len(sequences) * self._state.width
        for cls, width in zip(self._classes, self.widths, strict=True):
            slots += [distances[cls - 1] for distances in alike].count(0) * width
            for one in due:
                gone = self._gone(one, cls)
                if not self._reuses(cls, gone, count):
                    slots += (count - gone) * width
        return slots

    def _gone(self, sequence: WindowedSequence, cls: int) -> int:
        """Returns how many of a sequence's own tokens have passed, and are not to be kept for others."""
        passed, points = sequence.passed(cls), sequence.points
        if points and points[0] <= sequence.length:
            passed = min(passed, self.lifetimes[cls - 1].first_kept(points[0]))
        return max(passed - sequence.own(cls), 0)

    def _reuses(self, cls: int, gone: int, count: int) -> bool:
        """Returns whether the next tokens, `count` of them, take the slots of those that have passed."""
        return gone == count == 1 and self.lifetimes[cls - 1].sees == "window"

    def prepare(self, sequence: WindowedSequence, count: int) -> None:
        """Frees what has passed of a settled sequence that is about to grow by `count` tokens, or has it
        reused; and finds out when something happens to it next."""
        for cls in self._classes:
            gone = self._gone(sequence, cls)
            if self._reuses(cls, gone, count):
                if not sequence.distances[cls - 1]:
                    sequence.reuse(cls)
            elif gone:
                self._free_own(sequence, cls, sequence.own(cls) + gone)
            elif sequence.distances[cls - 1]:
                sequence.set_own(cls, sequence.own(cls))
        if count == 1:
            sequence.find_event()
            self.agenda.put(sequence)
        else:
            self.agenda.due.add(sequence)

    def leave_before(self, sequence: WindowedSequence, firsts: Seq[int]) -> None:
        """Has a sequence give up what it holds in a class whose next entry is not the one after its last one,
        but a later one, in `firsts`."""
        for cls, first in zip(self._classes, firsts, strict=True):
            own = sequence.own(cls)
            if first > sequence.length:
                self._leave_passed(sequence, cls, sequence.length)
                self._free_own(sequence, cls, sequence.length)
                own = first
            sequence.set_own(cls, own)

    # Forks, cuts and ends

    def share_all(self, sequence: WindowedSequence) -> None:
        """Makes parts of all that a settled sequence holds as its own, so that others can hold it, too. All of
        its tokens are in its path."""
        for cls in self._classes:
            passed = sequence.passed(cls)
            if passed > sequence.own(cls):
                self._free_own(sequence, cls, passed)
            path = sequence.node, sequence.shared
            self._share(sequence, cls, sequence.length, path, self._state.step - 1)

    def hold_same(self, sequence: WindowedSequence, row: int) -> None:
        """Has a fork in `row` hold the parts that `sequence` holds, which has no tokens of its own."""
        for cls in self._classes:
            for part, _ in sequence.held_parts(cls):
                part.holders.add(row)

    def free_after(self, sequence: WindowedSequence, length: int, count: int) -> None:
        """Frees what is the sequence's own of the `count` entries from `length` on, which it gives up."""
        self._passed.discard(sequence)
        for cls in self._classes:
            own = sequence.own(cls)
            if max(own, length) < length + count:
                self._free_range(sequence, cls, max(own, length), length + count)
            sequence.set_own(cls, min(own, length))

    def note_cut(self, sequence: WindowedSequence) -> None:
        """Notes that a sequence has left the last segments of its path."""
        for cls in self._classes:
            sequence.note_oldest(cls)

    def cache_tail(self, sequence: WindowedSequence, node: Segment, end: int) -> None:
        """Keeps what is seen after the first `end` tokens of a sequence that is about to close, so that later
        ones can go on from there. These tokens are those of the path to `node`."""
        if not node.indexed:
            return
        for cls, lifetime in zip(self._classes, self.lifetimes, strict=True):
            if sequence.own(cls) < end:
                self._free_own(sequence, cls, lifetime.first_kept(end))
                self._share(sequence, cls, end, (node, end), None)
            if cls in node.parts:
                self._supersede(node, cls, end, lifetime.first_kept(end))

    def free_own(self, sequence: WindowedSequence) -> None:
        """Frees all that is the sequence's own in these classes, as it closes."""
        self._passed.discard(sequence)
        for cls in self._classes:
            self._free_own(sequence, cls, sequence.length)

    def _supersede(self, node: Segment, cls: int, end: int, first: int) -> None:
        """Has the parts of the path to `node`, which ends at `end`, evicted first as far as they end up to
        `first`, but for those where prompts turn off or other sessions end."""
        for segment, at in node.ends_up(end):
            part = segment.parts.get(cls)
            if part is None or at - part.length >= first or segment.protected > 1 or is_turn_off(segment):
                continue
            if at > first:
                segment = self._state.split(segment, segment.length - (at - first))
            self._parts.supersede(segment.parts[cls])

    def _share(
        self, sequence: WindowedSequence, cls: int, end: int, path: tuple[Segment, int], step: int | None
    ) -> None:
        """Moves the sequence's own entries up to `end` into parts of the segments of its path.

        `path`: the last segment and the entry where it ends; a segment ends at `end`. `step`: the last step
        that may compute some of the entries. With a step, the sequence holds the parts; with None it closes,
        and does not hold them.

        Where a segment has a part already, the sequence's own entries are freed. No row holds more entries
        afterwards than before. So a segment is split in two cases: a part that rows hold would become longer,
        or the part is longer than what the sequence itself had.
        """
        state, row, own, hold = self._state, sequence.row, sequence.own(cls), step is not None
        segment, at = path
        while at > own and segment.parent is not None:
            if at <= end:
                first = max(at - segment.length, own)
                part, count = segment.parts.get(cls), at - first
                if (
                    part is not None
                    and part.length != count
                    and (hold if part.length > count else part.holders)
                ):
                    state.split(segment, segment.length - min(part.length, count))
                    first, count = max(at - segment.length, own), min(part.length, count)
                self._share_segment(sequence, cls, segment, (first, at), step)
                part = segment.parts[cls]
                part.superseded = False
                if hold:
                    self._hold(part, row)
                else:
                    self._parts.note_idle(part)
            at -= segment.length
            segment = segment.parent
        sequence.set_own(cls, max(own, end))
        sequence.note_oldest(cls)

    def _share_segment(
        self,
        sequence: WindowedSequence,
        cls: int,
        segment: Segment,
        entries: tuple[int, int],
        step: int | None,
    ) -> None:
        """Makes the sequence's own `entries`, [first, end), which are the last of a segment, its part, or frees
        those that its part has. If no row holds it, it counts as cached. `step`: as in `_share`."""
        state, row, width, (first, end) = self._state, sequence.row, self.widths[cls - 1], entries
        part, count = segment.parts.get(cls), end - first
        there = min(part.length, count) if part is not None else 0
        if there:
            self._free_range(sequence, cls, end - there, end)
            state.emit(MapPart(cls, row, end, (segment.id,)))
        if there < count:
            part = self._parts.store(segment, cls, count, width)
            if step is not None and state.confirmed < step:  # which may still fail
                self._parts.note_pending(part, step)
            state.emit(StorePart(cls, row, first, end, segment.id))
            state.count(cached=(count - there) * width)  # a part that rows hold has its length already

    # Steps

    def confirm(self, step: int) -> None:
        """Marks as computed the parts that `step` and those before it compute."""
        self._parts.confirm(step)

    def unconfirmed_rows(self) -> set[int]:
        """Returns the rows that hold a part with unconfirmed tokens."""
        return {row for part in self._parts.pending() for row in part.holders}

    def retract(self) -> None:
        """Frees the parts with unconfirmed tokens, which no sequence holds."""
        for part in self._parts.pending():
            self._drop(part)

    # Parts and the entries of rows

    def _hold(self, part: Part, row: int) -> None:
        if not part.holders:
            self._state.count(cached=-part.num_slots)
            part.superseded = False
        part.holders.add(row)

    def _let_go(self, part: Part, row: int) -> None:
        """Removes a row from the holders of a part, which is then cached, or freed where no look-up finds
        it."""
        part.holders.discard(row)
        if part.holders:
            return
        state = self._state
        if part.segment.indexed:
            state.count(cached=part.num_slots)
            self._parts.note_idle(part)
        else:
            state.count(free=part.num_slots)
            state.emit(FreePart(part.cls, part.segment.id))
            self._parts.remove(part)

    def _free_own(self, sequence: WindowedSequence, cls: int, end: int) -> None:
        """Frees the sequence's own entries before `end`."""
        own = sequence.own(cls)
        if own < end:
            self._free_range(sequence, cls, own, end)
            sequence.set_own(cls, end)

    def _free_range(self, sequence: WindowedSequence, cls: int, start: int, end: int) -> None:
        self._state.emit(FreePartRange(cls, sequence.row, start, end))
        self._state.count(free=(end - start) * self.widths[cls - 1])

    # What the state does to segments

    def leave(self, segments: Iterable[Segment], row: int) -> None:
        """Removes a row from the holders of all parts of these segments, which it leaves."""
        for segment in segments:
            for part in list(segment.parts.values()):
                if row in part.holders:
                    self._let_go(part, row)

    def forget(self, sequence: WindowedSequence, segment: Segment) -> None:
        """Makes the parts of a segment the sequence's own, which alone holds it; it is forgotten then."""
        self._passed.discard(sequence)
        for part in segment.parts.values():
            sequence.set_own(part.cls, sequence.own(part.cls) - part.length)
        segment.parts = NO_PARTS

    def split(self, segment: Segment, head: Segment) -> None:
        """Divides the parts of a segment whose first tokens have become `head`."""
        self._parts.split(segment, head)
        self.note_ends(head)

    def note_ends(self, segment: Segment) -> None:
        """Notes that the parts of a segment end where they did not before, for the rows that hold them."""
        for part in segment.parts.values():
            for row in part.holders:
                sequence = self._state.sequences[row]
                assert isinstance(sequence, WindowedSequence)
                sequence.note_oldest(part.cls)

    def can_join(self, head: Segment, segment: Segment) -> bool:
        """Returns whether the parts of both segments can be joined with their tokens."""
        return self._parts.can_join(head, segment)

    def join(self, head: Segment, segment: Segment) -> None:
        """Joins the parts of `head` to those of `segment`, whose tokens are joined next."""
        self._parts.join(head, segment)

    def cut(self, segment: Segment, freed: int) -> int:
        """Takes the last `freed` tokens of an unheld segment out of its parts. Returns their slots there."""
        return self._parts.cut(segment, freed) if segment.parts else 0

    def evict(self, leaf: Segment | None) -> int:
        """Frees the oldest part that no row holds, if it is due before `leaf`, the oldest segment. Returns how
        many slots that frees; 0 if the leaf is due first."""
        part = self._parts.oldest()
        if part is None or (leaf is not None and leaf.due < part.due):
            return 0
        return self._drop(part)

    def evict_protected(self) -> int:
        """Frees the oldest part that sessions protect. Returns how many slots that frees; 0 for none."""
        part = self._parts.oldest_protected()
        return 0 if part is None else self._drop(part)

    def drop_parts(self, segment: Segment) -> int:
        """Frees the parts of an unheld segment, which is about to be cut. Returns how many slots that frees."""
        return sum([self._drop(part) for part in list(segment.parts.values())])

    def _drop(self, part: Part) -> int:
        self._state.emit(FreePart(part.cls, part.segment.id))
        self._state.count(free=part.num_slots, cached=-part.num_slots)
        self._parts.remove(part)
        return part.num_slots

    def check(self, segments: Iterable[Segment]) -> tuple[int, int]:
        """Recounts the parts of these segments and their holders. Returns how many slots of parts are cached
        and how many are held, with the sequences' own. Raises CheckFailed."""
        segments = list(segments)
        self._parts.check(segments)
        holders: dict[int, set[int]] = {}
        held = cached = 0
        if not self.lifetimes:
            return cached, held
        for row, sequence in self._state.sequences.items():
            assert isinstance(sequence, WindowedSequence)
            for cls, width in zip(self._classes, self.widths, strict=True):
                held += (sequence.length - sequence.own(cls)) * width
                for part, _ in sequence.held_parts(cls):
                    holders.setdefault(id(part), set()).add(row)
        for segment in segments:
            for part in segment.parts.values():
                if part.holders != holders.get(id(part), set()):
                    raise CheckFailed(f"{part} lists {part.holders}, and is held by {holders.get(id(part))}")
                if part.holders:
                    held += part.num_slots
                else:
                    cached += part.num_slots
        return cached, held
