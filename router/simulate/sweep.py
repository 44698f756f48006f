"""Several simulations of one trace: every policy with every seed, on the same requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

from .config import SimulationConfig
from .result import Figures, SimulationResult
from .simulator import Progress, simulate


@dataclass(frozen=True)
class Repeats:
    """The results of one policy, one for each seed; at least one."""

    results: tuple[SimulationResult, ...]

    @property
    def name(self) -> str:
        """The name of the policy."""
        settings = self.results[0].settings
        return f"{settings['allocation']} · {settings['admission']}"

    @property
    def seeds(self) -> list[int]:
        """The seeds, in the order of the results."""
        return [result.settings["seed"] for result in self.results]

    @property
    def mean(self) -> SimulationResult:
        """The first result, with the mean of every figure over all of them."""
        if len(self.results) == 1:
            return self.results[0]
        means: dict[str, Any] = {}
        for field in fields(Figures):
            values = [getattr(result.figures, field.name) for result in self.results]
            means[field.name] = round(fmean(values)) if field.type is int else fmean(values)
        return replace(self.results[0], figures=Figures(**means))

    def spread(self, value: Callable[[Figures], float]) -> tuple[float, float]:
        """Returns the least and the greatest of a figure."""
        values = [value(result.figures) for result in self.results]
        return min(values), max(values)


def is_above(one: Repeats, other: Repeats, value: Callable[[Figures], float]) -> bool:
    """Returns whether a figure is higher in `one` with every seed. Results with the same seed have the same
    requests, so each is compared with its own counterpart."""
    pairs = zip(one.results, other.results, strict=True)
    return all(value(a.figures) > value(b.figures) for a, b in pairs)


def sweep(
    trace_name: str, configs: Sequence[SimulationConfig], num_seeds: int, progress: Progress
) -> list[Repeats]:
    """Runs each of `configs` with `num_seeds` seeds, from its own on. Returns the results of each of them.

    The rate of saturation, which no policy changes, is simulated once for each seed. Raises what `simulate`
    does.
    """
    groups = []
    saturations: dict[int, float] = {}
    for config in configs:
        results = []
        for seed in range(config.seed, config.seed + num_seeds):
            known = config.saturation or saturations.get(seed)
            result = simulate(trace_name, replace(config, seed=seed, saturation=known), progress)
            if result.figures.saturation_rate:
                saturations[seed] = result.figures.saturation_rate
            results.append(result)
        groups.append(Repeats(tuple(results)))
    return groups
