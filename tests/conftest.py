"""Settings of all tests: the interpreter on machines without a GPU, without work that it need not do, how many
processes run the tests and in which order, the `gpu` and `browser` markers, tests that are coroutines, a file's
time budget, and the K/V format of engines."""

import asyncio
import gc
import inspect
import os
import random
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import torch

# Read by Triton when a kernel is decorated, so it has to stand before any import of one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from lightkv.router.config import EngineConfig
from tests.support.headless_browser import NAMES, find_browser
from tests.support.interpreter import language_is_brought_back, quick_interpreter

__all__ = ["language_is_brought_back", "quick_interpreter"]

# A shell's background job ignores Ctrl-C, and so would the programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

CORES = len(os.sched_getaffinity(0))
MAX_PROCESSES = 4  # that run tests: one may come to hold 3 GB of models
FILE_SECONDS = 120.0  # for a file's tests, `slow` and `gpu` aside, on a machine that is busy otherwise too


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kv-dtype",
        default=EngineConfig.kv_dtype,
        help="the K/V format of every engine and service of a test that names none, such as int8",
    )
    parser.addoption(
        "--random-order",
        type=int,
        metavar="SEED",
        help="runs the files, and the tests of each, in an order that this number determines",
    )
    parser.addoption(
        "--ppl-pmx",
        help="a checkout of OpenPPL/ppl.pmx, whose own code OpenPPL's contract is then compared with, too",
    )
    parser.addoption(
        "--vllm-wheel",
        help="a wheel of vLLM (pip download --no-deps vllm), whose own structs then decode KV events, too",
    )


def set_kv_dtype(kv_dtype: str) -> None:
    """Makes `kv_dtype` the default of every EngineConfig of this process."""
    init = EngineConfig.__init__
    names = list(inspect.signature(init).parameters)
    num_required = len(names) - len(init.__defaults__ or ())
    defaults = list(init.__defaults__ or ())
    defaults[names.index("kv_dtype") - num_required] = kv_dtype
    init.__defaults__ = tuple(defaults)
    EngineConfig.kv_dtype = kv_dtype  # what `tests.support.served` gives to services


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("kv_dtype") != EngineConfig.kv_dtype:
        set_kv_dtype(config.getoption("kv_dtype"))
    config.pluginmanager.register(FileBudget())
    # Garbage is collected before a test captures a CUDA graph: to free an older graph while another is captured
    # breaks the capture. (The product's captures run without collections.)
    torch.compiler.config.force_cudagraph_gc = True
    if hasattr(config, "workerinput") and "OMP_NUM_THREADS" not in os.environ:
        # Processes that run tests beside one another share out the cores; what they start inherits it.
        num_threads = max(1, CORES // config.workerinput["workercount"])
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        torch.set_num_threads(num_threads)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` means. 0, which is this process alone, for a single file, whose tests stay together, and
    where there is a GPU, of which each process would take what is free for its own."""
    paths = {Path(arg.partition("::")[0]) for arg in config.args}
    if torch.cuda.is_available() or (len(paths) == 1 and paths.pop().is_file()):
        return 0
    return min(CORES, MAX_PROCESSES)


class FileBudget:
    """Fails a run in which a file's tests took too long. A test is marked where it runs, which may be another
    process, and counted where it is reported."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        report.is_budgeted = not (item.get_closest_marker("slow") or item.get_closest_marker("gpu"))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if getattr(report, "is_budgeted", False):  # not that of a process that has crashed
            name = report.location[0]
            self._spent[name] = self._spent.get(name, 0.0) + report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and self._over():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, seconds in self._over().items():
            line = f"{name} took {seconds:.0f} s of {FILE_SECONDS:.0f} s: "
            line += "make its tests smaller, or mark them slow"
            terminalreporter.write_line(line, red=True)

    def _over(self) -> dict[str, float]:
        return {name: seconds for name, seconds in self._spent.items() if seconds > FILE_SECONDS}


def in_random_order(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Returns the tests with the files in random order, and the tests of each file, too."""
    rng = random.Random(seed)
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    shuffled = list(files.values())
    rng.shuffle(shuffled)
    for tests in shuffled:
        rng.shuffle(tests)
    return [item for tests in shuffled for item in tests]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("random_order")) is not None:
        items[:] = in_random_order(items, seed)
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = pytest.mark.skip(reason="needs a CUDA device")
    if find_browser() is None:
        missing["browser"] = pytest.mark.skip(reason=f"needs one of {', '.join(NAMES)} on the PATH")
    for item in items:
        for marker, skip in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects no garbage while modules and thousands of tests are made, nor among them later: all of them stay
    until the end."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine: in the event loop of its fixture `runner`, or in one of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    names = inspect.signature(pyfuncitem.function).parameters
    test = pyfuncitem.function(**{name: pyfuncitem.funcargs[name] for name in names})
    asyncio.run(test) if "runner" not in pyfuncitem.funcargs else pyfuncitem.funcargs["runner"].run(test)
    return True


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Runs on one thread: for tiny models, several threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def device() -> torch.device:
    """The device under test: the GPU where there is one, else the CPU (Triton's interpreter)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
