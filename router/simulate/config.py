"""What a simulation is run with: a frozen dataclass, from which the command line makes its options.

Knows the names of allocations and admissions; imports neither a scheduler nor numpy.
"""

import math
from dataclasses import dataclass

from lightkv.errors import LightKVError
from lightkv.router.config import ADMISSIONS, flag, setting

PAGE_SIZES = (16, 32, 64, 128, 256)
ALLOCATIONS = ("token", "contiguous", *(f"paged:{size}" for size in PAGE_SIZES))


class InvalidAllocation(LightKVError, ValueError):
    """An allocation of no known name, or one that a pool has no room for."""


class InvalidSimulation(LightKVError, ValueError):
    """A setting outside what it can be, or a request of the trace that could never run."""


@dataclass(frozen=True)
class SimulationConfig:
    """Every setting of a simulation, from which the command line makes its options."""

    allocation: str = setting(
        "token",
        "token; paged:16, paged:32, paged:64, paged:128 or paged:256; contiguous (prompt and --max-new "
        "reserved in one run).",
    )
    admission: str | None = setting(
        None,
        f"Who is admitted by what: {', '.join(ADMISSIONS)}. Default: exact; sum for contiguous, which can do "
        "no other.",
    )
    capacity: int = setting(120_000, "Tokens that the K/V pool holds.")
    max_num_seqs: int = setting(256, "Requests that run at once.")
    prefill_chunk: int = setting(2048, "Prompt tokens a step at most; 0: no limit.")
    max_new: int = setting(4096, "The most output tokens of a request, which no trace tells.")
    requests: int | None = setting(
        None, "Requests of the trace; a file begins again after its last. Default: all of a file, 2000 else."
    )
    load: float | None = setting(
        None,
        "Arrivals at so many times what an oracle serves of this trace when all requests wait at the start, "
        "which is simulated first. Default: the trace's own times; 1.0 where it has none.",
    )
    rate: float | None = setting(None, "Arrivals at so many requests a second; inf: all at the start.")
    saturation: float | None = setting(
        None, "For --load: the requests a second that an oracle serves, where it is known already."
    )
    ttft_target: float = setting(10.0, "Seconds to the first token at most, for goodput.")
    tpot_target: float = setting(0.1, "Seconds between tokens at most (a request's mean), for goodput.")
    patience: float | None = setting(
        None,
        "Seconds after which a request that waits lets those go first that have waited less. Default: first "
        "come, first served; 0.8 of --ttft-target for timely.",
    )
    reserve: float | None = setting(
        None,
        "Share of the pool that admission leaves alone. Default: the admission's own, 0.03 for quantile and "
        "timely, 0.01 for watermark, 0 for the others.",
    )
    step_time: str = setting(
        "",
        "A JSON file of a step-time model, or its parameters (base=0.007,per_kv=4e-8 …). Default: Llama-3-8B "
        "on an H200.",
    )
    skip_too_large: bool = setting(False, "Leave out requests that could never fit, rather than stop.")
    seed: int = setting(0, "Decides all that is drawn: arrivals, a workload's lengths, estimates.")

    def __post_init__(self) -> None:
        """Raises InvalidSimulation, InvalidAllocation."""
        page = page_of(self.allocation)
        if self.admission not in (None, *ADMISSIONS):
            known = ", ".join(ADMISSIONS)
            raise InvalidSimulation(f"--admission is {self.admission!r}; give one of {known}")
        if not page and self.admission not in (None, "sum"):
            raise InvalidSimulation(
                f"--admission is {self.admission!r}; a contiguous allocation reserves prompt and --max-new at "
                "once, which is sum: leave --admission out"
            )
        for name, least in (("capacity", 1), ("max_num_seqs", 1), ("prefill_chunk", 0), ("max_new", 1)):
            if getattr(self, name) < least:
                raise InvalidSimulation(f"{flag(name)} is {getattr(self, name)}; give at least {least}")
        if self.requests is not None and self.requests < 1:
            raise InvalidSimulation(f"--requests is {self.requests}; give at least 1")
        for name in ("load", "rate", "saturation", "ttft_target", "tpot_target", "patience"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidSimulation(f"{flag(name)} is {value}; give more than 0")
            if value == math.inf and name != "rate":
                raise InvalidSimulation(f"{flag(name)} is {value}; give a number")
        if self.reserve is not None and not 0 <= self.reserve < 1:
            raise InvalidSimulation(f"--reserve is {self.reserve}; give a share, 0 or more and less than 1")
        if self.load is not None and self.rate is not None:
            raise InvalidSimulation("--load and --rate both say how fast requests come; give one")

    @property
    def counted(self) -> str:
        """The admission, named."""
        return self.admission or ("exact" if page_of(self.allocation) else "sum")


def page_of(allocation: str) -> int:
    """The page of an allocation's name: 1 by token, 0 where it goes by runs. Raises InvalidAllocation."""
    if allocation in ("token", "contiguous"):
        return int(allocation == "token")
    name, _, size = allocation.partition(":")
    if name != "paged" or not size.isdigit() or int(size) not in PAGE_SIZES:
        known = ", ".join(ALLOCATIONS)
        raise InvalidAllocation(f"--allocation is {allocation!r}; give one of {known}")
    return int(size)
