"""A worker of integers: it executes plans on the model of the memory, and draws tokens at random.

The tests of the scheduler, the engine and the router run on it. It reads and writes each row's K/V as a model
would, so that a slot shared wrongly, missing or freed twice is an error at once.
"""

import random
from array import array
from collections import deque

from lightkv.edits import Alloc, decode
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.step import Captured, ExpectedMemory, StepPlan, StepResult, TokenEvent
from tests.support.memory_model import MemoryModel

STOP = 7  # the token that it samples with `stop_chance`; the others are 10 to 12


class ModelWorker:
    """Executes plans on the memory model: reads and writes each row's K/V, and draws tokens at random."""

    def __init__(self, capacity: int, rng: random.Random, stop_chance: float = 0.0) -> None:
        self.memory = MemoryModel(capacity)
        self.tokens: dict[int, list[int]] = {}
        self.rng = rng
        self.stop_chance = stop_chance
        self.plans: list[StepPlan] = []
        self.fatal = False
        self.error: BaseException | None = None
        self.count_error = 0
        self.flags = 0
        self.num_missing = self.num_captured = 0  # CUDA graphs
        self.results: deque[StepResult | Exception] = deque()  # of the steps sent
        self._launched: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(self.execute(plan))

    def collect(self) -> StepResult:
        return self._launched.popleft()

    def capture(self) -> Captured:
        self.num_captured += 1
        self.num_missing -= 1
        return Captured(0.0, self.num_missing)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if not plan.num_prefills:  # a CUDA graph allocates the slots of the decodes itself
            assert not any(isinstance(edit, Alloc) for edit in decode(plan.edits))
        self.memory.apply(plan.all_edits())
        for new in plan.new_rows:
            self.tokens[new.row] = []
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        chunks = array("i", plan.token_ids)
        spans = list(zip(plan.rows, plan.starts, plan.counts, strict=True))
        for row, start, count in spans[: plan.num_prefills]:  # a prefill comes after those that it hits
            if not self.tokens[row]:  # its first chunk; the tokens before it are cached
                self.tokens[row] = self.memory.tokens_of(row, start)
            assert len(self.tokens[row]) == start
            self.tokens[row] += chunks[:count]
            chunks = chunks[count:]
            self.memory.write(row, start, self.tokens[row])
        for row, start, _ in spans[plan.num_prefills :]:
            self.memory.write(row, start, self.tokens[row])
        for row, start, count in spans:
            self.memory.read(row, self.tokens[row][: start + count])
        self._check_prefixes(plan)
        sampled = []
        for index in plan.sample:
            token = STOP if self.rng.random() < self.stop_chance else self.rng.randrange(10, 13)
            self.tokens[plan.rows[index]].append(token)
            sampled.append(token)
        num_free, missing = len(self.memory.free) + self.count_error, self.num_missing
        return StepResult(plan.step, sampled, num_free, self.flags, num_missing_graphs=missing)

    def _check_prefixes(self, plan: StepPlan) -> None:
        """Checks that rows that are read together share these slots, without any row's newest token."""
        starts = dict(zip(plan.rows[plan.num_prefills :], plan.starts[plan.num_prefills :], strict=True))
        together = [row for rows, _ in plan.prefixes for row in rows]
        assert len(set(together)) == len(together)
        for rows, num_tokens in plan.prefixes:
            read = {tuple(self.memory.rows[row][i] for i in range(num_tokens)) for row in rows}
            assert len(read) == 1
            assert len(rows) > 1
            assert 0 < num_tokens <= min(starts[row] for row in rows)

    def send(self, plan: StepPlan) -> None:
        """Executes a step like a worker that runs ahead: after a failed step, applies the edits and fails."""
        if self.results and isinstance(self.results[-1], Exception):
            self.error = RuntimeError("computed from a failed step")
        try:
            self.results.append(self.execute(plan))
        except RuntimeError as error:
            self.results.append(error)

    def check(self, edits: bytes, expected: ExpectedMemory) -> None:
        self.memory.apply(decode(edits))
        assert len(self.memory.free) == expected.num_free
        self.memory.check_owned({row.row: range(row.shared, row.length) for row in expected.holdings.rows})


def run(engine: LocalEngine) -> list[TokenEvent]:
    """Steps until all requests have ended. Returns their events."""
    events = []
    while engine.has_work:
        events += engine.step()
    return events


def assert_idle(engine: LocalEngine) -> None:
    """Checks that every count is right, no token is held, and none is lost."""
    engine.check()
    stats = engine.stats()
    assert (stats.held, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.free + stats.cached == stats.capacity
