"""The ledger: exact counts of which sequence holds how many tokens, what is shared, and what can be evicted.

It is pure Python arithmetic without torch, slots or a clock. Each verb changes the counts and the prefix tree
at once and emits *edits* (`lightkv/edits.py`), which the device memory's owner applies; `drain` returns
them. A verb that raises has changed nothing and emitted no edit; but where layers have groups, an extension
that is refused for want of slots has freed what the windows of its sequences have passed.

After every verb `num_free + num_cached + num_held == capacity`.
"""

from collections.abc import Iterable, Iterator, Set
from collections.abc import Sequence as Seq
from typing import TypeVar

from lightkv.counts import checked_count
from lightkv.edits import Alloc, Edit
from lightkv.errors import OutOfRows, OutOfTokens, SequenceTooLong
from lightkv.holdings import Holdings
from lightkv.layer_groups import ONE_GROUP, LayerGroups
from lightkv.triton_kernels.layout.ring import Ring

from . import extension
from .crosses import CrossSequence, ReaderSequence
from .extension import Branch, Branches, Extension
from .prefix_tree import Match, Namespace, PrefixTree
from .recount import holdings_of, recount
from .rings import RingSequence
from .segments import TOKEN_BYTES, Segment, reachable
from .sequence import Sequence, prompt_length, require_lists
from .sessions import Session, Sessions
from .snapshots import StateCounts
from .state import LedgerState

S = TypeVar("S", bound=Sequence)


class TokenLedger:
    """Counts for a pool of `capacity` slots and a table of `max_sequences` rows of `max_entries` entries.

    `max_protected`: the most slots of what sessions protect, which is evicted last; their tails in layers with
    windows come on top. `groups`: how the model's layers share slots. Where all see everything, as by default,
    a token is one slot; otherwise all counts are of slots, and sequences hold in the layers with windows what
    these still see (`segments.py`). `num_states`: where recurrent layers have states, the slots of these, which
    are counted by themselves (`states`, `snapshots.py`); 0 where there are none.
    """

    def __init__(
        self,
        capacity: int,
        max_sequences: int,
        max_entries: int,
        max_protected: int = 0,
        groups: LayerGroups = ONE_GROUP,
        num_states: int = 0,
    ) -> None:
        self.groups = groups
        self.max_sequences = checked_count("max_sequences", max_sequences)
        self.max_entries = checked_count("max_entries", max_entries)
        max_protected = checked_count("max_protected", max_protected, least=0)
        capacity = checked_count("capacity", capacity)
        num_states = checked_count("num_states", num_states, least=0)
        self._state = LedgerState(capacity, self.max_sequences, max_protected, groups, num_states)
        self._extension = Extension(self._state, self.max_entries)
        self._branches = Branches(self._state)

    @property
    def step(self) -> int:
        """The number of the step that is being planned, which its caller counts on; what is published carries
        it until `confirm`."""
        return self._state.step

    @step.setter
    def step(self, step: int) -> None:
        self._state.step = step

    @property
    def capacity(self) -> int:
        """Tokens of the pool."""
        return self._state.capacity

    @property
    def num_free(self) -> int:
        """Tokens that no sequence holds and the cache does not keep."""
        return self._state.num_free

    @property
    def num_cached(self) -> int:
        """Tokens that no sequence holds, kept because a prompt may hit them."""
        return self._state.num_cached

    @property
    def num_held(self) -> int:
        """Tokens that open sequences hold; shared tokens count once."""
        state = self._state
        return state.capacity - state.num_free - state.num_cached

    @property
    def num_available(self) -> int:
        """Tokens that `extend` can allocate: the free ones and, by eviction, the cached ones."""
        return self._state.num_free + self._state.num_cached

    @property
    def states(self) -> StateCounts:
        """The counts of state slots, all 0 where the layers have no states."""
        return StateCounts() if self._state.states is None else self._state.states.counts

    @property
    def num_open(self) -> int:
        """Open sequences."""
        return len(self._state.sequences)

    @property
    def sequences(self) -> Iterable[Sequence]:
        """The open sequences."""
        return self._state.sequences.values()

    @property
    def shared(self) -> Set[Segment]:
        """The segments that more than one open sequence holds."""
        return self._state.tree.shared

    def __repr__(self) -> str:
        return (
            f"TokenLedger({self.num_free} free, {self.num_cached} cached, {self.num_held} held of "
            f"{self.capacity} tokens; {self.num_open} of {self.max_sequences} sequences open)"
        )

    def holders(self, segment: Segment) -> Iterator[Sequence]:
        """Yields the open sequences that hold `segment`."""
        return map(self._state.sequences.__getitem__, segment.holders)

    def holdings(self) -> Holdings:
        """Returns what each open sequence's row and each segment holds, once the edits so far are applied."""
        return holdings_of(self._state)

    def require_open(self, sequence: Sequence) -> None:
        """Raises ValueError for a sequence that is closed or belongs to another ledger."""
        self._state.require_open(sequence)

    def drain(self) -> list[Edit]:
        """Returns the edits since the last call, in order. The caller has to have them applied."""
        return self._state.drain()

    @property
    def tree(self) -> PrefixTree:
        """The prefix tree, which can note what comes and goes in it; only verbs of the ledger change it."""
        return self._state.tree

    def open(
        self,
        token_ids: bytes,
        namespace: Namespace = (),
        session: Session | None = None,
        keep_at: Seq[int] = (),
    ) -> Sequence:
        """Opens a sequence that holds the longest cached prefix of its prompt (`match`).

        At least one token is left to compute, so that there are logits to sample from. `token_ids` is int32
        bytes; sequences of different `namespace` share nothing. `session`: protects the tokens that are cached
        when the sequence closes (`Sessions.open`). `keep_at`: after how many tokens another prompt may diverge
        or go on, so that what windows and states see there is kept; states are kept there instead of one token
        before the prompt's end. Raises OutOfRows, SequenceTooLong, ValueError.
        """
        sequence = Sequence(token_ids, session)
        sequence.keep_at = keep_at
        return self._open(sequence, prompt_length(token_ids), namespace)

    def open_ring(self, token_ids: bytes, ring: Ring, namespace: Namespace = ()) -> RingSequence:
        """Opens a sequence whose row is a ring, as `KVCache.open_ring` does. Raises what `open` does."""
        self._require_one_group("a ring")
        sequence = RingSequence(token_ids, ring)
        prompt_length(token_ids)
        return self._open(sequence, ring.capacity, namespace)

    def open_reader(
        self, token_ids: bytes, cross: CrossSequence, namespace: Namespace = ()
    ) -> ReaderSequence:
        """Opens a sequence that reads a cross sequence, as `KVCache.open_reader` does. Raises what `open` does,
        and ValueError for any other `cross`."""
        self._require_one_group("a reader")
        self.require_open(cross)
        reader = ReaderSequence(token_ids, cross)
        return self._open(reader, prompt_length(token_ids), namespace, cross.root.namespace)

    def open_cross(self, length: int) -> CrossSequence:
        """Opens a cross sequence of `length` tokens and allocates all its slots, as `KVCache.open_cross` does,
        which says when they are freed. Raises OutOfTokens, OutOfRows, SequenceTooLong, ValueError."""
        if length < 1:
            raise ValueError(f"a cross sequence of {length} tokens; give at least one")
        self._require_one_group("a cross sequence")
        self._require_row(length)
        self._extension.make_room(length)
        sequence = CrossSequence()
        # An object of its own, so that no namespace of a caller's is that of its readers.
        self._state.open(sequence, (object(),))
        self._extension.is_even = False
        self._state.alloc(Alloc((sequence.row,), (0,), (length,)), length)
        sequence.length = length
        return sequence

    def _open(self, sequence: S, num_entries: int, namespace: Namespace, within: Namespace = ()) -> S:
        """Opens a new sequence in a free row. The simulator's ledgers count here what they allocate besides."""
        if not isinstance(namespace, tuple):
            raise TypeError(f"namespace is {namespace!r} ({type(namespace).__name__}); give a tuple")
        self._require_row(num_entries)
        self._state.open(sequence, namespace + within)
        self._extension.is_even &= sequence.slot_per_token
        return sequence

    def _require_one_group(self, what: str) -> None:
        """Raises ValueError where layers have slots or states of their own, which `what` does not know."""
        if self._state.states is not None:
            raise ValueError(f"{what} in a cache with states, which cannot forget a token")
        if not self.groups.is_uniform:
            raise ValueError(
                f"{what} in a cache of {self.groups.num_groups} layer groups: it holds each token in all "
                "layers; make the cache of a spec without lifetimes"
            )

    def _require_row(self, num_entries: int) -> None:
        """Raises SequenceTooLong, OutOfRows unless there is a free row of so many entries."""
        if num_entries > self.max_entries:
            raise SequenceTooLong(num_entries, self.max_entries)
        if not self._state.free_rows:
            raise OutOfRows(self.max_sequences)

    @property
    def sessions(self) -> Sessions:
        """The sessions. What they protect is evicted last, that of the session that was used the longest ago
        first. If all together exceed `max_protected`, they lose their protection in the same order."""
        return self._state.sessions

    def match(self, token_ids: bytes, namespace: Namespace = ()) -> Match:
        """Returns what `open` would hit. Changes nothing. Raises ValueError."""
        prompt_length(token_ids)
        match = self._state.tree.match(namespace, token_ids)
        return match.cut(reachable(self._state.classes, match.path[::-1], match.num_tokens))

    def find_branch(self, token_ids: bytes, namespace: Namespace = ()) -> Branch | None:
        """Returns where a prompt diverges from an open sequence, which still has what windows see there but
        would keep it for no other; `keep_branch` has it kept. None where `open` hits all that the tree has, no
        sequence has it any more, or `open` refuses the prompt. Changes nothing."""
        state, too_long = self._state, len(token_ids) > self.max_entries * TOKEN_BYTES
        if too_long or not state.classes or not state.free_rows:
            return None
        return self._branches.find(state.tree.match(namespace, token_ids))

    def keep_branch(self, branch: Branch) -> None:
        """Keeps what is seen where a prompt diverges: `open` hits it now. It has to follow on the
        `find_branch` that found it. Raises ValueError if its sequence has closed."""
        self.require_open(branch.sequence)
        self._branches.keep(branch)

    def growth(self, sequences: Seq[Sequence], count: int = 1) -> int:
        """Returns how many available slots are enough to extend each of these by `count` tokens."""
        return self._extension.growth(sequences, count)

    def extend(self, sequences: Seq[Sequence], counts: Seq[int]) -> Alloc:
        """Allocates `counts[i]` more slots for `sequences[i]`, all or none; evicts cached tokens as needed.

        Returns the edit of the allocation, which `drain` hands out, too, unless it allocates nothing: some
        kinds of sequence are extended with fewer slots than tokens (`Sequence.slots_needed`). Where layers have
        groups, it is that of the layers that see everything, and what windows have passed is freed first, even
        if the extension is then refused.

        Raises OutOfTokens only when free and cached tokens together are too few; SequenceTooLong, ValueError.
        """
        return self._extension.extend(sequences, counts)

    def piece(self, sequence: Sequence, count: int) -> int:
        """Returns how many of the next `count` tokens are to be computed in one piece, so that a state is kept
        where it is wanted. A step may have several pieces of a sequence, one after the other; 0 says that the
        next one has to wait for the next step."""
        return self._extension.piece(sequence, count) if self._state.states else count

    def extend_imported(self, sequence: Sequence, length: int, firsts: Seq[int] = ()) -> Alloc:
        """Extends a sequence to `length` tokens whose K/V comes from elsewhere, all or none. `firsts`: where
        layers have groups, for each class after the first, the first entry that comes; none is held before it.
        Returns and raises what `extend` does, and ValueError where the next token sees an earlier entry."""
        self.groups.require_import(length, firsts)
        if sequence.holds:
            return self._extension.extend_imported(sequence, length, firsts)
        return self.extend([sequence], [length - sequence.length])

    def shrink(self, sequences: Seq[Sequence], counts: Seq[int]) -> None:
        """Undoes an `extend` whose tokens were not computed, as `KVCache.shrink` does."""
        require_lists(sequences, counts)
        self._extension.require_batch(sequences)
        extension.shrink(self._state, sequences, counts)

    def set_prompt(self, sequence: Sequence, token_ids: bytes) -> None:
        """Replaces the sequence's prompt (int32 bytes), which `publish` and `close` store its tokens under.

        What it shares has to begin both prompts; that is not checked. Raises ValueError.
        """
        self.require_open(sequence)
        sequence.prompt = token_ids
        if sequence.holds:
            self._state.begin(sequence, sequence.length)

    def publish(self, sequence: Sequence) -> None:
        """Lets other sequences hit those tokens of the sequence's prompt that have slots, while it runs.

        It may be called in the step that computes them: every layer writes K/V before it attends. Until
        `confirm`, `retract` undoes it. Tokens that the tree has from another sequence stay private, and so do
        all that a sequence computes after it has dropped some.
        """
        state = self._state
        state.require_open(sequence)
        end = sequence.num_publishable
        if not end:
            return
        if sequence.holds:
            sequence.published, sequence.published_in = end, state.step
        if not sequence.node.indexed:
            state.publish_path(sequence)
        state.store(sequence, sequence.prompt, end, state.step)

    def confirm(self, step: int) -> None:
        """Keeps what was published up to and including `step`, all of which has been computed."""
        self._state.confirm(step)

    def retract(self) -> None:
        """Drops what the unconfirmed steps have published, because they failed.

        Close their sequences first, with `cache=False`. Raises ValueError while one still holds such tokens.
        """
        if rows := self._state.unconfirmed_rows():
            raise ValueError(
                f"rows {rows} hold what a failed step has published; close their sequences first"
            )
        self._state.retract()

    def close(self, sequence: Sequence, output_ids: bytes = b"", cache: bool = True) -> None:
        """Closes a sequence. With `cache` its tokens stay to be hit; without, its private tail is freed.

        `output_ids` (int32 bytes) are the generated ids, with which the tail beyond the prompt can be cached.
        Freed in any case are tokens whose id is not known, tokens that the cache has from another sequence, and
        tokens after a gap.
        """
        state = self._state
        state.require_open(sequence)
        if not sequence.let_go():
            return
        if cache and sequence.is_cacheable:
            if sequence.holds:
                self._extension.settle(sequence)
            state.cache_tail(sequence, sequence.prompt + output_ids)
        end = sequence.length
        if end > sequence.shared:
            state.free_range(sequence.row, sequence.shared, end)
        for hold in sequence.holds:
            hold.free_own(end)
        self._extension.forget()
        state.close(sequence)

    def fork(self, sequence: Sequence) -> Sequence:
        """Opens another sequence that holds the same tokens, as `KVCache.fork` does. When it closes, it caches
        its own output. Raises OutOfRows, ValueError."""
        state = self._state
        self._require_branching(sequence)
        if not state.free_rows:
            raise OutOfRows(self.max_sequences)
        if sequence.holds:
            self._extension.settle(sequence)
        state.share_tail(sequence)
        if sequence.holds:
            self._extension.keep_tails(sequence, sequence.length, is_fork=True)
        return state.fork(sequence)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Drops all but the first `length` entries of a sequence, as `KVCache.truncate` does. One that is cut
        to no more than its sinks has dropped nothing any more. Raises ValueError."""
        self._require_branching(sequence)
        extension.truncate(self._state, sequence, length)

    def release(self, sequence: Sequence, count: int, sink_tokens: int = 0) -> int:
        """Drops the `count` oldest tokens after the first `sink_tokens`, as `KVCache.release` does.

        Returns how many slots this frees at once: tokens that others hold stay with them, and tokens that the
        tree has indexed stay cached. Raises ValueError: for more tokens than it has; once it has dropped some,
        for more `sink_tokens` than before, and for fewer while it still shares segments on both sides of the
        gap.
        """
        self._require_branching(sequence)
        self._require_one_group("a sequence that drops tokens")
        return extension.release(self._state, sequence, count, sink_tokens)

    def keep(self, sequence: Sequence, count: int) -> int:
        """Keeps only `count` of the private tokens after its sinks, as `KVCache.keep` does. Which ones stay is
        passed to the device memory. Returns how many slots this frees at once; nothing that the sequence
        computes is cached from now on. Raises ValueError."""
        self._require_branching(sequence)
        self._require_one_group("a sequence that drops tokens")
        return extension.keep(self._state, sequence, count)

    def _require_branching(self, sequence: Sequence) -> None:
        """Raises ValueError for a sequence that is not open, or cannot be forked or lose tokens."""
        self._state.require_open(sequence)
        sequence.require_branching()

    def evict(self, count: int) -> None:
        """Frees `count` cached tokens, more where a tail is larger: first those that were used the longest ago
        and were hardly hit, last those that sessions protect. Raises OutOfTokens, ValueError."""
        if count < 0:
            raise ValueError(f"asked to evict {count} tokens")
        if count > self.num_cached:
            raise OutOfTokens(count, self.num_cached, self.capacity)
        self._state.evict(count)

    def check(self) -> None:
        """Recounts everything from the sequences and the tree. Raises CheckFailed."""
        recount(self._state)
        self._extension.check()
