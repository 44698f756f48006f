"""The sessions that clients have opened, and when each expires.

A session's time to live runs while none of its requests does. The clock is here, in the API process: the router
gets a message when a session ends (`ReleaseSession`).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from lightkv.errors import LightKVError

MAX_SESSIONS = 65_536  # open at once; beyond that, the one that was used the longest ago expires


class UnknownSession(LightKVError):
    """No session of this id is open, or not for this client."""

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"no session {session_id!r:.300} is open; sessions are opened by requests with a session_id, and "
            "expire"
        )


@dataclass(frozen=True)
class SessionUse:
    """A request's use of a session. `name`: the session's in this service, which includes its owner. `ttl`: its
    time to live in seconds."""

    name: str
    ttl: float


@dataclass(slots=True, eq=False)
class OpenSession:
    """A session that has not expired. `ttl`: that of its latest request. `is_used`: whether a request of it was
    accepted. `timer`: set while no request runs."""

    name: str
    ttl: float
    num_running: int = 0
    is_used: bool = False
    timer: asyncio.TimerHandle | None = None


class OpenSessions:
    """Opens and ends sessions. `release`: takes the name of each that ends. Used inside an event loop."""

    def __init__(self, release: Callable[[str], None], max_sessions: int = MAX_SESSIONS) -> None:
        self._release = release
        self._max_sessions = max_sessions
        self._by_name: dict[str, OpenSession] = {}
        self._idle: OrderedDict[OpenSession, None] = OrderedDict()  # without a request, by their last use

    def begin(self, use: SessionUse) -> OpenSession:
        """Notes that a request of a session begins, which opens the session. Call `accept` if it is accepted,
        and `end` when it has ended."""
        session = self._by_name.get(use.name)
        if session is None:
            session = self._by_name[use.name] = OpenSession(use.name, use.ttl)
        self._stop_timer(session)
        session.ttl = use.ttl
        session.num_running += 1
        return session

    def accept(self, session: OpenSession) -> None:
        """Notes that a request of a session was accepted."""
        session.is_used = True
        if len(self._by_name) > self._max_sessions and self._idle:
            self._remove(next(iter(self._idle)))

    def end(self, session: OpenSession) -> None:
        """Notes that a request of a session has ended, or was refused. After the last one the time to live
        begins, unless all were refused: then there is nothing to keep."""
        session.num_running -= 1
        if session.num_running or self._by_name.get(session.name) is not session:
            return
        if not session.is_used:
            self._remove(session)
            return
        self._idle[session] = None
        session.timer = asyncio.get_running_loop().call_later(session.ttl, self._remove, session)

    def release(self, name: str) -> bool:
        """Ends a session now. Returns False where none of this name is open."""
        session = self._by_name.get(name)
        if session is None:
            return False
        self._remove(session)
        return True

    def _remove(self, session: OpenSession) -> None:
        self._stop_timer(session)
        del self._by_name[session.name]
        self._release(session.name)

    def _stop_timer(self, session: OpenSession) -> None:
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None
            del self._idle[session]
