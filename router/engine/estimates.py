"""Estimates of how long outputs will be, from the outputs that have ended."""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque

from lightkv.ledger.prefix_tree import Namespace

from .request import Request


class OutputLengths:
    """Estimates by a quantile of the recent outputs that were longer than this one is so far.

    `assumed`: where nothing is known, an output is estimated to have so many tokens, or twice as many as it has
    already; None: `max_tokens`. Nothing is known until `num_needed` outputs have ended, and of an output that
    is longer than all of them.

    An estimate that is too short may cost a preemption, and one that is too long leaves slots idle: a lower
    `quantile` fills the pool more and preempts more.
    """

    quantile = 0.3
    num_recent = 1000
    num_needed = 32

    def __init__(self, assumed: int | None = None, num_needed: int = num_needed) -> None:
        self.assumed = assumed
        self.num_needed = num_needed
        self._recent: deque[int] = deque()
        self._sorted = array("q")

    def observe(self, length: int) -> None:
        """Notes that an output has ended with `length` tokens, by itself or at its limit."""
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > self.num_recent:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def estimate(self, generated: int, max_tokens: int) -> int:
        """Returns the expected final length of an output: more than `generated`, at most `max_tokens`."""
        if not self.knows_longer(generated):
            return max_tokens if self.assumed is None else min(max(self.assumed, 2 * generated), max_tokens)
        shorter = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - shorter
        return min(self._sorted[shorter + int(self.quantile * longer)], max_tokens)

    @property
    def is_known(self) -> bool:
        """Whether enough outputs have ended."""
        return len(self._sorted) >= self.num_needed

    def knows_longer(self, generated: int) -> bool:
        """Returns whether enough outputs have ended, one of them longer than `generated` tokens."""
        return self.is_known and self._sorted[-1] > generated


ASSUMED_LENGTH = 256  # of an answer whose length nothing is known about
UNIT = 2**20  # of shares, which are integers


class LimitShares:
    """Estimates the length of an output with a limit by the share of their limits that earlier outputs have
    used: those of the same namespace whose limits have as many bits or, until eight of them are known, those of
    all namespaces. Until eight of these are known, an output is estimated to have 256 tokens, or twice as many
    as it has already."""

    most_kept = 256  # namespaces and sizes of limits; the one that was seen the longest ago is forgotten

    def __init__(self) -> None:
        self._shares: OrderedDict[tuple[Namespace, int], OutputLengths] = OrderedDict()

    def observe(self, request: Request) -> None:
        """Notes that the request's output has ended by itself or at its limit."""
        for key in self._keys(request):
            lengths = self._shares.setdefault(key, OutputLengths(num_needed=8))
            lengths.observe(len(request.output) * UNIT // request.max_tokens)
            self._shares.move_to_end(key)
        if len(self._shares) > self.most_kept:
            self._shares.popitem(last=False)

    def estimate(self, request: Request, generated: int) -> int:
        """Returns the expected final length of the request's output: more than `generated`, at most its
        limit."""
        limit, none = request.max_tokens, OutputLengths()
        found = [self._shares.get(key, none) for key in self._keys(request)]
        lengths = next((one for one in found if one.is_known), none)
        share = generated * UNIT // limit
        if not lengths.knows_longer(share):
            return min(max(ASSUMED_LENGTH, 2 * generated), limit)
        return min(max(-(-lengths.estimate(share, UNIT) * limit // UNIT), generated + 1), limit)

    @staticmethod
    def _keys(request: Request) -> list[tuple[Namespace, int]]:
        """Returns where the request's share counts: in its namespace, and in all together."""
        bits = request.max_tokens.bit_length()
        own = [(request.namespace, bits)] if request.namespace and not request.is_apart else []
        return [*own, ((), bits)]
