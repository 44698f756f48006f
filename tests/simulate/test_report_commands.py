"""`lightkv simulate --report`: the files that it writes and refuses."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from lightkv.router.cli import simulate as simulate_cli
from lightkv.router.cli.app import app
from lightkv.router.simulate.report.page import render
from lightkv.router.simulate.result import SimulationResult
from lightkv.router.simulate.sweep import Repeats


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*map(str, args)], prog_name="lightkv")
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


SHORT = ("simulate", "chat", "--requests", "20", "--rate", "5")


def test_a_simulation_writes_its_report_and_prints_what_it_did(tmp_path: Path) -> None:
    out, report = tmp_path / "out.json", tmp_path / "out.html"
    code, printed, _ = run(*SHORT, "--out", out, "--report", report)
    assert (code, printed) == (0, run(*SHORT)[1])
    result = msgspec.json.decode(out.read_bytes(), type=SimulationResult)
    assert report.read_text() == render([Repeats((result,))])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "out.json"]


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
    assert f"lightkv: {tmp_path / place}: {words}" in notes
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_earlier_result_stays_where_the_simulation_fails(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("earlier")
    for wrong in (("simulate", "chat", "--requests", "none"), ("simulate", tmp_path / "none.csv")):
        code, _, _ = run(*wrong, "--out", out)
        assert (code, out.read_text()) == (2, "earlier")


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
    assert not list(tmp_path.iterdir())
