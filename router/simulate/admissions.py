"""The admissions that a simulation compares: the service's own, and others that no service would use.

Each is an `Admission` of the engine, so that the same scheduler runs it. What differs is how the length of an
output is estimated, which count has to fit the pool, and how many slots an allocation takes for a token.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum
from random import Random

from lightkv.router.config import ADMISSIONS, TTFT_TARGET
from lightkv.router.engine.admission import Admission, Running, held_after_prefills, make_admission
from lightkv.router.engine.estimates import OutputLengths
from lightkv.router.engine.request import Request


class DrawnLengths(OutputLengths):
    """Estimates by a random one of the recent outputs that were longer than this one is so far.

    The Past-Future scheduler (ASPLOS '25) draws all estimates anew for every admission; here one stands until
    the output passes it, and until then it is distributed like a new one.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = Random(seed)

    def estimate(self, generated: int, max_tokens: int) -> int:
        if self.knows_longer(generated):
            self.quantile = self._rng.random()
        return super().estimate(generated, max_tokens)


class AverageLength(OutputLengths):
    """Estimates by the mean of recent outputs. An output longer than the mean is estimated to become a tenth
    longer than it is. LightLLM does the same with an exponential mean."""

    def estimate(self, generated: int, max_tokens: int) -> int:
        if not self.is_known:
            return max_tokens
        mean = sum(self._sorted) // len(self._sorted)
        return min(max(mean, generated * 11 // 10, generated + 1), max_tokens)


class Counting(Enum):
    """Which count of the running requests, and of the one that would join them, has to fit the pool."""

    PEAK = "peak"  # the most tokens that they hold together at any time, as in the service
    SUM = "sum"  # the sum of the most tokens that each ever holds
    # The tokens that they hold once their prefills are computed, and none that they generate.
    PREFILL = "prefill"


@dataclass(frozen=True)
class SimulatedAdmission(Admission):
    """An admission with another count, or for another allocation than token by token.

    Attributes:
        guarantees: whether any request becomes guaranteed. If not, all of them are estimated.
        counting: which count has to fit.
        slack: slots a request that the allocation may take beyond the tokens counted: page - 1 where it
            allocates pages, else 0.
    """

    guarantees: bool = True
    counting: Counting = Counting.PEAK
    slack: int = 0

    def can_guarantee(self, request: Request) -> bool:
        return self.guarantees and super().can_guarantee(request)

    def expected(self, request: Request, generated: int) -> int:
        if self.estimates is None or self.guarantees or self.shares is not None:
            return super().expected(request, generated)
        return self.estimates.estimate(generated, request.max_tokens)

    def limit_with(self, running: Running, *requests: Request) -> int:
        num = running.ledger.num_open + len(requests)
        return super().limit_with(running, *requests) - self.slack * num

    def steps_to_wait(self, running: Running, request: Request) -> float:
        """Returns 0 if the pool has room for the running requests and this one, by `counting`. Else returns for
        how many steps it has none, unless a request ends or a prefill is computed: at least 1, or infinity."""
        if self.counting is Counting.PEAK:
            return super().steps_to_wait(running, request)
        ledger = running.ledger
        limit = ledger.capacity - self.slack * (ledger.num_open + 1) - int(ledger.capacity * self.reserve)
        if self.counting is Counting.SUM:
            # The run of a request that has ended is held until the step in flight behind it ends.
            total = max(running.forecasts.all.total, ledger.num_held)
            return 0 if total + request.final <= limit else math.inf
        # The last pages of what is held are counted; those of what is still to be computed are not.
        limit += self.slack * (ledger.num_open - len(running.prefilling))
        held = held_after_prefills(running, request)
        held += ledger.growth([other.open_sequence for other in running.decoding])
        return 0 if held + 1 <= limit else math.inf


def make_simulated(name: str, seed: int, slack: int, ttft_target: float = TTFT_TARGET) -> SimulatedAdmission:
    """Returns the admission of this name (`SIMULATED_ADMISSIONS`), which has seen no outputs yet.

    `seed`: of its random draws. `slack`: as in `SimulatedAdmission`. `ttft_target`: the seconds to a first
    token that "timely" aims at.
    """
    none = SimulatedAdmission(guarantees=False, slack=slack)
    if name in (*ADMISSIONS, "provisional"):
        own = make_admission("guaranteed" if name == "provisional" else name, ttft_target)
        # No proof counts the ends of pages: with slack, all may be preempted if the service estimates all.
        guarantees = name != "provisional" and (own.shares is None or not slack)
        rules = own.estimates, own.shares, own.reserve, own.patience
        return SimulatedAdmission(*rules, guarantees=guarantees, slack=slack)
    if name == "quantile":
        return replace(none, estimates=OutputLengths(), reserve=0.03)
    if name == "past-future":
        return replace(none, estimates=DrawnLengths(seed))
    if name == "moving-average":
        return replace(none, estimates=AverageLength())
    if name == "watermark":
        return replace(none, reserve=0.01, counting=Counting.PREFILL)
    # "oracle" counts limits; a simulation gives it the true length of each answer as its max_tokens.
    counting = Counting.SUM if name == "sum" else Counting.PEAK
    return replace(none, guarantees=True, counting=counting)
