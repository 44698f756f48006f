"""Compares the forecast with its specification, `peak_tokens`, under random verbs of a ledger."""

import random
from array import array

from lightkv.ledger import Sequence, TokenLedger
from lightkv.router.engine.forecast import Candidate, Forecast, Prefill
from lightkv.router.engine.prefill_budget import PrefillBudget
from lightkv.router.engine.step import Limits
from tests.support.combinations import each_value, slow
from tests.support.peaks import Demand, peak_tokens

CAPACITY = 100_000


def later_peak(demands: list[Demand], lag: int) -> int:
    """Returns the peak without what is freed before the next step, of which a candidate sees nothing."""
    return peak_tokens([demand for demand in demands if (last := demand.last(lag)) is None or last >= 0], lag)


class Life:
    """Sequences that prefill, decode, rest and close, and the expected forecast of them."""

    def __init__(self, rng: random.Random, lag: int, exact_share: float) -> None:
        self.rng = rng
        self.lag = lag
        self.exact_share = exact_share
        self.ledger = TokenLedger(CAPACITY, 40, 400)
        self.forecast = Forecast(self.ledger, lag)  # of all sequences
        self.forecast_of_some = Forecast(self.ledger, lag)  # of the exact ones
        self.final: dict[int, int] = {}
        self.exact: set[int] = set()  # the rows of the exact ones
        self.end: dict[int, int] = {}  # of those that decode or rest
        self.budget = PrefillBudget(Limits(40, 400, rng.randint(1, 6), 10))
        self.budget.least = rng.randint(1, self.budget.most)
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.resting: list[Sequence] = []

    def forecasts(self, sequence: Sequence) -> list[Forecast]:
        """Returns the forecasts that count the sequence."""
        return [self.forecast, self.forecast_of_some][: 1 + (sequence.row in self.exact)]

    def prefills(self) -> list[Prefill]:
        lefts = [len(sequence.prompt) // 4 - sequence.length for sequence in self.prefilling]
        return list(map(Prefill, self.prefilling, self.budget.windows(lefts)))

    def demands(self, prefills: list[Prefill], exact: bool = False) -> list[Demand]:
        windows = dict(prefills)
        demands = []
        for sequence in self.prefilling + self.decoding + self.resting:
            if exact and sequence.row not in self.exact:
                continue
            window = windows.get(sequence)
            remaining = self.final[sequence.row] - sequence.length
            if window is None:
                remaining = self.end[sequence.row] - self.ledger.step
            path = sequence.node.up()
            demands.append(Demand(sequence.num_private, remaining, path, window is None, window=window))
        return demands

    def check(self) -> None:
        """Compares the forecast with its specification."""
        prefills = self.prefills()
        assert self.forecast.peak(prefills) == peak_tokens(self.demands(prefills), self.lag)
        expected = peak_tokens(self.demands(prefills, exact=True), self.lag)
        of_some = [prefill for prefill in prefills if prefill.sequence.row in self.exact]
        assert self.forecast_of_some.peak(of_some) == expected
        assert self.forecast.num_sequences == self.ledger.num_open
        assert self.forecast_of_some.num_sequences == len(self.exact)

    def step(self) -> None:
        """Extends prefills by a chunk and decodes by a token; some sequences change their state or end."""
        rng, ledger, begun = self.rng, self.ledger, []
        for sequence in list(self.prefilling):
            left = len(sequence.prompt) // 4 - sequence.length
            if rng.random() < 0.7:
                ledger.extend([sequence], [rng.randint(1, left)])
                ledger.publish(sequence)
            if sequence.length == len(sequence.prompt) // 4:
                self.prefilling.remove(sequence)
                begun.append(sequence)
                if rng.random() < 0.5:  # the output becomes shorter or longer
                    self.final[sequence.row] = sequence.length + rng.randint(0, 12)
                remaining = self.final[sequence.row] - sequence.length
                self.end[sequence.row] = ledger.step + 1 + remaining
                for forecast in self.forecasts(sequence):
                    forecast.decode(sequence, remaining, begin=ledger.step + 1)
        growing = [sequence for sequence in self.decoding if sequence.length < self.final[sequence.row]]
        ledger.extend(growing, [1] * len(growing))
        ledger.step += 1
        self.decoding += begun
        for states in (self.prefilling, self.decoding):
            for sequence in list(states):
                if rng.random() < 0.04:
                    states.remove(sequence)
                    self.resting.append(sequence)
                    self.end[sequence.row] = ledger.step - rng.randint(0, 1)
                    for forecast in self.forecasts(sequence):
                        forecast.rest(sequence, self.end[sequence.row])
        for states in (self.decoding, self.resting):
            for sequence in list(states):
                if rng.random() < (0.5 if states is self.resting else 0.03):
                    states.remove(sequence)
                    for forecast in self.forecasts(sequence):
                        forecast.drop(sequence)
                    self.exact.discard(sequence.row)
                    made = [rng.randrange(3) for _ in range(rng.randint(0, 6))]
                    ledger.close(sequence, array("i", made).tobytes(), cache=rng.random() < 0.8)
        ledger.confirm(ledger.step)
        ledger.drain()

    def check_candidate(self, candidate: Candidate, prefills: list[Prefill], exact: bool) -> None:
        """Checks `steps_to_wait` for the limits around the peak, with `exact` that of the exact ones alone."""
        match, window, final, _ = candidate
        rows = self.exact if exact else self.final.keys()
        path = [segment for segment in match.path if segment.holders & rows]
        tip = match.tip if match.path[:1] == tuple(path[:1]) else None
        hit = match.num_tokens - sum(segment.length for segment in path)
        hit += path[0].length - tip if tip is not None and path else 0
        demand = Demand(hit, final - match.num_tokens, path, False, tip if path else None, window)
        totals = later_peak([*self.demands(prefills, exact), demand], self.lag)
        forecast = self.forecast_of_some if exact else self.forecast
        for limit in (totals + 1, totals - 1, totals):  # with the last limit it fits
            wait = forecast.steps_to_wait(candidate, limit, prefills)
            assert (wait == 0) == (totals <= limit)

    def arrive(self) -> None:
        """Asks both forecasts whether a new request fits, and then admits it or not."""
        rng, ledger = self.rng, self.ledger
        prompt = array("i", [rng.randrange(2) for _ in range(rng.randint(1, 10))]).tobytes()
        final = len(prompt) // 4 + rng.randint(0, 15)
        match = ledger.match(prompt)
        lefts = [len(sequence.prompt) // 4 - sequence.length for sequence in self.prefilling]
        place = rng.randint(0, len(lefts))
        lefts.insert(place, len(prompt) // 4 - match.num_tokens)
        windows = self.budget.windows(lefts)
        window = windows.pop(place)
        prefills = list(map(Prefill, self.prefilling, windows))
        candidate = Candidate(match, window, final)
        self.check_candidate(candidate, prefills, exact=False)
        of_some = [prefill for prefill in prefills if prefill.sequence.row in self.exact]
        self.check_candidate(candidate, of_some, exact=True)
        if ledger.num_open < ledger.max_sequences and rng.random() < 0.8:
            sequence = ledger.open(prompt)
            self.final[sequence.row] = final
            self.prefilling.insert(place, sequence)
            if rng.random() < self.exact_share:
                self.exact.add(sequence.row)
            for forecast in self.forecasts(sequence):
                forecast.admit(sequence, final)


@each_value(seed=range(2), lag=[0, 1], exact_share=[1.0, 0.5], num_steps=[100, *slow(250, 1000)])
def test_the_forecast_is_the_peak_of_its_specification(
    seed: int, lag: int, exact_share: float, num_steps: int
) -> None:
    life = Life(random.Random(seed), lag, exact_share)
    most_shared = 0
    for step in range(num_steps):
        for _ in range(life.rng.randint(0, 3)):
            life.arrive()
        life.check()
        life.step()
        life.check()
        most_shared = max(most_shared, len(life.ledger.shared))
        if step % 50 == 0:
            life.ledger.check()
    assert most_shared > 5


def test_nothing_runs_and_nothing_is_held() -> None:
    ledger = TokenLedger(10, 2, 10)
    assert Forecast(ledger).peak([]) == 0
    window = PrefillBudget(Limits(8, 100, 1, 10)).windows([2])[0]
    assert Forecast(ledger).steps_to_wait(Candidate(ledger.match(b"\0" * 8), window, 10), 10, []) == 0
    assert Forecast(ledger).steps_to_wait(Candidate(ledger.match(b"\0" * 8), window, 11), 10, []) == 1
