"""How many prompt tokens a step may compute: a fixed number, or as many as a target for the time between tokens
allows.

Where no request decodes, a step takes the prompt tokens that fill the device (`Limits.prefill_budget`). Beside
decodes it takes as many as keep it within the target, by the step-time model. The answer depends on counts and
on the model alone, never on a clock, so that the same counts always give the same chunk.

Admission has to know when a prefill will be computed. `windows` says what can be known of it (`PrefillWindow`).
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from .step import Limits
from .step_time import StepTime, Work


class Pace(NamedTuple):
    """How long a step with decodes and prompts may take: `seconds`, or `times` what the decodes alone take,
    whichever is longer."""

    seconds: float
    times: float

    def of(self, alone: float) -> float:
        return max(self.seconds, self.times * alone)


# Unless a target is given, prompts that take LITTLE seconds to compute are spread over short steps. Where more
# of them wait, steps become longer, up to those of HURRIED where they take MUCH seconds: then first tokens
# would be delayed, and few long gaps between tokens do less harm than many.
SPREAD = Pace(0.030, 2.5)
HURRIED = Pace(0.120, 3.0)
LITTLE, MUCH = 0.1, 0.2
LEAST = 64  # prompt tokens a step, under any target, so that every prompt makes progress


class PrefillWindow(NamedTuple):
    """When the rest of a prefill is computed: between the soonest and the latest that may happen. Steps count
    from the next one to plan, which is 0.

    Attributes:
        left: the tokens still to be computed.
        now: the most of them that the next step computes.
        most: the most of them that each step after it computes.
        last: the latest step that computes the last of them.
    """

    left: int
    now: int
    most: int
    last: int

    @property
    def first(self) -> int:
        """The soonest step that computes the last token of the prefill."""
        return max(_steps(self.left - self.now, self.most), 0)


class PrefillBudget:
    """The rule for the prompt tokens of a step. Without a `step_time`, with an `itl_target` of 0, or with a
    `prefill_chunk` of 0 and no target given, every step takes up to `Limits.prefill_budget`.

    `graph_tokens`: as in `RunnerInfo`.
    """

    def __init__(
        self, limits: Limits, step_time: StepTime | None = None, graph_tokens: Sequence[int] = ()
    ) -> None:
        self.most = limits.prefill_budget
        self._graph_tokens = graph_tokens
        # A chunk of 0 says that no prompt is cut, which only a target that is given can overrule.
        is_bounded = limits.itl_target or (limits.itl_target is None and limits.prefill_chunk)
        self.step_time = step_time if is_bounded else None
        # The fewest that a step computes where as many are left. How many fit its time depends on its decodes,
        # and these may end at any time.
        self.least = self.most if self.step_time is None else min(LEAST, self.most)
        self._itl_target = limits.itl_target

    def seconds(self, decodes: int, kv: int, waiting: int = 0) -> float:
        """Returns the seconds that a step with prompts may take beside `decodes` decodes, which attend `kv`
        tokens in all, while `waiting` prompt tokens are to be computed; infinity where nothing bounds it.

        It is the target, but not less than what the step takes in any case: its decodes, and the least time of
        a step with prompts.
        """
        model = self.step_time
        if model is None or not decodes:
            return math.inf
        alone = model.seconds(Work(decodes, kv, 0, 0))
        target = self._itl_target
        if target is None:
            spread, hurried = SPREAD.of(alone), HURRIED.of(alone)
            behind = (model.per_prompt * waiting - LITTLE) / (MUCH - LITTLE)
            target = spread + (hurried - spread) * min(max(behind, 0.0), 1.0)
        return max(target, model.prefill, alone)

    def rounded(self, num_tokens: int) -> int:
        """Returns the most tokens, up to `num_tokens`, of a step that is not padded: those of a graph. Where no
        graph has as many, or none is known, a multiple of 256, of 128 up to 512, or of 16 up to 256."""
        graphs = self._graph_tokens
        if graphs and num_tokens <= graphs[-1]:
            fitting = bisect_right(graphs, num_tokens)
            return graphs[fitting - 1] if fitting else 0
        return num_tokens - num_tokens % (256 if num_tokens > 512 else 128 if num_tokens > 256 else 16)

    def of_step(self, decodes: int, kv: int, waiting: int = 0) -> "StepBudget":
        """Returns the budget of one step, of which nothing is used yet. The numbers are those of `seconds`."""
        return StepBudget(self, decodes, kv, waiting)

    def windows(self, num_left: Sequence[int]) -> list[PrefillWindow]:
        """Returns the windows of the prefills that have `num_left` tokens to compute, in their order, before
        the next step is planned.

        Each of them may have the next step to itself, because those before it may be aborted. The latest is
        that none is aborted, and that each step computes as few tokens as it may.
        """
        found, ahead = [], 0
        for left in num_left:
            ahead += left
            last = _steps(ahead, self.least) - 1
            found.append(PrefillWindow(left, min(left, self.most), self.most, last))
        return found


class StepBudget:
    """What one step may still compute of prompts. `work` is what it computes so far."""

    def __init__(self, budget: PrefillBudget, decodes: int, kv: int, waiting: int) -> None:
        self.work = Work(decodes, kv, 0, 0)
        self._most = budget.most
        self._least = budget.least
        self._rounded = budget.rounded
        self._seconds = budget.seconds(decodes, kv, waiting)
        self._step_time = budget.step_time if self._seconds < math.inf else None

    def tokens(self, start: int, num_left: int) -> int:
        """Returns how many of the `num_left` tokens of a prompt from position `start` on the step may compute.

        A prompt that fits to its end is not cut. Else the step's tokens, the decodes among them, are rounded
        down to those of a CUDA graph (`PrefillBudget.rounded`): a step that is padded to the next graph would
        take longer than the model says. Where fewer than LEAST prompt tokens would be left of more, they are
        not rounded.
        """
        work = self.work
        count = min(num_left, self._most - work.prompt)
        if self._step_time is None:
            return count
        most = self._step_time.most_prompt_tokens(self._seconds, work, start)
        fits = count if most is None else min(most, count)
        if fits == num_left:
            return fits
        before = work.decodes + work.prompt
        rounded = self._rounded(before + fits) - before
        if work.prompt + rounded >= LEAST:
            return max(rounded, 0)
        return max(fits, min(count, LEAST - work.prompt))

    @property
    def left(self) -> int:
        """The most prompt tokens that the step may still compute."""
        return self._most - self.work.prompt

    def can_begin(self, num_tokens: int) -> bool:
        """Returns whether the step can compute a part of a prompt of `num_tokens`, wherever its cached prefix
        ends."""
        # What is left after a shorter prefix costs less a token, and what is left after a longer one is less.
        return self.tokens(num_tokens, num_tokens) > 0

    def add(self, start: int, count: int) -> None:
        """Notes that the step computes `count` tokens of a prompt from position `start` on."""
        decodes, kv, prompt, pairs = self.work
        self.work = Work(decodes, kv, prompt + count, pairs + count * start + count * (count + 1) // 2)

    def windows(self, num_left: Sequence[int], idx: int, start: int) -> list[PrefillWindow]:
        """Returns the windows of the prefills that have `num_left` tokens to compute, in their order, in the
        middle of planning this step: the prefills before the one at `idx` have got their tokens of this step,
        the one at `idx` is next, from position `start` on, and those behind it get what it leaves.
        """
        found, ahead = [], 0
        room = self.left
        sure = 0  # what the step still computes in any case
        for i, left in enumerate(num_left):
            now = 0
            if i == idx:
                now = sure = self.tokens(start, left)
                room -= now
            elif i > idx:
                now = min(left, room)
                if self._step_time is None:  # nothing but their number bounds the tokens
                    sure += now
                    room -= now
            ahead += left
            found.append(PrefillWindow(left, now, self._most, _steps(ahead - sure, self._least)))
        return found


def _steps(num_tokens: int, budget: int) -> int:
    """Returns how many steps of `budget` tokens compute `num_tokens`."""
    return -(-num_tokens // budget)
