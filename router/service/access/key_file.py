"""The API keys of a service, or its metrics keys: those given at its start, and those of a file, which is read
again when it changes."""

import hashlib
import hmac
import os
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lightkv.router.config import InvalidConfig

CHECK_SECONDS = 1.0  # at most so often a request looks whether the file has changed


def read_keys(path: Path) -> dict[str, str]:
    """Returns the names of a file's keys by key. A line is a key, or a name, spaces and a key; one that begins
    with # is skipped. Raises OSError, and InvalidConfig if the file has no key, a key twice, or other lines, or
    is not a regular file: a pipe can be read only once, and reading it could wait for ever."""
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
    names: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise InvalidConfig(
                f"the file of keys {path} has {len(words)} words in line {number}; write a key, or a name "
                "and a key"
            )
        if words[-1] in names:
            raise InvalidConfig(f"the file of keys {path} repeats a key in line {number}; leave it out")
        names[words[-1]] = words[0] if len(words) == 2 else name_of_key(words[-1])
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
        self, given: Sequence[str], file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._given = {key: name_of_key(key) for key in given}
        self._file = file
        self._clock = clock
        self._checked = clock()
        self._stamp = self._stamp_of_file()
        self._set(read_keys(file) if file is not None else {})

    @property
    def any(self) -> bool:
        """Whether requests need a key."""
        return bool(self._given) or self._file is not None

    @property
    def first(self) -> str | None:
        """One of the keys, or None."""
        return next(iter(self._by_key), b"").decode() or None

    def find(self, given: bytes) -> bytes | None:
        """Returns the key that equals `given`, or None. Every key is compared, and in constant time, so that
        the time of an answer tells nothing about the keys."""
        self._refresh()
        equal = [key for key in self._by_key if hmac.compare_digest(given, key)]
        return equal[0] if equal else None

    def name(self, key: bytes | None) -> str | None:
        """Returns the name of a key for the log; None for no key."""
        return None if key is None else self._by_key.get(key)

    def _set(self, found: dict[str, str]) -> None:
        self._by_key = {key.encode(): name for key, name in (self._given | found).items()}

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
