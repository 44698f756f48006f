"""The step-time model: its arithmetic, its fit, and its files."""

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from lightkv.router.engine.step_time import DEFAULT_FILE, PARAMETERS, InvalidStepTime, StepTime, Work, fit

MODEL = StepTime(7e-3, 2e-5, 4e-8, 3e-2, 2.4e-5, 1.3e-9)


def random_work(rng: random.Random) -> Work:
    decodes = rng.choice((0, 1, 8, 64, 256))
    prompt = rng.choice((0, 0, 16, 512, 2048)) if decodes else 1024
    return Work(decodes, decodes * rng.randint(10, 8000), prompt, prompt * rng.randint(10, 8000))


def test_a_step_is_the_sum_of_its_parts() -> None:
    assert MODEL.seconds(Work(2, 300, 0, 0)) == pytest.approx(7e-3 + 2 * 2e-5 + 300 * 4e-8)
    mixed = 7e-3 + 4e-6 + 2001 * 2.4e-5 + 600 * 1.3e-9
    assert MODEL.seconds(Work(1, 100, 2000, 600)) == pytest.approx(mixed)
    assert MODEL.seconds(Work(1, 100, 50, 600)) == 3e-2  # the host's part
    alone = StepTime.parse("base=0.007,per_decode=1e-4")
    assert alone.seconds(Work(256, 0, 1, 1)) == alone.seconds(Work(256, 0, 0, 0))


def test_a_fit_finds_the_parameters_of_its_data() -> None:
    rng = random.Random(0)
    work = [random_work(rng) for _ in range(60)]
    found = fit(work, [MODEL.seconds(w) for w in work])
    for name in PARAMETERS:
        assert getattr(found, name) == pytest.approx(getattr(MODEL, name), rel=1e-6)
    assert found.source["max_relative_error"] < 1e-9
    noisy = fit(work, [MODEL.seconds(w) * rng.uniform(0.98, 1.02) for w in work])
    assert 0.001 < noisy.source["median_relative_error"] < 0.02
    assert found.prompt_base == pytest.approx(MODEL.base, rel=1e-6)
    overlapped = replace(
        MODEL, prompt_base=2e-3
    )  # in steps with prompts, products hide the reading of weights
    mixed = 2e-3 + 4e-6 + 2001 * 2.4e-5 + 600 * 1.3e-9
    assert overlapped.seconds(Work(1, 100, 2000, 600)) == pytest.approx(mixed)
    found = fit(work, [overlapped.seconds(w) for w in work])
    assert found.prompt_base == pytest.approx(2e-3, abs=1e-3)
    assert found.source["median_relative_error"] < 0.01
    unbound = replace(MODEL, prefill=0.0)  # a device on which no step waits for the host
    found = fit(work, [unbound.seconds(w) for w in work])
    assert found.prefill == 0.0
    assert found.source["max_relative_error"] < 1e-9
    decodes = [Work(count, 100 * count * count, 0, 0) for count in range(1, 9)]
    assert fit(decodes, [MODEL.seconds(w) for w in decodes]).prefill == 0.0


def test_no_parameter_of_a_fit_is_negative() -> None:
    rng = random.Random(1)
    work = [random_work(rng) for _ in range(60)]
    seconds = [max(MODEL.seconds(w) - 3e-8 * w.kv, 5e-3) for w in work]
    found = fit(work, seconds)
    assert all(getattr(found, name) >= 0 for name in PARAMETERS)
    with pytest.raises(ValueError, match="at least 7"):
        fit(work[:3], seconds[:3])


def test_a_fit_always_has_a_base() -> None:
    work = [Work(0, 0, prompt, 0) for prompt in range(600, 2000, 100)]
    found = fit(work, [(w.prompt - 500) * 1e-4 for w in work])  # a line that begins below nothing
    assert 0 < found.base <= 1e-3


def test_the_file_that_comes_with_lightkv_is_read() -> None:
    model = StepTime.parse("")
    assert model == StepTime.read(DEFAULT_FILE)
    assert 0 < model.source["median_relative_error"] <= model.source["max_relative_error"]
    assert 1e-3 < model.seconds(Work(1, 500, 0, 0)) < model.seconds(Work(1, 500, 2048, 2048 * 1024)) < 1


def test_parameters_from_a_file_and_from_the_line(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(msgspec.json.encode(MODEL.as_dict()))
    assert StepTime.parse(str(path)) == MODEL
    given = StepTime.parse("base=0.005,per_kv=1e-8")
    assert (given.base, given.per_kv, given.per_prompt) == (0.005, 1e-8, 0.0)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("base=1,what=2", "names being base, per_decode"),
        ("base=1,per_kv=-1", "per_kv is -1.0"),
        ("base=nan", "base is nan"),
        ("base=1,prompt_base=-1", "prompt_base is -1.0"),
    ],
)
def test_wrong_parameters_are_refused(text: str, match: str) -> None:
    with pytest.raises(InvalidStepTime, match=match):
        StepTime.parse(text)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('{"base": 1}')
    with pytest.raises(InvalidStepTime, match="give a JSON object with base, per_decode"):
        StepTime.read(path)
