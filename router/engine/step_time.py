"""A model of how long a step takes, and its fit to measured steps.

A step reads all weights once, and the K/V of every request that decodes. In a step of decodes alone, the matrix
products wait for the weights, and a token adds little to them:

    seconds = base + per_decode · decodes + per_kv · tokens that the decodes attend

In a step with prompt tokens every token, a decode's too, adds its share of the products, during which the
weights are read. A step of few tokens still waits for the weights, and one outside CUDA graphs for the host:

    seconds = prompt_base + per_prompt · (prompt tokens + decodes) + per_kv · tokens that the decodes attend
              + per_pair · (prompt tokens × tokens each attends), and not less than `prefill`, nor than the
              same step without its prompt tokens

The scheduler chooses by it how many prompt tokens a step may compute (`prefill_budget.py`), and the simulator
passes the time of a step. `step_time.json`, beside this file, has the parameters measured on one device; a
runner on a GPU is measured when it starts (`lightkv/router/model/step_timing.py`), or has what an earlier start
of the same model measured there.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lightkv.errors import LightKVError

DEFAULT_FILE = Path(__file__).with_name("step_time.json")
MAX_ITERATIONS = 20  # of a fit


class InvalidStepTime(LightKVError, ValueError):
    """The parameters are not those of a step-time model."""


class Work(NamedTuple):
    """What a step computes. `kv`: the tokens that its decodes attend, summed. `pairs`: the tokens that each
    of its prompt tokens attends, summed."""

    decodes: int
    kv: int
    prompt: int
    pairs: int


@dataclass(frozen=True)
class StepTime:
    """Parameters in seconds. `source`: what they were measured on, and how well they fit. `prompt_base` is
    `base` if it is None."""

    base: float
    per_decode: float
    per_kv: float
    prefill: float
    per_prompt: float
    per_pair: float
    source: dict[str, Any] = field(default_factory=dict)
    prompt_base: float | None = None

    def __post_init__(self) -> None:
        """Raises InvalidStepTime for a parameter that is negative or no number, or a base of 0."""
        for name in PARAMETERS:
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise InvalidStepTime(f"{name} is {value!r}; give seconds, 0 or more")
        if self.prompt_base is not None and not 0 <= self.prompt_base < float("inf"):
            raise InvalidStepTime(
                f"prompt_base is {self.prompt_base!r}; give seconds, 0 or more, or leave it out"
            )
        if not self.base:
            raise InvalidStepTime("base is 0 seconds; give the time of a step that computes hardly anything")

    def seconds(self, work: Work) -> float:
        """Returns the seconds that a step takes."""
        decodes, kv, prompt, pairs = work
        attention = self.per_kv * kv
        alone = self.base + attention + self.per_decode * decodes
        if not prompt:
            return alone
        products = self.per_prompt * (prompt + decodes) + self.per_pair * pairs
        return max(self._of_prompts + attention + products, self.prefill, alone)

    def most_prompt_tokens(self, seconds: float, work: Work, start: int) -> int | None:
        """Returns the most tokens of a prompt, from position `start` on, that a step can compute beside `work`
        within `seconds`; None where any number of them fits. It counts neither `prefill` nor what `work` takes
        without prompt tokens: a step with any prompt token takes at least these.

        The n tokens attend start + 1, …, start + n tokens, so that they take
        per_prompt · n + per_pair · (start · n + n · (n + 1) / 2) seconds.
        """
        left = seconds - self._of_prompts - self.per_kv * work.kv
        left -= self.per_prompt * (work.prompt + work.decodes) + self.per_pair * work.pairs
        if left <= 0:
            return 0
        linear = self.per_prompt + self.per_pair * (start + 0.5)
        if not linear:
            return None
        return int(2 * left / (linear + math.sqrt(linear * linear + 2 * self.per_pair * left)))

    @property
    def _of_prompts(self) -> float:
        return self.base if self.prompt_base is None else self.prompt_base

    def as_dict(self) -> dict[str, Any]:
        """Returns what `read` takes from a file."""
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> "StepTime":
        """Reads parameters from a JSON file. Raises InvalidStepTime, OSError."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls, strict=True)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            names = ", ".join(PARAMETERS)
            raise InvalidStepTime(f"{path}: {error}; give a JSON object with {names}") from error

    @classmethod
    def parse(cls, text: str) -> "StepTime":
        """Reads parameters from `name=seconds,…` (others are 0), from the file of that path, or, if `text` is
        empty, from lightkv's own file. Raises InvalidStepTime, OSError."""
        if not text:
            return cls.read(DEFAULT_FILE)
        if "=" not in text:
            return cls.read(Path(text))
        values: dict[str, float | None] = {**dict.fromkeys(PARAMETERS, 0.0), "prompt_base": None}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                values[name] = float(value) if name in values else values[name]
            except (KeyError, ValueError):
                known = ", ".join(values)
                raise InvalidStepTime(
                    f"--step-time has {part!r}; give name=seconds, the names being {known}"
                ) from None
        return cls(**values, source={"given": text})  # type: ignore[arg-type]


PARAMETERS = tuple(f.name for f in fields(StepTime) if f.type is float or f.type == "float")
LEAST_STEPS = len(PARAMETERS) + 1  # of a fit, which finds `prompt_base`, too


def fit(work: Sequence[Work], seconds: Sequence[float]) -> StepTime:
    """Fits the parameters by least squares of the relative errors; none is negative. `source` gets the errors.

    `prefill` is the median of the steps that wait, for weights or the host, or 0 where that fits as well. Which
    steps wait depends on the parameters, and these are fitted to the other steps: the two are found in turns,
    beginning with the half of the steps that have the most prompt tokens. Raises ValueError for fewer than
    LEAST_STEPS steps.
    """
    if len(work) < LEAST_STEPS or len(work) != len(seconds):
        raise ValueError(f"{len(seconds)} times of {len(work)} steps; give at least {LEAST_STEPS}")
    measured = np.array(seconds)
    rows = np.array(
        [
            [0, 0, w.kv, w.prompt + w.decodes, w.pairs, 1] if w.prompt else [1, w.decodes, w.kv, 0, 0, 0]
            for w in work
        ],
        float,
    )
    has_prompt = rows[:, 3] > 0
    models = [_fit(rows, measured, np.ones_like(has_prompt))]
    if has_prompt.any():
        models.append(_fit(rows, measured, ~has_prompt | (rows[:, 3] >= np.median(rows[has_prompt, 3]))))
    found = []
    for model in models:
        errors = np.abs(np.array([model.seconds(w) for w in work]) / measured - 1)
        source = {
            "steps": len(measured),
            "median_relative_error": float(np.median(errors)),
            "max_relative_error": float(errors.max()),
        }
        found.append((float(np.square(errors).sum()), replace(model, source=source)))
    # If both fit equally but for the last digits, the model in which no step waits is used.
    return min(found, key=lambda one: (round(one[0], 12), one[1].prefill))[1]


def _fit(rows: np.ndarray, measured: np.ndarray, on_device: np.ndarray) -> StepTime:
    """Fits the parameters. `on_device`: a first guess of the steps that do not wait, as `prefill` does."""
    has_prompt = rows[:, 3] > 0
    least = float(measured.min()) / 100  # a step takes some time, even if a fit to few steps says otherwise
    for _ in range(MAX_ITERATIONS):
        values = _least_squares(rows[on_device] / measured[on_device, None], least)
        waits = has_prompt & ~on_device
        prefill = float(np.median(measured[waits])) if waits.any() else 0.0
        before, on_device = on_device, ~has_prompt | (rows @ values >= prefill)
        if np.array_equal(before, on_device):
            break
    base, per_decode, per_kv, per_prompt, per_pair, prompt_base = values.tolist()
    return StepTime(base, per_decode, per_kv, prefill, per_prompt, per_pair, prompt_base=prompt_base)


def _least_squares(rows: np.ndarray, least: float) -> np.ndarray:
    """Returns values, none negative and the first at least `least`, for which `rows` times them is nearest to
    1."""
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    rest = 1.0 - least * rows[:, 0]
    chosen = list(range(rows.shape[1]))
    while True:  # leaves out the most negative value until none is negative
        values = np.zeros(rows.shape[1])
        values[chosen] = np.linalg.lstsq((rows / scale)[:, chosen], rest, rcond=None)[0]
        if values.min() >= 0:
            values /= scale
            values[0] += least
            return values
        chosen.remove(int(values.argmin()))
