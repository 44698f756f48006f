"""Decides which grammars a device compiles, when a request may go on with its own, and which are forgotten.

    hold ──► Compile ──► (the device compiles it) ──► Compiled ──► take ──► names of requests that may go on
    release, orders ──► Forget

A grammar is compiled before the request that needs it is queued, so that no step waits for it. The device
compiles one at a time: if it dies meanwhile, it is known with which one. Each client's grammars wait in a line
of their own, the lines take turns, and one that has no room yet holds up none that has. A compiled grammar is
kept while a request holds it; after that, the latest are kept for later requests, for a time and up to a number
of bytes.

`GrammarDesk` does no I/O: the router's process drives it, over a worker.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from lightkv.errors import CheckFailed, LightKVError
from lightkv.router.sampling_params import Grammar, InvalidParams

from .fair_queue import FairQueue

MAX_BYTES = 256 * 2**20  # of compiled grammars that requests hold; those beyond it wait to be compiled
MAX_IDLE_BYTES = 24 * 2**20  # of those that no request holds
# What is compiled grows with its use, up to some 12 MB, which is not measured: so none is kept idle for longer.
IDLE_SECONDS = 60.0
LEAST_BYTES = 64 * 2**10  # that a compiled grammar counts for
MAX_REFUSED = 1024
MAX_WAITING = 256  # grammars of one owner that are not compiled


class TooManyGrammars(LightKVError):
    """An owner has as many grammars waiting to be compiled as may wait."""


class Compile(msgspec.Struct, frozen=True, tag=True):
    """Asks a device to compile a grammar. It answers with Compiled."""

    grammar_id: int
    grammar: Grammar


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Tells a device that no row will name this compiled grammar any more. It does not answer."""

    grammar_id: int


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """The answer to Compile. `error`: why the grammar cannot be used; empty if rows may name it from now on."""

    grammar_id: int
    error: str = ""


@dataclass(eq=False)
class _Entry:
    """One grammar. `names`: the requests that hold it. `owner`: of these the one in whose line it waits.
    `grammar`: its text, until it is compiled."""

    id: int
    digest: bytes
    owner: bytes
    grammar: Grammar | None
    num_bytes: int
    names: set[str] = field(default_factory=set)
    is_ready: bool = False


class GrammarDesk:
    """The grammars of one device, and the requests that hold them.

    max_bytes: of compiled grammars that requests hold. One is compiled whatever its size.
    num_bytes: of all that is compiled, and of what is being compiled.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._next_id = 1
        self._by_id: dict[int, _Entry] = {}
        self._by_digest: dict[bytes, _Entry] = {}  # those that later requests may share
        self._by_name: dict[str, _Entry] = {}
        self._queue: FairQueue[_Entry] = FairQueue()  # those that are to be compiled
        self._compiling: _Entry | None = None
        # Id → since when no request holds it, oldest first.
        self._idle: OrderedDict[int, float] = OrderedDict()
        self.num_bytes = 0
        self._idle_bytes = 0
        self._unsent: list[Compile | Forget] = []
        self._refused: OrderedDict[bytes, None] = OrderedDict()

    def hold(self, names: Sequence[str], grammar: Grammar, num_bytes: int, owner: bytes = b"") -> int:
        """Returns the id of the grammar that the requests `names` need, which stays until each is released.

        `num_bytes`: what it takes when it is compiled. `owner`: what stands for the client. Raises
        InvalidParams for a grammar that was being compiled when a device died, TooManyGrammars where
        MAX_WAITING of the owner wait, and ValueError for a name that holds one; nothing is held then.
        """
        for name in names:
            if name in self._by_name:
                raise ValueError(f"request {name!r} holds a grammar already; release it first")
        digest = hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()
        if digest in self._refused:
            raise InvalidParams(
                "grammar", grammar.text, "another one: a worker died while it compiled this one"
            )
        entry = self._by_digest.get(digest)
        if entry is None:
            if self._queue.num_of(owner) >= MAX_WAITING:
                raise TooManyGrammars(
                    f"{MAX_WAITING} grammars of this client wait to be compiled, which is the limit; try again "
                    "in a moment"
                )
            entry = _Entry(self._next_id, digest, owner, grammar, max(num_bytes, LEAST_BYTES))
            self._next_id += 1
            self._by_id[entry.id] = self._by_digest[digest] = entry
            self._queue.push(entry)
        self._queue.share(entry, owner)
        if self._idle.pop(entry.id, None) is not None:
            self._idle_bytes -= entry.num_bytes
        entry.names.update(names)
        self._by_name.update((name, entry) for name in names)
        return entry.id

    def is_ready(self, grammar_id: int) -> bool:
        """Returns whether a grammar that a request holds is compiled."""
        return self._by_id[grammar_id].is_ready

    def release(self, name: str, is_spoilt: bool = False) -> None:
        """Notes that a request has ended, or will never run. Nothing happens if it holds no grammar.

        `is_spoilt`: the request's text could not go on. What is compiled may have met a limit for good, so that
        later requests get it compiled anew.
        """
        entry = self._by_name.pop(name, None)
        if entry is None:
            return
        entry.names.discard(name)
        if is_spoilt and self._by_digest.get(entry.digest) is entry:
            del self._by_digest[entry.digest]
        if entry.names:
            return
        if entry.is_ready:
            self._leave_idle(entry)
        elif entry is not self._compiling:
            self._queue.remove(entry)
            self._remove(entry)

    def orders(self) -> list[Compile | Forget]:
        """Returns what the device is to do now, in order."""
        self._forget_idle(MAX_IDLE_BYTES)
        entry = self._queue.pop(self._has_room) if self._compiling is None else None
        if entry is not None:
            self._forget_idle(max(self._max_bytes - self._held_bytes - entry.num_bytes, 0))
            self._compiling = entry
            self.num_bytes += entry.num_bytes
            assert entry.grammar is not None
            self._unsent.append(Compile(entry.id, entry.grammar))
        orders, self._unsent = self._unsent, []
        return orders

    def take(self, answer: Compiled) -> list[str]:
        """Notes that the device has compiled a grammar, or could not. Returns the requests that hold it; after
        an error they have to be ended. Raises ValueError for one that it was not told to compile."""
        entry = self._compiling
        if entry is None or entry.id != answer.grammar_id:
            raise ValueError(f"grammar {answer.grammar_id} is not being compiled; report this")
        self._compiling = None
        entry.grammar = None
        names = list(entry.names)
        if answer.error:
            for name in names:
                del self._by_name[name]
            entry.names.clear()
            self.num_bytes -= entry.num_bytes
            self._remove(entry)
        else:
            entry.is_ready = True
            if not names:
                self._leave_idle(entry)
        return names

    def lose_device(self, is_compilers_fault: bool) -> bool:
        """Forgets everything, since the device has died.

        `is_compilers_fault`: whether it ended as a compilation ends a process. Returns whether it did, and was
        compiling a grammar, which is refused from now on.
        """
        blamed = self._compiling if is_compilers_fault else None
        if blamed is not None:
            self._refused[blamed.digest] = None
            if len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)
        for kept in (self._by_id, self._by_digest, self._by_name, self._idle, self._unsent):
            kept.clear()
        self._queue = FairQueue()
        self._compiling = None
        self.num_bytes = self._idle_bytes = 0
        return blamed is not None

    @property
    def is_compiling(self) -> bool:
        """Whether the device was told to compile a grammar and has not answered."""
        return self._compiling is not None

    def check(self) -> None:
        """Recounts the bytes, the holders and those that wait. Raises CheckFailed."""
        entries = self._by_id.values()
        counted = sum(one.num_bytes for one in entries if one.is_ready or one is self._compiling)
        idle = sum(self._by_id[one].num_bytes for one in self._idle)
        if (counted, idle) != (self.num_bytes, self._idle_bytes):
            raise CheckFailed(
                f"grammars of {self.num_bytes} bytes are counted, {self._idle_bytes} of them idle; there are "
                f"{counted} and {idle}"
            )
        held = {name: one for one in entries for name in one.names}
        if held != self._by_name:
            raise CheckFailed(f"{len(self._by_name)} requests hold grammars, and {len(held)} are noted there")
        wrong = [one.id for one in entries if one.is_ready and bool(one.names) == (one.id in self._idle)]
        if wrong:
            raise CheckFailed(f"grammars {wrong} are idle and held, or neither")
        queued = sorted(one.id for one in self._queue)
        waiting = sorted(one.id for one in entries if not one.is_ready and one is not self._compiling)
        if queued != waiting or len(queued) != len(self._queue):
            raise CheckFailed(f"grammars {queued} are queued, counted as {len(self._queue)}; {waiting} wait")

    @property
    def _held_bytes(self) -> int:
        return self.num_bytes - self._idle_bytes

    def _has_room(self, entry: _Entry) -> bool:
        """Returns whether a grammar may be compiled, once idle ones have made room for it."""
        held = self._held_bytes
        return held == 0 or held + entry.num_bytes <= self._max_bytes

    def _leave_idle(self, entry: _Entry) -> None:
        self._idle[entry.id] = self._clock()
        self._idle_bytes += entry.num_bytes
        if self._by_digest.get(entry.digest) is not entry:  # no later request may share it
            self._forget(entry)

    def _forget_idle(self, max_bytes: int) -> None:
        """Forgets what no request has held for IDLE_SECONDS, and the oldest while over `max_bytes` are idle."""
        latest = self._clock() - IDLE_SECONDS
        while self._idle:
            oldest, since = next(iter(self._idle.items()))
            if since >= latest and self._idle_bytes <= max_bytes:
                return
            self._forget(self._by_id[oldest])

    def _forget(self, entry: _Entry) -> None:
        del self._idle[entry.id]
        self._idle_bytes -= entry.num_bytes
        self.num_bytes -= entry.num_bytes
        self._remove(entry)
        self._unsent.append(Forget(entry.id))

    def _remove(self, entry: _Entry) -> None:
        del self._by_id[entry.id]
        if self._by_digest.get(entry.digest) is entry:
            del self._by_digest[entry.digest]
