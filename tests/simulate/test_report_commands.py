"""`lightkv simulate --report` and `lightkv simulate-report`: the files that they write and refuse."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightkv.router.cli import simulate as simulate_cli
from lightkv.router.cli.app import app
from lightkv.router.simulate.report.page import render
from lightkv.router.simulate.result import SimulationResult
from tests.support.simulation_results import nothing


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*map(str, args)], prog_name="lightkv")
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


SHORT = ("simulate", "chat", "--requests", "6", "--rate", "5")


def test_a_simulation_writes_its_report_and_prints_what_it_did(tmp_path: Path) -> None:
    out, report, again = tmp_path / "out.json", tmp_path / "out.html", tmp_path / "again.html"
    empty = tmp_path / "empty.json"
    code, printed, _ = run(*SHORT, "--out", out, "--report", report)
    assert (code, printed) == (0, run(*SHORT)[1])
    assert run("simulate-report", out, "--report", again)[0] == 0
    assert again.read_text() == report.read_text() == render([SimulationResult.load(out)])
    empty.write_bytes(nothing().to_json())
    code, _, notes = run("simulate-report", empty, empty, "--report", again)
    assert (code, notes) == (0, f"2 results drawn in {again}".replace("\n", ""))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "again.html", "empty.json", "out.html", "out.json",
    ]  # fmt: skip


def test_the_example_of_the_docs_prints_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "using.md").read_text(encoding="utf-8")
    ((command, told),) = re.findall(r"^\$ lightkv (simulate .*)\n((?:(?!```).*\n)*)```$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)  # the report goes there
    code, printed, _ = run(*shlex.split(command))
    *lines, result = told.splitlines()
    *own, last = printed.splitlines()
    assert (code, lines) == (0, own)
    start, _, end = result.partition(" …")
    assert (end, last.startswith(start)) == ("}", True)


@pytest.mark.parametrize("option", ["--out", "--report"])
@pytest.mark.parametrize(
    ("place", "words"),
    [("none/x", "No such file"), ("", "Is a directory"), ("file/x", "Not a directory")],
    ids=["no-directory", "a-directory", "under-a-file"],
)
def test_an_unwritable_path_is_refused_before_the_simulation(
    tmp_path: Path, option: str, place: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate_cli, "_bar", None)  # the simulation's beginning
    (tmp_path / "file").touch()
    code, printed, notes = run(*SHORT, option, tmp_path / place)
    assert (code, printed) == (2, "")
    assert f"lightkv: {option} {tmp_path / place}: {words}" in notes
    assert "give a file in a directory that can be written" in notes
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_two_results_of_a_run_are_two_files(tmp_path: Path) -> None:
    code, _, notes = run(*SHORT, "--out", tmp_path / "x", "--report", tmp_path / "." / "x")
    assert code == 2
    assert "give two files" in notes
    result = tmp_path / "a.json"
    result.write_bytes(nothing().to_json())
    assert run("simulate-report", result, "--report", result)[0] == 2
    assert SimulationResult.load(result) == nothing()


BROKEN = {
    "empty": ("", "Input data was truncated"),
    "not-json": ("figures", "malformed"),
    "not-utf-8": (b'{"settings": {"trace": "\xff"}}', "give a file"),
    "another-object": ("{}", "settings"),
    "series-of-two-lengths": ('"used":[1.0],', "give all the same number"),
    "no-admission": ('"admissions"', "no admission"),
    "a-target-of-words": ('"ttft_target":"<b>"', "ttft_target is"),
    "no-width": ('"width":0.0', "> 0.0 - at `$.series.width`"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_result_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    changes = {
        "series-of-two-lengths": '"used":[],', "no-admission": '"admission"',
        "a-target-of-words": '"ttft_target":10.0', "no-width": '"width":1.0',
    }  # fmt: skip
    given, words = BROKEN[name]
    whole = nothing().to_json().decode()
    if name in changes:
        assert isinstance(given, str)
        assert changes[name] in whole
        given = whole.replace(changes[name], given)
    path, report = tmp_path / "x.json", tmp_path / "x.html"
    path.write_bytes(given if isinstance(given, bytes) else given.encode())
    code, printed, notes = run("simulate-report", path, "--report", report)
    assert (code, printed) == (2, "")
    assert f"{path}: " in notes
    assert words in notes
    assert "that lightkv simulate --out wrote" in notes
    assert not report.exists()


def test_a_report_needs_a_result_and_a_place(tmp_path: Path) -> None:
    assert run("simulate-report", "--report", tmp_path / "x.html")[0] == 2
    assert run("simulate-report", tmp_path / "x.json")[0] == 2
    code, _, notes = run("simulate-report", tmp_path / "x.json", "--report", tmp_path / "x.html")
    assert (code, notes) == (2, f"lightkv: {tmp_path / 'x.json'}: No such file or directory")


PROGRAM = """
import sys

sys.modules["matplotlib"] = None  # what Python takes for a module that is not there
from lightkv.router.cli.app import main

main()
"""


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--report", "x.html"], 1)])
def test_only_a_report_needs_the_plotting_library(options: list[str], code: int, tmp_path: Path) -> None:
    asked = ["chat", "--requests", "5", "--rate", "5", "--allocation", "token,paged:16", *options]
    command = [sys.executable, "-c", PROGRAM, "simulate", *asked]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("--report needs the package matplotlib" in " ".join(done.stderr.split())) == bool(code)
    assert not [*tmp_path.iterdir()]
