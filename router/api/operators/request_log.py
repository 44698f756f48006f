"""What is noted of each HTTP request, and its line of JSON in the log."""

import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from lightkv.router.api.answers.errors import OVERLOADED
from lightkv.router.api.answers.generation import Generation
from lightkv.router.service.access.key_limits import Reservation

_NOT_LOGGED = frozenset({"/health", "/ready", "/metrics"})  # routes that machines ask for again and again


@dataclass
class RequestRecord:
    """What is noted of one HTTP request.

    id: of its X-Request-Id. method, route: of its path, as a pattern without what a client put into it; None if
    there is no such path. status: of its answer; None if none was begun. key: the name of its API key. begun,
    ended: monotonic times. traceparent: the W3C header of its caller's span. generation: its answers, if any.
    ignored_fields: names of the body's fields that were accepted without an effect. reservation: what it has
    taken of its key's limits.
    """

    id: str
    method: str
    begun: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    route: str | None = None
    status: int | None = None
    key: str | None = None
    traceparent: str | None = None
    generation: Generation | None = None
    ignored_fields: list[str] = field(default_factory=list)
    reservation: Reservation | None = None

    def give_back(self, reservation: Reservation) -> None:
        """Gives back what the request, which has ended, did not use of its key's limits."""
        answers = [] if self.generation is None else self.generation.answers
        num_prompt = 0 if self.generation is None else self.generation.num_prompt_tokens
        # Others than these are the request's own fault.
        reservation.counts |= self.status not in (429, 503, OVERLOADED)
        reservation.end(num_prompt, [len(one.completion.token_ids) for one in answers])

    def line(self) -> dict[str, Any]:
        """Returns the record's line in the log, which has nothing of the texts of prompt or answer."""
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self.id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "key": self.key,
            "seconds": round(self.ended - self.begun, 6),
        }
        generation = self.generation
        if generation is not None:
            answers = generation.answers
            clocks = [answer.clock for answer in answers]
            waited = [clock.waited for clock in clocks if clock.waited is not None]
            first = [clock.first for clock in clocks if clock.first is not None]
            line |= {
                "prompt_tokens": generation.num_prompt_tokens,
                "cached_tokens": generation.num_hit_tokens,
                "completion_tokens": generation.num_completion_tokens,
                "queue_seconds": round(min(waited), 6) if waited else None,
                "first_token_seconds": round(min(first) - self.begun, 6) if first else None,
                "finish_reasons": [answer.completion.finish_reason or "abort" for answer in answers],
                "ignored_fields": self.ignored_fields,
            }
        return line


def write_line(record: RequestRecord) -> None:
    """Writes the line of a request that has ended to standard error; probes and metrics have none."""
    if record.route in _NOT_LOGGED:
        return
    sys.stderr.write(msgspec.json.encode(record.line()).decode() + "\n")
    sys.stderr.flush()
