"""Sessions: which cached tokens belong to conversations that will continue, and are evicted after all others.

A session protects the paths from the root to its *ends*, the segments with which its sequences closed. Tokens
that several sessions protect count once, and all of them together stay within a limit. A protected token is a
cached token like any other: it is evicted where nothing else is left.
"""

from collections import Counter, OrderedDict
from typing import NamedTuple

from lightkv.errors import CheckFailed

from .prefix_tree import PrefixTree
from .segments import Segment

MAX_ENDS = 16  # of one session: parallel answers, and earlier versions of the conversation


class Session:
    """A conversation, whose tokens are protected until it is released. Only the ledger changes one.

    ends: the segments at which its sequences closed, the last one last; `Sessions` protects them and all above
    them, so an end above a later one is left out. is_open: False once the session is released; a sequence of it
    that closes later protects nothing.
    """

    __slots__ = ("ends", "is_open", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.ends: dict[Segment, None] = {}
        self.is_open = True

    def __repr__(self) -> str:
        return f"Session({self.name!r}, ends={len(self.ends)})"


class SessionCounts(NamedTuple):
    """The sessions that protect tokens, and numbers of tokens.

    `protected`: now. Totals: `evicted`, although they were protected; `over_limit`, which lost their
    protection, or did not get it, because of the limit.
    """

    num_sessions: int = 0
    protected: int = 0
    evicted: int = 0
    over_limit: int = 0


class Sessions:
    """The open sessions of one prefix tree, which together protect at most `limit` tokens.

    Every change takes time in proportion to the segments that become protected, or are protected no more.
    """

    def __init__(self, tree: PrefixTree, limit: int) -> None:
        self.limit = limit
        self._tree = tree
        self._by_name: dict[str, Session] = {}
        self._by_end: dict[Segment, dict[Session, None]] = {}
        self._protecting: OrderedDict[Session, None] = OrderedDict()  # those with ends, by their last use
        self._num_protected = self._num_evicted = self._num_over_limit = 0

    @property
    def counts(self) -> SessionCounts:
        """The numbers of sessions and tokens."""
        return SessionCounts(
            len(self._protecting), self._num_protected, self._num_evicted, self._num_over_limit
        )

    def open(self, name: str) -> Session:
        """Returns the open session `name`, or a new one. It is the last one to lose its protection now."""
        session = self._by_name.get(name)
        if session is None:
            session = self._by_name[name] = Session(name)
        elif session in self._protecting:
            self._protecting.move_to_end(session)
        return session

    def release(self, name: str) -> bool:
        """Ends a session: its tokens are cached like any others. Returns False where none has this name."""
        session = self._by_name.pop(name, None)
        if session is None:
            return False
        session.is_open = False
        for end in list(session.ends):
            self._drop(session, end)
        return True

    def protect(self, session: Session, end: Segment, length: int) -> None:
        """Protects the path of `length` tokens to `end`, and no longer the session's earlier ends on that path.

        Where the limit is exceeded, the sessions that were used the longest ago lose their protection, each
        that of its oldest end first. A path that is longer than the limit is not protected.
        """
        if not (session.is_open and length and self.limit):
            return
        if length > self.limit:
            self._num_over_limit += length
            return
        self._add(session, end)
        for segment in end.up():
            if segment is not end and segment in session.ends:
                self._drop(session, segment)
        self._protecting.move_to_end(session)
        if len(session.ends) > MAX_ENDS:
            self._drop(session, next(iter(session.ends)))
        before = self._num_protected
        while self._num_protected > self.limit:
            oldest = next(iter(self._protecting))
            self._drop(oldest, next(iter(oldest.ends)))
        self._num_over_limit += before - self._num_protected

    def lift(self, segment: Segment) -> None:
        """Moves the ends at `segment`, which is about to leave the index, to its parent. Each keeps its age."""
        parent = segment.parent
        assert parent is not None
        for session in list(self._by_end.get(segment, ())):
            ends = [parent if end is segment else end for end in session.ends]
            if parent.parent is not None:
                self._add(session, parent)
                for end in ends:
                    session.ends[end] = session.ends.pop(end)
            self._drop(session, segment)

    def trim(self, segment: Segment, count: int) -> None:
        """Notes that `segment` loses its last `count` tokens."""
        if segment.protected:
            self._num_protected -= count

    def evict(self, count: int) -> None:
        """Notes that `count` protected tokens are evicted."""
        self._num_evicted += count

    def oldest(self) -> Segment | None:
        """Returns the unheld leaf that is evicted when only protected tokens are left: an end of the session
        that was used the longest ago. Returns None where there is no such leaf.

        An end that is no such leaf, because sequences hold it or other sessions protect what is below it, is
        dropped on the way.
        """
        while self._protecting:
            session = next(iter(self._protecting))
            end = next(iter(session.ends))
            if not end.holders and not end.children:
                return end
            self._drop(session, end)
        return None

    def _add(self, session: Session, end: Segment) -> None:
        session.ends.pop(end, None)  # it becomes the last one
        session.ends[end] = None
        sessions = self._by_end.setdefault(end, {})
        if session not in sessions:
            sessions[session] = None
            self._protecting.setdefault(session)
            for segment in end.up():
                segment.protected += 1
                if segment.protected > 1:
                    break
                self._num_protected += segment.length

    def _drop(self, session: Session, end: Segment) -> None:
        del session.ends[end]
        if not session.ends:
            del self._protecting[session]
        sessions = self._by_end[end]
        del sessions[session]
        if not sessions:
            del self._by_end[end]
        for segment in end.up():
            segment.protected -= 1
            if segment.protected:
                break
            self._num_protected -= segment.length
            self._tree.note_unheld(segment)

    def check(self) -> None:
        """Recounts the ends, and the segments and tokens that they protect. Raises CheckFailed."""
        ends = [(session, end) for session in self._by_name.values() for end in session.ends]
        if any(end.parent is None or not end.indexed for _, end in ends):
            raise CheckFailed(f"a session ends at a segment that is not in the tree, of {ends}")
        if set(ends) != {(session, end) for end, by in self._by_end.items() for session in by}:
            raise CheckFailed("the ends of the sessions and the sessions of the ends differ")
        if set(self._protecting) != {session for session, _ in ends}:
            raise CheckFailed(f"{list(self._protecting)} protect tokens, by their ends others do")
        protected = Counter(end for _, end in ends)
        num_protected = 0
        for segment in reversed(list(self._tree)):  # children before their parents
            if segment.protected != protected[segment]:
                raise CheckFailed(
                    f"{segment} is protected {segment.protected} times, {protected[segment]} by recount"
                )
            if segment.protected:
                num_protected += segment.length
                if segment.parent is not None:
                    protected[segment.parent] += 1
        if not num_protected == self._num_protected <= self.limit:
            raise CheckFailed(
                f"{self._num_protected} tokens protected, {num_protected} by recount, of at most {self.limit}"
            )
