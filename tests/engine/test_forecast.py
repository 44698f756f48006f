"""Compares the forecast with its specification, `peak_tokens`, under random verbs of a ledger."""

import random
from array import array

import pytest

from lightkv.ledger import Sequence, TokenLedger
from lightkv.router.engine.admission import Demand, peak_tokens
from lightkv.router.engine.forecast import Forecast

CAPACITY = 100_000


class Life:
    """Sequences that prefill, decode, rest and close, and the expected forecast of them."""

    def __init__(self, rng: random.Random, lag: int) -> None:
        self.rng = rng
        self.lag = lag
        self.ledger = TokenLedger(CAPACITY, 40, 400)
        self.forecast = Forecast(self.ledger, lag)
        self.final: dict[int, int] = {}
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.resting: list[Sequence] = []

    def demands(self) -> list[Demand]:
        demands = []
        for sequence in self.prefilling + self.decoding + self.resting:
            remaining = 0 if sequence in self.resting else self.final[sequence.row] - sequence.length
            path = sequence.node.up()
            demands.append(Demand(sequence.num_private, remaining, path, sequence not in self.prefilling))
        return demands

    def step(self) -> None:
        """Extends prefills by a chunk and decodes by a token; some sequences change their state or end."""
        rng, ledger = self.rng, self.ledger
        for sequence in list(self.prefilling):
            left = len(sequence.prompt) // 4 - sequence.length
            if left and rng.random() < 0.7:
                ledger.extend([sequence], [rng.randint(1, left)])
                ledger.publish(sequence)
        growing = [sequence for sequence in self.decoding if sequence.length < self.final[sequence.row]]
        ledger.extend(growing, [1] * len(growing))
        ledger.step += 1
        for sequence in list(self.prefilling):
            if sequence.length == len(sequence.prompt) // 4:
                self.prefilling.remove(sequence)
                self.decoding.append(sequence)
                if rng.random() < 0.5:  # the output becomes shorter or longer
                    self.final[sequence.row] = sequence.length + rng.randint(0, 12)
                self.forecast.decode(sequence, self.final[sequence.row] - sequence.length)
        for states in (self.prefilling, self.decoding):
            for sequence in list(states):
                if rng.random() < 0.04:
                    states.remove(sequence)
                    self.resting.append(sequence)
                    self.forecast.rest(sequence)
        for states in (self.decoding, self.resting):
            for sequence in list(states):
                if rng.random() < (0.5 if states is self.resting else 0.03):
                    states.remove(sequence)
                    self.forecast.drop(sequence)
                    made = [rng.randrange(3) for _ in range(rng.randint(0, 6))]
                    ledger.close(sequence, array("i", made).tobytes(), cache=rng.random() < 0.8)
        ledger.confirm(ledger.step)
        ledger.drain()

    def arrive(self) -> None:
        """Checks `fits` for every limit, and then admits the request or not."""
        rng, ledger = self.rng, self.ledger
        prompt = array("i", [rng.randrange(2) for _ in range(rng.randint(1, 10))]).tobytes()
        final = len(prompt) // 4 + rng.randint(0, 15)
        match = ledger.match(prompt)
        candidate = Demand(0, final - match.num_tokens, match.path, False, match.tip)
        peak = peak_tokens([*self.demands(), candidate], self.lag)
        for limit in (peak + 1, peak - 1, peak):  # with the last limit it fits
            assert self.forecast.fits(final, match, limit) == (peak <= limit)
        if ledger.num_open < ledger.max_sequences and rng.random() < 0.8:
            sequence = ledger.open(prompt)
            self.final[sequence.row] = final
            self.prefilling.append(sequence)
            self.forecast.admit(sequence, final)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_the_forecast_is_the_peak_of_its_specification(seed: int, lag: int) -> None:
    life = Life(random.Random(seed), lag)
    most_shared = 0
    for step in range(2000):
        for _ in range(life.rng.randint(0, 3)):
            life.arrive()
        assert life.forecast.peak() == peak_tokens(life.demands(), lag)
        life.step()
        assert life.forecast.peak() == peak_tokens(life.demands(), lag)
        most_shared = max(most_shared, len(life.ledger.shared))
        if step % 100 == 0:
            life.ledger.check()
    assert most_shared > 5


def test_nothing_runs_and_nothing_is_held() -> None:
    ledger = TokenLedger(10, 2, 10)
    assert Forecast(ledger).peak() == 0
    assert Forecast(ledger).fits(10, ledger.match(b"\0" * 8), 10)
    assert not Forecast(ledger).fits(11, ledger.match(b"\0" * 8), 10)
