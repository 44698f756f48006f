"""A worker of integers for a model with states: it executes plans on the model of the memory with states, and
draws tokens at random."""

import random
from array import array
from collections import deque
from collections.abc import Callable

from lightkv.edits import decode
from lightkv.layer_groups import ONE_GROUP, LayerGroups
from lightkv.ledger import TokenLedger
from lightkv.router.engine.admission import Admission
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Captured, ExpectedMemory, Limits, StepPlan, StepResult
from tests.support.state_memory import Piece, StateMemory, names_after

STOP = 7  # the token that it samples with `stop_chance`; the others are 10 to 12
VOCABULARY = 1000


class StateWorker:
    """Executes plans on a `StateMemory`, in which every piece must find the state and the tokens that it reads.
    `sample`: draws a token after those whose name this is. A step that fails has written garbage, and so have
    those behind it."""

    def __init__(self, ledger: TokenLedger, sample: Callable[[int], int]) -> None:
        self.ledger = ledger
        size = ledger.capacity, ledger.states.capacity, ledger.max_sequences, ledger.max_entries
        self.memory = StateMemory(ledger.groups, *size)
        self.names: dict[
            int, list[int]
        ] = {}  # by row: those of its tokens, up to the one that was drawn last
        self.sample = sample
        self.fatal = False
        self.fails_next = False
        self.num_pieces = 0  # parts that another part of their row follows in their step
        self.results: deque[StepResult | RuntimeError] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Computes a step, or fails it when its result is collected."""
        fails = self.fails_next or any(isinstance(one, RuntimeError) for one in self.results)
        self.fails_next = False
        self.results.append(self._execute(plan, fails))

    def collect(self) -> StepResult:
        result = self.results.popleft()
        if isinstance(result, RuntimeError):
            raise result
        return result

    def capture(self) -> Captured:
        return Captured(0.0, 0)

    def check(self, edits: bytes, expected: ExpectedMemory) -> None:
        self.memory.apply(decode(edits))
        self.memory.check(expected.holdings, self.ledger.states, expected.num_free)

    def _execute(self, plan: StepPlan, fails: bool) -> StepResult | RuntimeError:
        rounds = self._rounds(plan)
        memory = self.memory
        if fails:
            for one in [one for pieces in rounds for one in pieces]:
                memory.tokens.write(one.row, one.start, ["garbage"] * (one.end - one.start))
                memory.values[one.writes] = "garbage"
            return RuntimeError("a failed step")
        memory.compute(rounds)
        sampled = []
        for index in plan.sample:
            names = self.names[plan.rows[index]]
            sampled.append(self.sample(names[-1]))
            names += names_after(names[-1], sampled[-1:])
        return StepResult(plan.step, sampled, len(memory.tokens.free), 0)

    def _rounds(self, plan: StepPlan) -> list[list[Piece]]:
        """Applies the edits of a step. Returns its pieces: the first of each row, the second, and so on."""
        memory, edits, applied = self.memory, plan.all_edits(), 0
        slots = dict[int, list[int]]()
        for part, end in plan.pieces.items():
            memory.apply(edits[applied:end])
            slots[part], applied = memory.rows[plan.rows[part]].copy(), end
        memory.apply(edits[applied:])
        self.num_pieces += len(slots)
        prompts = {one.row: array("i", one.prompt) for one in self.ledger.sequences}
        for new in plan.new_rows:
            start = plan.starts[plan.rows.index(new.row)]
            self.names[new.row] = names_after(0, prompts[new.row][:start])
        ids, rounds = array("i", plan.token_ids), list[list[Piece]]()
        for part, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts, strict=True)):
            names = self.names[row]
            if part < plan.num_prefills:
                assert len(names) == start
                names += names_after(names[-1] if names else 0, ids[:count])
                ids = ids[count:]
            rank = sum([row in [one.row for one in pieces] for pieces in rounds])
            rounds += [[]] * (rank == len(rounds))
            rounds[rank] = [
                *rounds[rank],
                Piece(row, start, start + count, names[:], *slots.get(part, memory.rows[row])),
            ]
        return rounds


def make(
    capacity: int,
    num_states: int,
    limits: Limits,
    depth: int = 1,
    groups: LayerGroups = ONE_GROUP,
    admission: Admission | None = None,
    sample: Callable[[int], int] | None = None,
    kind: type[Scheduler] = Scheduler,
) -> tuple[LocalEngine, StateWorker]:
    """Returns an engine over a model of a memory with states."""
    rows, protected = limits.max_num_seqs, int(limits.session_share * capacity)
    ledger = TokenLedger(capacity, rows, limits.max_model_len, protected, groups, num_states)
    rng = random.Random(0)
    worker = StateWorker(ledger, sample or (lambda name: rng.randrange(10, 13)))
    return LocalEngine(kind(ledger, limits, depth, admission), worker), worker
