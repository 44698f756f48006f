"""The messages between the API process and the router, and a worker's answers.

They are plain data, which msgspec encodes and `frames.py` frames. Plans and results of steps are in
`lightkv.router.engine.step`.
"""

from typing import Generic, Literal, TypeVar

import msgspec

from lightkv.router.config import EngineConfig
from lightkv.router.engine.loop import EngineStats
from lightkv.router.engine.step import PoolMap, RunnerInfo, TokenEvent
from lightkv.router.sampling_params import SamplingParams

Result = TypeVar("Result")
State = Literal["starting", "ready", "draining", "dead"]


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Asks for one answer. The router replies with Accepted or Refused, and then with events, all with the same
    `request_id`.

    `prompt_ids`: int32 bytes. `params`: of one answer (n = 1). `states_length`: whether the client stated its
    max_tokens, or it is only the most that there is room for. `stop_ids`: token ids that end the answer.
    `priority`: requests with a lower one run first. `namespace`: prefixes are shared only within it. `session`:
    the name of the session that protects the answer's tokens, until ReleaseSession. `grammar_bytes`: what the
    grammar of `params` takes when it is compiled, as the API has measured it.
    """

    request_id: str
    prompt_ids: bytes
    params: SamplingParams
    seed: int
    stop_ids: list[int]
    priority: int = 0
    namespace: tuple[str, ...] = ()
    session: str | None = None
    states_length: bool = True
    grammar_bytes: int = 0


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Ends a request early. `reason`: "stop" if its text reached a stop string. The router does not reply."""

    request_id: str
    reason: str = "abort"


class ReleaseSession(msgspec.Struct, frozen=True, tag=True):
    """Ends a session that requests have named: its time is over, or its client has released it. The router does
    not reply. If the session's client disconnects, the router does the same."""

    session: str


class AskMap(msgspec.Struct, frozen=True, tag=True):
    """Asks what each slot of the pool is used for. The router replies with Mapped, between two steps."""


class ResetCache(msgspec.Struct, frozen=True, tag=True):
    """Asks to evict every cached token that no running request holds. The router replies with CacheReset."""


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The request is queued; events will follow."""

    request_id: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request is not queued.

    `kind`: "invalid" and "never_fits" are the request's fault; "queue_full" and "unavailable" (the router is
    starting, draining or dead) may pass.
    """

    request_id: str
    kind: Literal["invalid", "never_fits", "queue_full", "unavailable"]
    message: str


class Events(msgspec.Struct, frozen=True, tag=True):
    """The events of one step."""

    events: list[TokenEvent]


class Mapped(msgspec.Struct, frozen=True, tag=True):
    """The answer to AskMap: the map, or None and the reason."""

    pool: PoolMap | None
    error: str = ""


class CacheReset(msgspec.Struct, frozen=True, tag=True):
    """The answer to ResetCache: how many tokens were evicted, or None and the reason."""

    num_tokens: int | None
    error: str = ""


class Load(EngineStats, frozen=True):
    """The engine's counts and the service's. Totals are those since the start, over all workers.

    Attributes:
        num_ledger_checks: how often the device's count was compared with the ledger's; a mismatch ends the
            service.
        step_age: seconds since the last step completed, or since work began to wait; 0 when idle.
        router_seconds: the router's own time in steps.
    """

    num_ledger_checks: int = 0
    num_worker_starts: int = 0
    step_age: float = 0.0
    router_seconds: float = 0.0


class Status(msgspec.Struct, frozen=True, tag=True):
    """Sent when the state changes, and some four times a second. `detail`: a line for people."""

    state: State
    detail: str
    load: Load
    info: RunnerInfo | None = None


class WorkerStart(msgspec.Struct, frozen=True):
    """Asks a worker to load a model. The config is wrapped, because all of its fields have defaults: without
    the required field any map would decode to a config."""

    config: EngineConfig


class Done(msgspec.Struct, Generic[Result], frozen=True, tag=True):
    """A worker's answer to a call that succeeded."""

    result: Result


class WorkerError(msgspec.Struct, frozen=True, tag=True):
    """A worker's answer to a call that failed.

    `kind`: name of the error's class. `step`: number of the failed step, if a step failed. After a `fatal`
    error the worker's memory or device cannot be trusted, and another worker has to be started.
    """

    kind: str
    message: str
    fatal: bool
    step: int | None = None


ToRouter = Submit | Abort | ReleaseSession | AskMap | ResetCache
ToApi = Accepted | Refused | Events | Status | Mapped | CacheReset
