"""`peak_tokens`: the specification of `forecast.Forecast`, by which tests check it (docs/admission.md).

A request in decode holds `held` tokens (a) alone now and one more after each of `remaining` steps (b); then it
ends and frees them all. The total rises in every step and falls only at an end, so that it peaks just before
some request ends. Where all requests decode, and are sorted by b, the longest first, the i requests with the
largest b still run when the i-th ends, and each has grown by b_i:

    peak = max_i ( Σ_{j≤i} a_j + i · b_i )

If an ended request is freed one step late (`lag`), the requests with a larger b have grown by one more token.
A request in prefill grows by the chunks that the steps' budget gives it, at most, and then by one token a step,
as early as that may begin; it is held until it ends, as late as that may be (`PrefillWindow`). A shared segment
is held until its last holder ends, so it counts once.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from lightkv.router.engine.forecast import Prefill
from lightkv.router.engine.prefill_budget import PrefillWindow
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler


class SharedSegment(Protocol):
    """A run of tokens that several requests hold. Segments are compared by identity."""

    @property
    def length(self) -> int: ...


class Demand(NamedTuple):
    """What one request holds now and will hold later, in tokens.

    Attributes:
        held: tokens that the request alone holds now.
        remaining: tokens that it will still take. -1 says that its tokens are freed before the next step is
            planned, as those of a request that took its last one a step before the newest step in flight.
        path: the shared segments that it holds, the deepest first. A request that holds a segment also holds
            the segments after it in every path that contains it.
        decoding: whether it takes one token in every step from now on; a prefill does not.
        tip: how many tokens of the deepest segment it holds; None is all.
        window: when its prefill is computed. A prefill without a window counts in full at all times.
    """

    held: int
    remaining: int
    path: Iterable[SharedSegment]
    decoding: bool
    tip: int | None = None
    window: PrefillWindow | None = None

    def last(self, lag: int) -> int | None:
        """Returns the last step in which its tokens are held, where 0 is the next one; None: in all of them."""
        if self.decoding:
            return self.remaining - 1 + lag
        return None if self.window is None else self.window.last + self.remaining - self.window.left + lag

    def held_in(self, step: int) -> int:
        """Returns the most tokens that it alone holds once `step` has its slots, where -1 is now."""
        taken, window = self.remaining, self.window
        if self.decoding:
            taken = max(min(step + 1, taken), 0)
        elif window is not None:
            computed = min(window.now + step * window.most, window.left) if step >= 0 else 0
            taken = computed + min(max(step - window.first, 0), taken - window.left)
        return self.held + taken


def peak_tokens(demands: Sequence[Demand], lag: int = 0) -> int:
    """Returns the most tokens that these requests can hold together, now and later: exactly, where it is known
    when each prefill is computed, and else never too few.

    `lag`: 1 where a request's tokens are freed a step after it has taken its last one, 0 where they are freed
    at once. The K/V of a request's last token is never written, so `remaining` is one less than the tokens
    that are still to be generated.
    """
    holding = [(demand, list(demand.path), demand.last(lag)) for demand in demands]
    # What is held rises until something is freed.
    steps = {last for _, _, last in holding if last is not None and last >= 0} | {-1}
    peak = 0
    for step in steps:
        total = 0
        shared: dict[int, int] = {}  # id of a segment → the most tokens of it that a request holds
        for demand, path, last in holding:
            if step == -1 or last is None or last >= step:
                total += demand.held_in(step)
                for i, segment in enumerate(path):
                    length = segment.length if i or demand.tip is None else demand.tip
                    shared[id(segment)] = max(length, shared.get(id(segment), 0))
        peak = max(peak, total + sum(shared.values()))
    return peak


def check_peaks(scheduler: Scheduler) -> None:
    """Compares both peaks of a scheduler with their specification. All layers see everything."""
    prefills, holding = scheduler._prefills(), scheduler._running() + scheduler._finishing
    gone = [one for one in holding if scheduler._is_in_flight(one) and one.newest_step < scheduler.step - 1]
    demands = [_demand(one, one.final, prefills, gone) for one in holding]
    assert scheduler.forecast_peak() == peak_tokens(demands, scheduler.depth - 1)
    guaranteed = [_demand(one, one.longest, prefills, gone) for one in holding if one.is_guaranteed]
    assert scheduler.guaranteed_peak() == peak_tokens(guaranteed, scheduler.depth - 1)


def _demand(request: Request, final: int, prefills: Sequence[Prefill], gone: Collection[Request]) -> Demand:
    """Returns the demand of a request that grows to `final` tokens. `gone`: the requests that are in
    no newer step than the one before the newest step in flight."""
    sequence = request.open_sequence
    window = next((window for other, window in prefills if other is sequence), None)
    remaining = 0 if request.finish_reason is not None else final - sequence.length
    if not remaining and request in gone:
        remaining = -1
    return Demand(sequence.num_private, remaining, list(sequence.node.up()), window is None, window=window)
