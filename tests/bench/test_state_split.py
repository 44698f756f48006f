"""The simulation of a split between K/V and states, beside one budget: no side has more bytes than there are,
and one budget moves them to where they are needed."""

import pytest

from bench.trace.state_split import (
    MODELS,
    ONE,
    TWICE,
    Agents,
    OneBudget,
    Side,
    hits,
    ledger_of,
    sides,
)
from lightkv.ledger import TokenLedger

BUDGET, RATIO = 260_000, 1500


class Watched(OneBudget):
    """Notes the most and the fewest states that the budget has given room to."""

    most, fewest = 0, BUDGET

    def close(self, *args: object, **settings: object) -> None:
        super().close(*args, **settings)  # type: ignore[arg-type]
        self.check()
        states = self._states.capacity
        assert self._state.capacity + RATIO * states == self.budget
        self.most, self.fewest = max(self.most, states), min(self.fewest, states)


@pytest.mark.parametrize("name", MODELS)
def test_no_side_has_more_bytes_than_there_are(name: str) -> None:
    model = MODELS[name]
    for side, (tokens, states) in sides(model).items():
        if states is not None and side != TWICE:
            assert model.tokens - model.ratio < tokens + states * model.ratio <= model.tokens
    assert sides(model)[ONE].tokens == model.tokens
    assert ledger_of(model, Side(1000, 7)).states.capacity == 7


def test_one_budget_moves_bytes_and_finds_what_the_best_split_does() -> None:
    agents = Agents(3, seed=0)
    one = Watched(BUDGET, RATIO, 256, 200_000)
    found = hits(agents, one)
    splits = [TokenLedger(BUDGET - RATIO * num, 256, 200_000, num_states=num) for num in (4, 20, 60)]
    assert found > 0.9 * max(hits(agents, ledger) for ledger in splits)
    assert one.most > one.fewest > 0
