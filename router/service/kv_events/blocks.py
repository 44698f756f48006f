"""Virtual blocks of 64 tokens, made of the changes of a ledger's prefix tree.

The ledger counts single tokens, and gateways expect blocks. A block is 64 tokens from a multiple of 64 on,
together with all that stands before them. It is stored once all of its tokens are in the tree, and removed when
the first of them leaves; leaves of the tree end anywhere, so the last tokens of a path may be in no block:

    tokens of a path    0         64        128     170
    segments            ├─────────── A ───────┼── B ─┤
    blocks              ├─── 0 ────┼─── 1 ────┤          two, which end in A; B's tokens fill none yet

Where layers have groups, a block says that the layers which see everything have its tokens. What layers with a
window keep of them can be evicted before, without an event: a prompt may hit fewer tokens than it has blocks
here.

A block's name is a hash of its tokens and the name before it. The tree of a cache namespace begins with a name
of its own, and its first blocks carry that as an extra key, where vLLM has a request's cache_salt.
"""

import hashlib
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from lightkv.ledger.changes import Namespace, SegmentAdded, SegmentCut, SegmentGrew, SegmentSplit, TreeChange

from .events import MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

BLOCK_TOKENS = 64
_TOKEN_BYTES = 4
_BLOCK_BYTES = BLOCK_TOKENS * _TOKEN_BYTES
_MAX_RUN = 64  # blocks of one event


class _Root:
    """The beginning of a namespace's tree. `seed`: the name before its first blocks. `key`: what these carry,
    or None. `is_private`: whether no other request can ever hit what is in it, so that it is not published."""

    __slots__ = ("is_private", "key", "seed")

    def __init__(self, namespace: Namespace, secret: bytes) -> None:
        names = [name for name in namespace if isinstance(name, str)]
        self.is_private = len(names) < len(namespace)
        self.seed, self.key = bytes(32), None
        if namespace and not self.is_private:
            # A namespace may be made of a tenant's API key, of which no consumer can test a guess so.
            hashed = hashlib.blake2b(msgspec.json.encode(names), key=secret, digest_size=32)
            self.seed, self.key = hashed.digest(), hashed.hexdigest()[:32]


@dataclass(slots=True, eq=False)
class _Node:
    """A segment: its tokens, the token at which it starts, the name of the last block that ends before them,
    and the names of the blocks that end in it."""

    root: _Root
    parent: "_Node | None"
    start: int
    tokens: bytes
    before: bytes
    names: list[bytes] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The token at which it ends."""
        return self.start + len(self.tokens) // _TOKEN_BYTES

    @property
    def first(self) -> int:
        """The number, from the root on, of the first block that may end in it."""
        return self.start // BLOCK_TOKENS

    @property
    def last_name(self) -> bytes:
        """The name of the last block that ends in it or before it."""
        return self.names[-1] if self.names else self.before

    def path_tokens(self, begin: int, end: int) -> bytes:
        """Returns the tokens [begin, end) of the path to its end."""
        pieces = []
        node: _Node | None = self
        while node is not None and begin < end:
            if node.start < end:
                at = max(begin, node.start)
                pieces.append(
                    node.tokens[(at - node.start) * _TOKEN_BYTES : (end - node.start) * _TOKEN_BYTES]
                )
                end = at
            node = node.parent
        return pieces[0] if len(pieces) == 1 else b"".join(reversed(pieces))


class BlockTree:
    """The blocks that a prefix tree holds, kept up by the tree's changes. Not thread-safe."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)  # a key for the names of namespaces
        self._nodes: dict[int, _Node] = {}
        self._events: list[KVEvent] = []

    def apply(self, changes: Iterable[TreeChange]) -> list[KVEvent]:
        """Applies changes in their order. Returns what became of the blocks."""
        for change in changes:
            match change:
                case SegmentAdded():
                    self._add(change)
                case SegmentGrew(segment, tokens):
                    node = self._nodes[segment]
                    node.tokens += tokens
                    self._store(node)
                case SegmentSplit(segment, at, head):
                    self._split(self._nodes[segment], at, head)
                case SegmentCut(segment, keep):
                    self._cut(segment, keep)
        events, self._events = self._events, []
        return events

    def restart(self, contents: Iterable[SegmentAdded]) -> Iterator[KVEvent]:
        """Forgets everything and begins with what a tree holds (`PrefixTree.contents`). Yields the events that
        bring consumers there from any state; it is done when they end."""
        self._nodes.clear()
        yield AllBlocksCleared()
        for change in contents:
            yield from self.apply((change,))

    def stored(self) -> Iterator[BlockStored]:
        """Yields events for all blocks that are there, each after those before it."""
        for node in sorted(self._nodes.values(), key=lambda node: node.start):
            yield from _stored(node, 0)

    def _add(self, change: SegmentAdded) -> None:
        if change.parent:
            parent = self._nodes[change.parent]
            node = _Node(parent.root, parent, parent.end, change.tokens, parent.last_name)
        else:
            root = _Root(change.namespace, self._secret)
            node = _Node(root, None, 0, change.tokens, root.seed)
        self._nodes[change.segment] = node
        self._store(node)

    def _store(self, node: _Node) -> None:
        """Stores the blocks that new tokens at the end of `node` have filled."""
        first, last = node.first + len(node.names), node.end // BLOCK_TOKENS
        if first >= last or node.root.is_private:
            return
        num_before, name = len(node.names), node.last_name
        tokens = node.path_tokens(first * BLOCK_TOKENS, last * BLOCK_TOKENS)
        for at in range(0, len(tokens), _BLOCK_BYTES):
            name = hashlib.sha256(name + tokens[at : at + _BLOCK_BYTES]).digest()
            node.names.append(name)
        self._events.extend(_stored(node, num_before))

    def _split(self, node: _Node, at: int, head_id: int) -> None:
        head = _Node(node.root, node.parent, node.start, node.tokens[: at * _TOKEN_BYTES], node.before)
        num_names = min(head.end // BLOCK_TOKENS - head.first, len(node.names))
        head.names = node.names[:num_names]
        node.parent, node.start, node.before = head, head.end, head.last_name
        node.tokens, node.names = node.tokens[at * _TOKEN_BYTES :], node.names[num_names:]
        self._nodes[head_id] = head

    def _cut(self, segment: int, keep: int) -> None:
        node = self._nodes[segment]
        num_left = (node.start + keep) // BLOCK_TOKENS - node.first
        gone = [_number(name) for name in reversed(node.names[num_left:])]
        del node.names[num_left:]
        node.tokens = node.tokens[: keep * _TOKEN_BYTES]
        if not keep:
            del self._nodes[segment]
        if gone:
            self._remove(gone)

    def _remove(self, names: list[int]) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and len(last.block_hashes) < _MAX_RUN:
            last.block_hashes += names
        else:
            self._events.append(BlockRemoved(names, MEDIUM))


def _stored(node: _Node, begin: int) -> Iterator[BlockStored]:
    """Yields events for the blocks that end in `node`, from its block `begin` on."""
    for at in range(begin, len(node.names), _MAX_RUN):
        names = node.names[at : at + _MAX_RUN]
        first = node.first + at
        tokens = node.path_tokens(first * BLOCK_TOKENS, (first + len(names)) * BLOCK_TOKENS)
        parent = (node.names[at - 1] if at else node.before) if first else None
        key = node.root.key
        keys: list[tuple[str, ...] | None] | None = None
        if key is not None and not first:
            keys = [(key,), *(None,) * (len(names) - 1)]
        yield BlockStored(
            block_hashes=[_number(name) for name in names],
            parent_block_hash=None if parent is None else _number(parent),
            token_ids=memoryview(tokens).cast("i").tolist(),
            block_size=BLOCK_TOKENS,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
            extra_keys=keys,
        )


def _number(name: bytes) -> int:
    """Returns a block's name as events have it: 64 bits, as vLLM's are by default."""
    return int.from_bytes(name[-8:], "big")
