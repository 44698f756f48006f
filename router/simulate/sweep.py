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
    def seeds(self) -> list[int]:
        """The seeds, in the order of the results."""
        return [result.settings.get("seed", 0) for result in self.results]

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
    """Returns whether a figure is higher in `one` whatever the seed.

    Results with the same seed have the same requests, so each is compared with its own counterpart. Where the
    seeds differ, all of `one` have to be above all of `other`.
    """
    if one.seeds != other.seeds:
        return one.spread(value)[0] > other.spread(value)[1]
    pairs = zip(one.results, other.results, strict=True)
    return all(value(a.figures) > value(b.figures) for a, b in pairs)


def sweep(
    trace_name: str, configs: Sequence[SimulationConfig], num_seeds: int, progress: Progress
) -> list[SimulationResult]:
    """Runs each of `configs` with `num_seeds` seeds, from its own on. Returns the results by config, then seed.

    The rate of saturation, which no allocation changes, is simulated once for each seed. Raises what `simulate`
    does.
    """
    results = []
    saturations: dict[int, float] = {}
    for config in configs:
        for seed in range(config.seed, config.seed + num_seeds):
            known = config.saturation or saturations.get(seed)
            result = simulate(trace_name, replace(config, seed=seed, saturation=known), progress)
            if result.figures.saturation_rate:
                saturations[seed] = result.figures.saturation_rate
            results.append(result)
    return results


def repeats_of(results: Sequence[SimulationResult]) -> list[Repeats]:
    """Puts results together that differ in their seed alone, in the order of the first of each."""
    found: list[list[SimulationResult]] = []
    for result in results:
        for group in found:
            seeds = [other.settings.get("seed") for other in group]
            if (
                _but_for_the_seed(group[0]) == _but_for_the_seed(result)
                and result.settings.get("seed") not in seeds
            ):
                group.append(result)
                break
        else:
            found.append([result])
    return [Repeats(tuple(group)) for group in found]


def _but_for_the_seed(result: SimulationResult) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what the results of one policy have in common. Saturation is measured for each seed."""
    left_out = {"seed"} if result.settings.get("load") is None else {"seed", "saturation"}
    settings = {name: value for name, value in result.settings.items() if name not in left_out}
    return settings, result.step_time
