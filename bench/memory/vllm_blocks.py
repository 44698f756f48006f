"""What vLLM's hybrid KV cache manager holds and finds, in blocks, where layers live unequally long.

It is for comparison, and follows the rules of vLLM 0.33 (`vllm/v1/core`):

- Layers of one lifetime are cut into groups of equally many layers: as many as the rarest lifetime has, or the
  commonest, where that has less than 1.5 times as many. What a group lacks is padding.
- A block has room for `block` tokens of one group, and any block serves any group. A request has a list of
  blocks for each group. Before it grows, it gives back the blocks whose tokens the group no longer sees.
- A block that is full can be hit by its tokens and all before them, also once it was given back, until it is
  taken for something else. Blocks that cannot be hit are taken first, then those that were given back the
  longest ago; a request that ends gives back its last blocks first, group by group.
- A hit is a number of whole blocks, less than the prompt, that suits every group: for layers that see
  everything all of them are there; for a window of W the last ceil((W - 1) / block) of them, or all; for a
  chunk those from the block on in which the chunk of the next token begins.
- Which blocks of a window can be hit is a setting (`prefix_cache_retention_interval`). By default only those
  which a hit needs that ends where a prompt does, or where a prompt turned off from what layers have that see
  everything. With `dense` (None) all of them.

It is no allocator of memory, and takes its turn in no scheduler: the simulator's forecast is that of slots that
a window frees one by one, which blocks do not.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from hashlib import blake2b

from lightkv.errors import CheckFailed, OutOfTokens
from lightkv.layer_groups import FULL, Lifetime
from lightkv.ledger.prefix_tree import TOKEN_BYTES

PASSED = -1  # in a request's list, instead of a block that was given back
BALANCED = 1.5  # the commonest lifetime has fewer layers than so many times those of the rarest


def equal_groups(lifetimes: Seq[Lifetime]) -> tuple[int, tuple[Lifetime, ...]]:
    """Returns how many layers a group has room for, and the lifetime of each group, in the order in which their
    layers first come."""
    counts: dict[Lifetime, int] = {}
    for lifetime in lifetimes:
        counts[lifetime] = counts.get(lifetime, 0) + 1
    size = min(counts.values())
    if max(counts.values()) < size * BALANCED:
        size = max(counts.values())
    return size, tuple([one for one, count in counts.items() for _ in range(-(-count // size))])


class BlockSequence:
    """An open request: the tokens that it has and will have, and its blocks in each group."""

    def __init__(self, token_ids: bytes, keys: list[bytes], num_groups: int) -> None:
        self.token_ids = token_ids
        self.keys = keys  # of its whole blocks, first to last
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.ends: set[int] = set()  # after how many blocks a later hit may end, in windows
        self.length = self.num_hit = 0


class BlockMemory:
    """Blocks of `block` tokens in a pool of `capacity` slots, one of which has room for a token of a group. One
    block is set aside, as in vLLM. `groups`: the lifetime of each; `dense`: whether all blocks of windows can
    be hit.

    `num_free + num_cached + num_held == capacity` after every verb, all in slots of whole blocks.
    """

    def __init__(self, capacity: int, block: int, groups: Seq[Lifetime], dense: bool = False) -> None:
        self.block = block
        self.groups = groups
        self._dense = dense
        num_blocks = max(capacity // block - 1, 0)
        self.capacity = num_blocks * block
        # The groups of each lifetime; layers that see everything bound the search for the others.
        order = sorted(set(groups), key=lambda one: (one != FULL, groups.index(one)))
        self._of = {one: [i for i, other in enumerate(groups) if other == one] for one in order}
        self._holders = [0] * num_blocks
        self._keys: list[tuple[int, bytes] | None] = [
            None
        ] * num_blocks  # group and key of a block that is full
        self._known: dict[tuple[int, bytes], OrderedDict[int, None]] = {}  # these → their blocks
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # to be taken, in order
        self._num_cached = 0  # of the queue
        self.sequences: set[BlockSequence] = set()

    @property
    def num_free(self) -> int:
        """Slots of blocks that no request holds and none can hit."""
        return (len(self._queue) - self._num_cached) * self.block

    @property
    def num_cached(self) -> int:
        """Slots of blocks that no request holds, and that can be hit."""
        return self._num_cached * self.block

    @property
    def num_held(self) -> int:
        """Slots of blocks that requests hold."""
        return self.capacity - len(self._queue) * self.block

    def open(self, token_ids: bytes, num_prompt: int) -> BlockSequence:
        """Opens a request that holds what its prompt hits. `token_ids` (int32 bytes): the prompt, of
        `num_prompt` tokens, and what will be generated after it."""
        sequence = BlockSequence(token_ids, self._keys_of(token_ids), len(self.groups))
        most = (num_prompt - 1) // self.block
        num_blocks = self._hit(sequence.keys, most)
        sequence.ends = {most, self._longest(next(iter(self._of)), sequence.keys, most)}
        sequence.length = sequence.num_hit = num_blocks * self.block
        for group, (lifetime, blocks) in enumerate(zip(self.groups, sequence.blocks, strict=True)):
            first = min(lifetime.rule.first_seen(sequence.length) // self.block, num_blocks)
            blocks += [PASSED] * first
            for key in sequence.keys[first:num_blocks]:
                found = next(iter(self._known[group, key]))
                self._hold(found)
                blocks.append(found)
        self.sequences.add(sequence)
        return sequence

    def extend(self, sequence: BlockSequence, count: int) -> None:
        """Gives back what has passed, and takes blocks for `count` more tokens. Raises OutOfTokens."""
        for lifetime, blocks in zip(self.groups, sequence.blocks, strict=True):
            passed = min(lifetime.rule.first_seen(sequence.length) // self.block, len(blocks))
            gone = []
            while passed and blocks[passed - 1] != PASSED:
                passed -= 1
                gone.append(blocks[passed])
                blocks[passed] = PASSED
            self._give_back(gone)
        end = sequence.length + count
        total = -(-end // self.block)
        needed = sum([total - len(blocks) for blocks in sequence.blocks])
        if needed > len(self._queue):
            raise OutOfTokens(needed * self.block, len(self._queue) * self.block, self.capacity)
        num_full = min(end // self.block, len(sequence.keys))
        for group, (lifetime, blocks) in enumerate(zip(self.groups, sequence.blocks, strict=True)):
            blocks += [self._take() for _ in range(total - len(blocks))]
            for i in range(sequence.length // self.block, num_full):
                if self._can_be_hit(lifetime, i, sequence.ends):
                    self._keys[blocks[i]] = own = group, sequence.keys[i]
                    self._known.setdefault(own, OrderedDict())[blocks[i]] = None
        sequence.length = end

    def close(self, sequence: BlockSequence) -> None:
        """Ends a request. Its full blocks can be hit until they are taken."""
        self.sequences.remove(sequence)
        for blocks in sequence.blocks:
            self._give_back([block for block in reversed(blocks) if block != PASSED])

    def check(self) -> None:
        """Recounts everything from the open requests. Raises CheckFailed."""
        holders = [0] * len(self._holders)
        for sequence in self.sequences:
            for block in [one for blocks in sequence.blocks for one in blocks if one != PASSED]:
                holders[block] += 1
        known = {(block, own) for own, blocks in self._known.items() for block in blocks}
        idle = {block for block, count in enumerate(holders) if not count}
        if holders != self._holders or idle != self._queue.keys():
            raise CheckFailed(f"{len(idle)} blocks are held by no request, {len(self._queue)} can be taken")
        if known != {(block, own) for block, own in enumerate(self._keys) if own is not None}:
            raise CheckFailed(f"{len(known)} blocks can be found, which are not those that have a key")
        if self._num_cached != sum([self._keys[block] is not None for block in idle]):
            raise CheckFailed(f"{self._num_cached} blocks are counted as cached, which is not so by recount")

    def _keys_of(self, token_ids: bytes) -> list[bytes]:
        """Returns a key for each whole block, which stands for its tokens and all before them."""
        keys, key, size = [], b"", self.block * TOKEN_BYTES
        for end in range(size, len(token_ids) + 1, size):
            key = blake2b(key + token_ids[end - size : end], digest_size=16).digest()
            keys.append(key)
        return keys

    def _hit(self, keys: Seq[bytes], most: int) -> int:
        """Returns how many of the first `most` blocks every group can go on after."""
        before = -1
        while most != before:
            before = most
            for lifetime in self._of:
                most = self._longest(lifetime, keys, most)
        return most

    def _longest(self, lifetime: Lifetime, keys: Seq[bytes], most: int) -> int:
        """Returns how many of the first `most` blocks the groups of one lifetime can go on after."""
        groups = self._of[lifetime]
        if lifetime.sees == "window":
            needed, run = self._num_seen(lifetime), 0
            for i in range(most - 1, -1, -1):
                if run == needed:
                    return i + 1 + run
                run = run + 1 if self._has(groups, keys[i]) else 0
            return run
        start = lifetime.rule.first_seen(most * self.block) // self.block
        return next((i for i in range(start, most) if not self._has(groups, keys[i])), most)

    def _num_seen(self, window: Lifetime) -> int:
        """Returns in how many blocks the tokens are that the first one of a block sees before it."""
        return -(-(window.size - 1) // self.block)

    def _can_be_hit(self, lifetime: Lifetime, idx: int, ends: set[int]) -> bool:
        """Returns whether later requests can hit a request's block `idx` of a group once it is full."""
        if self._dense or lifetime.sees != "window":
            return True
        return any(end - self._num_seen(lifetime) <= idx < end for end in ends)

    def _has(self, groups: Seq[int], key: bytes) -> bool:
        return all((group, key) in self._known for group in groups)

    def _hold(self, block: int) -> None:
        if not self._holders[block]:
            del self._queue[block]
            self._num_cached -= 1
        self._holders[block] += 1

    def _take(self) -> int:
        """Takes the first block of the queue, which cannot be hit any more."""
        block, _ = self._queue.popitem(last=False)
        own = self._keys[block]
        if own is not None:
            self._num_cached -= 1
            del self._known[own][block]
            if not self._known[own]:
                del self._known[own]
            self._keys[block] = None
        self._holders[block] = 1
        return block

    def _give_back(self, blocks: Iterable[int]) -> None:
        """Ends a hold of each block; those without another are queued in this order."""
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._queue[block] = None
                if self._keys[block] is None:
                    self._queue.move_to_end(block, last=False)
                else:
                    self._num_cached += 1
