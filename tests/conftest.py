"""What every test shares: the interpreter on machines without a GPU, the `gpu` marker, a file's time budget."""

import os
import signal

import torch

# Read by Triton when a kernel is decorated, so it has to stand before any import of one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

# A shell's background job ignores Ctrl-C, and so would the programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

FILE_SECONDS = 120.0  # for a file's tests, `slow` and `gpu` aside, on a machine that is busy otherwise too
_spent = pytest.StashKey[dict[str, float]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_spent] = {}


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if not item.get_closest_marker("slow") and not item.get_closest_marker("gpu"):
        spent = item.config.stash[_spent]
        spent[item.path.name] = spent.get(item.path.name, 0.0) + call.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and _over_budget(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name, seconds in _over_budget(config).items():
        line = (
            f"{name} took {seconds:.0f} s of {FILE_SECONDS:.0f} s: make its tests smaller, or mark them slow"
        )
        terminalreporter.write_line(line, red=True)


def _over_budget(config: pytest.Config) -> dict[str, float]:
    return {name: seconds for name, seconds in config.stash[_spent].items() if seconds > FILE_SECONDS}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    """The device under test: the GPU where there is one, else the CPU (Triton's interpreter)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
