"""The comparison of two trees: which rows are slower, what is marked, and how a worker answers."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.kernels import alternate
from bench.kernels.alternate import Failed, Trees, differs, is_slower, measure_row

ROOT = Path(__file__).parents[2]


class FakeTree:
    """Answers as a worker does, with given times."""

    def __init__(self, sides: Any, times: list[float]) -> None:
        self.folder = ROOT
        self._sides, self._times, self._answers = sides, iter(times), []

    def send(self, verb: str, *arguments: Any) -> None:
        self._answers.append(self._sides if verb == "open" else None)

    def receive(self) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, Failed):
            raise answer
        return answer

    def ask(self, verb: str, *arguments: Any) -> Any:
        return [next(self._times)] if verb == "time" else None


def measure(old: FakeTree, new: FakeTree) -> dict[str, Any]:
    options = argparse.Namespace(times=3, device="cuda")
    return measure_row(Trees(old, new), "row", options, 1.01)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratios", "slower"),
    [
        ([1.02, 1.03, 1.02, 1.02, 1.02], True),
        ([1.02, 1.03, 1.00, 1.02, 1.02], True),
        ([1.02, 1.03, 1.00, 1.01, 1.02], False),  # its turns do not agree
        ([1.01, 1.01, 1.01, 1.01, 1.01], False),
        ([1.02], True),
        ([0.9, 0.9, 0.9], False),
    ],
)
def test_a_row_is_slower_if_its_turns_agree(ratios: list[float], slower: bool) -> None:
    assert is_slower(ratios, 1.01) == slower


def test_outputs_that_differ() -> None:
    assert not differs((None, None))
    assert not differs((1.0, 1.0005))
    assert differs((1.0, 1.01))
    assert differs((1.0, None))
    assert differs((1.0, float("nan")))


def test_a_row_is_measured_in_turns() -> None:
    found = measure(FakeTree({"": 1.0, "b": 2.0}, [10, 20, 10] * 2), FakeTree({"": 1.0, "b": 3.0}, [11] * 6))
    assert list(found) == ["row", "row, b"]
    assert found["row"]["ratios"] == [1.1, 0.55, 1.1]
    assert not found["row"]["differs"]
    assert found["row, b"]["differs"]
    failed = measure(FakeTree(Failed("no memory"), []), FakeTree({"": None}, []))
    assert failed == {"row": {"failed": "old: no memory"}}
    assert "sides" in measure(FakeTree({"a": None}, []), FakeTree({"b": None}, []))["row"]["failed"]


@pytest.mark.slow
def test_a_worker_makes_rows_of_its_tree(tmp_path: Path) -> None:
    worker = str(Path(alternate.__file__).with_name("alternate_worker.py"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    requests = [
        ["names"],
        ["open", "write: int8"],
        ["open", "no row"],
        ["open", "decode: B1 × 1k"],
        ["close"],
    ]
    done = subprocess.run(
        [sys.executable, "-P", worker, "cpu"],
        input="".join(json.dumps(one) + "\n" for one in requests),
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    names, write, missing, decode, closed = map(json.loads, done.stdout.splitlines())
    assert {"write: int8", "models: generate"} <= set(names["answer"])
    assert len(write["answer"]) == 6
    assert "no row" in missing["error"]
    assert decode["answer"] == {"": None}
    assert closed["answer"] is None
