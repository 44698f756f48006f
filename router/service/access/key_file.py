"""The API keys of a service, or its metrics keys: those given at its start, and those of a file, which is read
again when it changes."""

import hashlib
import hmac
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from lightkv.router.config import InvalidConfig

from .key_limits import KeyLimits

CHECK_SECONDS = 1.0  # at most so often a request looks whether the file has changed
_LIMIT = re.compile(rf"({'|'.join(KeyLimits._fields)})=(.*)")
_COUNT = re.compile("[1-9][0-9]{0,11}")


class NamedKey(NamedTuple):
    """What is known of a key: its name for logs and metrics, and its limits."""

    name: str
    limits: KeyLimits = KeyLimits()


def read_keys(path: Path) -> dict[str, NamedKey]:
    """Returns what a file says of its keys, by key. A line is a key, or a name, spaces and a key, and behind
    them its limits, such as rpm=60; one that begins with # is skipped.

    Raises OSError, and InvalidConfig if the file has no key, a key twice, or other lines, or is not a regular
    file: a pipe can be read only once, and reading it could wait for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidConfig(
                f"the file of keys {path} is not a regular file (but a pipe, a device or a directory); write "
                "the keys into a file"
            )
        content = file.read()
    try:
        lines = content.decode("utf-8").splitlines()
    except ValueError as error:
        raise InvalidConfig(f"the file of keys {path} is not UTF-8 text ({error}); write it anew") from error
    names: dict[str, NamedKey] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        limits: dict[str, int] = {}
        while len(words) > 1 and (found := _LIMIT.fullmatch(words[-1])) is not None:
            name, count = found.groups()
            if not _COUNT.fullmatch(count) or name in limits:
                raise InvalidConfig(
                    f"the file of keys {path} has {name} twice, or as no whole number from 1 on, in line "
                    f"{number}; write {name}=100, or leave it out"
                )
            limits[name] = int(count)
            words.pop()
        if len(words) > 2:
            raise InvalidConfig(
                f"the file of keys {path} has {len(words)} words in line {number}; write a key, or a name "
                f"and a key, and then its limits: {', '.join(f'{name}=N' for name in KeyLimits._fields)}"
            )
        if words[-1] in names:
            raise InvalidConfig(f"the file of keys {path} repeats a key in line {number}; leave it out")
        name = words[0] if len(words) == 2 else name_of_key(words[-1])
        names[words[-1]] = NamedKey(name, KeyLimits(**limits))
    if not names:
        raise InvalidConfig(f"the file of keys {path} holds no key; write one key on each line")
    return names


def name_of_key(key: str) -> str:
    """Returns what a log calls a key without a name: the beginning of its SHA-256 hash."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()[:8]}"


class ApiKeys:
    """The keys that let a request in. One event loop uses it.

    Args:
        given: keys that stay as they are.
        file: further keys, or None. It is read now, and again when it has changed, for which a request looks at
            most every CHECK_SECONDS. A file that has become unreadable changes nothing; a line on standard
            error says so.

    Raises:
        OSError, InvalidConfig: the file cannot be used.
    """

    def __init__(
        self, given: Sequence[str], file: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._given = {key: NamedKey(name_of_key(key)) for key in given}
        self._file = None if file is None else Path(file)
        self._clock = clock
        self._checked = clock()
        self._stamp = self._stamp_of_file()
        self._set(read_keys(self._file) if self._file is not None else {})

    @property
    def any(self) -> bool:
        """Whether requests need a key."""
        return bool(self._given) or self._file is not None

    @property
    def first(self) -> str | None:
        """One of the keys, or None."""
        return next(iter(self._by_key), b"").decode() or None

    def find(self, given: bytes) -> bytes | None:
        """Returns the key that equals `given`, or None. It is looked up by its hash and then compared in
        constant time, so that the time of an answer tells nothing about the keys, however many there are."""
        self._refresh()
        key = self._by_hash.get(hashlib.sha256(given).digest())
        return key if key is not None and hmac.compare_digest(given, key) else None

    def name(self, key: bytes) -> str | None:
        """Returns the name of a key for logs and metrics; None for one that is not known (any more)."""
        found = self._by_key.get(key)
        return None if found is None else found.name

    def limits(self, key: bytes) -> KeyLimits | None:
        """Returns the limits of a key; None for one that is not known (any more)."""
        found = self._by_key.get(key)
        return None if found is None else found.limits

    @property
    def any_limits(self) -> bool:
        """Whether a key has limits."""
        return any(one.limits != KeyLimits() for one in self._by_key.values())

    def _set(self, found: dict[str, NamedKey]) -> None:
        self._by_key = {key.encode(): one for key, one in (self._given | found).items()}
        self._by_hash = {hashlib.sha256(key).digest(): key for key in self._by_key}

    def _refresh(self) -> None:
        now = self._clock()
        if self._file is None or now - self._checked < CHECK_SECONDS:
            return
        self._checked = now
        stamp = self._stamp_of_file()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._set(read_keys(self._file))
        except (OSError, InvalidConfig) as error:
            print(f"lightkv api: the keys stay as they were: {error}", file=sys.stderr, flush=True)

    def _stamp_of_file(self) -> tuple[int, int, int] | None:
        """Returns what changes whenever the file does, or None if it cannot be looked at."""
        if self._file is None:
            return None
        try:
            found = self._file.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns
