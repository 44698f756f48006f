"""A signal to every process of the service at once, as service managers stop what they started: it ends as by a
signal to the launcher alone."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from served import Served, save_tiny_model, wait_until

Start = Callable[..., Served]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("signals") / "tiny")


@pytest.fixture
def sockets(tmp_path: Path) -> Path:
    directory = tmp_path / "s"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def start(model: Path, tmp_path: Path, sockets: Path) -> Iterator[Start]:
    """Starts a service, whose sockets are in `sockets`."""
    started: list[Served] = []

    def begin(*args: str) -> Served:
        started.append(Served(model, tmp_path / "log", "--socket-dir", str(sockets), *args))
        return started[-1]

    yield begin
    for served in started:
        served.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_each_process_ends_it_as_one_to_the_launcher(
    start: Start, sockets: Path, number: signal.Signals
) -> None:
    served = start("--shutdown-timeout", "60").wait_ready()
    with served.stream(300) as events:
        processes = served.processes()
        assert set(processes) == {"cli", "router_process", "api", "worker"}
        for pid in processes.values():
            os.kill(pid, number)
        wait_until(lambda: served.request("/ready")[0] == 503)
        received = list(events)
    assert received[-1] == "[DONE]"
    assert received[-2]["choices"][0]["finish_reason"] == "length"
    assert served.wait() == 0
    assert list(sockets.iterdir()) == []
    assert "Traceback" not in served.log.read_text()


@pytest.mark.parametrize(
    ("process", "number"), [("router_process", signal.SIGINT), ("worker", signal.SIGTERM)]
)
def test_a_signal_to_each_process_while_it_starts(
    start: Start, sockets: Path, process: str, number: signal.Signals
) -> None:
    served = start()
    wait_until(lambda: process in served.processes())
    for pid in served.processes().values():
        os.kill(pid, number)
    assert served.wait() == 0, served.log.read_text()
    assert list(sockets.iterdir()) == []
    assert "Traceback" not in served.log.read_text()
