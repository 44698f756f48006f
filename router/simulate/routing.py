"""Routing policies: which of several replicas gets a request, from what a router in front of them can know.

It knows the tokens that each replica holds and has waiting (gauges), what it has sent itself, and which blocks
of 64 tokens each replica's cache holds (KV events). It is no oracle: it does not know how long answers become,
which tokens a step under way computes, or what will be evicted. Events and gauges are taken to arrive at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightkv.ledger import TokenLedger

BLOCK_TOKENS = 64  # of a block of KV events
# A replica is too busy for its prefixes beyond this many times the load of the least busy one, which counts as
# at least this share of the pool, so that a few requests on an idle fleet do not tear conversations apart.
BUSY_FACTOR = 2
IDLE_SHARE = 1 / 8
# A shorter known prefix, as a share of the prompt, is not followed: a system prompt is everywhere soon.
WORTHWHILE_SHARE = 1 / 2


@dataclass(frozen=True)
class View:
    """What a router knows when a request arrives; lists by replica.

    Attributes:
        number: of the request, from 1.
        num_prompt: its prompt tokens.
        loads: tokens that are held or wait to be computed.
        sent: prompt tokens that the router has sent there so far.
        capacity: tokens of each replica's pool.
        known: returns the prompt tokens, in whole blocks, that each cache holds by its events.
    """

    number: int
    num_prompt: int
    loads: Sequence[int]
    sent: Sequence[int]
    capacity: int
    known: Callable[[], Sequence[int]]

    def least(self, replicas: Sequence[int]) -> int:
        """Returns the one of `replicas` with the least load; among equals, that which was sent the least."""
        return min(replicas, key=lambda i: (self.loads[i], self.sent[i], i))


def round_robin(view: View) -> int:
    """Returns each replica in turn."""
    return (view.number - 1) % len(view.loads)


def least_tokens(view: View) -> int:
    """Returns the replica that holds and has waiting the fewest tokens."""
    return view.least(range(len(view.loads)))


def prefix(view: View) -> int:
    """Returns the replica whose cache has the longest prefix of the prompt, unless that is too busy or the
    prefix too short; then as `least_tokens`."""
    known, loads = view.known(), view.loads
    longest = max(known)
    found = view.least([i for i, tokens in enumerate(known) if tokens == longest])
    most = BUSY_FACTOR * max(min(loads), IDLE_SHARE * view.capacity)
    if longest < max(WORTHWHILE_SHARE * view.num_prompt, BLOCK_TOKENS) or loads[found] > most:
        return least_tokens(view)
    return found


Policy = Callable[[View], int]
ROUTINGS: dict[str, Policy] = {
    "round-robin": round_robin,
    "least-tokens": least_tokens,
    "prefix": prefix,
}


def known_tokens(cache: TokenLedger, prompt_ids: bytes) -> int:
    """Returns the tokens of a prompt that a reader of all events so far knows to be in the cache: whole blocks
    of which every token is computed. Tokens of a step under way are not told yet."""
    match = cache.match(prompt_ids)
    known = 0
    for segment in match.path[::-1]:
        length = match.tip if segment is match.path[0] else segment.length
        known += min(length, segment.confirmed)
        if segment.confirmed < length:
            break
    return known // BLOCK_TOKENS * BLOCK_TOKENS
