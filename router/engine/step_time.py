"""How long a step takes: a model of it with a few parameters, and their fit to measured steps.

A step reads all weights once, and the K/V of every request that decodes. Where only decodes are in it, the
products wait for the weights, and what a request adds is less than its token costs elsewhere:

    seconds = base + per_decode · requests that decode + per_kv · tokens that these attend

With prompt tokens in it, every token costs its share of the products, a request's newest as much as a prompt's;
and the step runs outside CUDA graphs, so it takes at least as long as the host needs to launch it:

    seconds = base + per_prompt · (prompt tokens + requests that decode) + per_kv · tokens that these attend
              + per_pair · (prompt tokens × tokens each attends), and not less than `prefill`, nor than the
              same step without its prompt tokens

Knows no device and no model: `step_time.json`, beside this file, has what was measured of one.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lightkv.errors import LightKVError

DEFAULT_FILE = Path(__file__).with_name("step_time.json")
MAX_TURNS = 20  # of a fit


class InvalidStepTime(LightKVError, ValueError):
    """Parameters that are no step-time model's."""


class Work(NamedTuple):
    """What a step computes. `kv`: tokens that its decodes attend, all together. `pairs`: over its prompt
    tokens, the tokens that each attends."""

    decodes: int
    kv: int
    prompt: int
    pairs: int


@dataclass(frozen=True)
class StepTime:
    """Parameters in seconds. `source`: what they were measured on, and how well they fit."""

    base: float
    per_decode: float
    per_kv: float
    prefill: float
    per_prompt: float
    per_pair: float
    source: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InvalidStepTime for a parameter that is negative or no number, or a base of 0."""
        for name in PARAMETERS:
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise InvalidStepTime(f"{name} is {value!r}; give seconds, 0 or more")
        if not self.base:
            raise InvalidStepTime("a base of 0 seconds; give what a step takes that computes hardly anything")

    def seconds(self, work: Work) -> float:
        """What a step takes."""
        decodes, kv, prompt, pairs = work
        seconds = self.base + self.per_kv * kv
        alone = seconds + self.per_decode * decodes
        if not prompt:
            return alone
        products = self.per_prompt * (prompt + decodes) + self.per_pair * pairs
        return max(seconds + products, self.prefill, alone)

    def as_dict(self) -> dict[str, Any]:
        """To write to a file, from which `read` has it again."""
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> "StepTime":
        """From a JSON file. Raises InvalidStepTime, OSError."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls, strict=True)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            names = ", ".join(PARAMETERS)
            raise InvalidStepTime(f"{path}: {error}; give a JSON object with {names}") from error

    @classmethod
    def parse(cls, text: str) -> "StepTime":
        """`name=seconds` with commas between, what is left out being 0; or a file's path; empty: the one that
        comes with lightkv. Raises InvalidStepTime, OSError."""
        if not text:
            return cls.read(DEFAULT_FILE)
        if "=" not in text:
            return cls.read(Path(text))
        values = dict.fromkeys(PARAMETERS, 0.0)
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                values[name] = float(value) if name in values else values[name]
            except (KeyError, ValueError):
                known = ", ".join(PARAMETERS)
                raise InvalidStepTime(
                    f"--step-time has {part!r}; give name=seconds, the names being {known}"
                ) from None
        return cls(**values, source={"given": text})


PARAMETERS = tuple(f.name for f in fields(StepTime) if f.name != "source")


def fit(work: Sequence[Work], seconds: Sequence[float]) -> StepTime:
    """The parameters that have the least squares of relative errors, none negative; `prefill` is the median of
    the steps that are taken to wait for the host, or 0 where that fits as well. `source` has the errors.

    Which steps those are follows from the parameters, and these from the other steps: found in turns, from the
    half of the steps with prompt tokens that have the most on. Raises ValueError for fewer steps than there are
    parameters.
    """
    if len(work) < len(PARAMETERS) or len(work) != len(seconds):
        raise ValueError(f"{len(seconds)} times of {len(work)} steps; give at least {len(PARAMETERS)}")
    measured = np.array(seconds)
    rows = np.array(
        [
            [1, 0, w.kv, w.prompt + w.decodes, w.pairs] if w.prompt else [1, w.decodes, w.kv, 0, 0]
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
    # Where both fit alike but for the last digits, no step need be taken to wait.
    return min(found, key=lambda one: (round(one[0], 12), one[1].prefill))[1]


def _fit(rows: np.ndarray, measured: np.ndarray, on_device: np.ndarray) -> StepTime:
    """From a first guess of the steps that do not wait for the host."""
    has_prompt = rows[:, 3] > 0
    least = float(measured.min()) / 100  # a step takes time, whatever a fit to few says
    for _ in range(MAX_TURNS):
        values = _least_squares(rows[on_device] / measured[on_device, None], least)
        waits = has_prompt & ~on_device
        prefill = float(np.median(measured[waits])) if waits.any() else 0.0
        before, on_device = on_device, ~has_prompt | (rows @ values >= prefill)
        if np.array_equal(before, on_device):
            break
    base, per_decode, per_kv, per_prompt, per_pair = values.tolist()
    return StepTime(base, per_decode, per_kv, prefill, per_prompt, per_pair)


def _least_squares(rows: np.ndarray, least: float) -> np.ndarray:
    """Of `rows` times what is returned to 1, none being negative, and the first not less than `least`."""
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    rest = 1.0 - least * rows[:, 0]
    chosen = list(range(rows.shape[1]))
    while True:  # without the one that would be the most negative, until none is
        values = np.zeros(rows.shape[1])
        values[chosen] = np.linalg.lstsq((rows / scale)[:, chosen], rest, rcond=None)[0]
        if values.min() >= 0:
            values /= scale
            values[0] += least
            return values
        chosen.remove(int(values.argmin()))
