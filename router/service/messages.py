"""Every message between the API process and the router: typed, encoded by msgspec, framed by `frames.py`.

Plain data; no torch. What crosses between the router and the worker is in `step.py`.
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
    """Run this. Answered by Accepted or Refused, and then by events, all under `request_id`.

    `prompt_ids`: int32 bytes. `params`: of one answer (n = 1). `stop_ids`: sampling one of them ends it.
    `priority`: lower runs first. `namespace`: prefixes are shared within it alone.
    """

    request_id: str
    prompt_ids: bytes
    params: SamplingParams
    seed: int
    stop_ids: list[int]
    priority: int = 0
    namespace: tuple[str, ...] = ()


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for it any more; `reason` "stop" where its text met a stop string. Nothing follows."""

    request_id: str
    reason: str = "abort"


class AskMap(msgspec.Struct, frozen=True, tag=True):
    """What is each slot of the pool used for? Answered by Mapped, between two steps."""


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """It is queued, and will be answered by events."""

    request_id: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It is not. `kind` says whose fault: "invalid" and "never_fits" the request's, "queue_full" and
    "unavailable" (starting, draining, dead) the moment's."""

    request_id: str
    kind: Literal["invalid", "never_fits", "queue_full", "unavailable"]
    message: str


class Events(msgspec.Struct, frozen=True, tag=True):
    """All that one step brought."""

    events: list[TokenEvent]


class RowOwner(msgspec.Struct, frozen=True):
    """A row of the token table, and how many tokens it alone holds. `request_id`: whose it is; empty where
    nobody waits for that request any more, and a step under way still has it."""

    row: int
    num_tokens: int
    request_id: str


class OwnedMap(PoolMap, frozen=True):
    """The worker's map, and what the router adds. `owners`: all rows that alone hold tokens, the one with the
    most first."""

    owners: list[RowOwner] = msgspec.field(default_factory=list)


class Mapped(msgspec.Struct, frozen=True, tag=True):
    """The map that was asked for; None where there is none, and why."""

    pool: OwnedMap | None
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
    """What a worker is to load, and which of how many it is. Rank 0 answers."""

    config: EngineConfig
    rank: int = 0
    world_size: int = 1


class Done(msgspec.Struct, Generic[Result], frozen=True, tag=True):
    """A worker's answer to a request that it carried out."""

    result: Result


class WorkerError(msgspec.Struct, frozen=True, tag=True):
    """A worker's answer in place of a result. `kind`: the error's class. `step`: the step that failed, if one
    did. After a `fatal` one the worker's memory or device is not to be trusted: start another."""

    kind: str
    message: str
    fatal: bool
    step: int | None = None


ToRouter = Submit | Abort | AskMap
ToApi = Accepted | Refused | Events | Status | Mapped
