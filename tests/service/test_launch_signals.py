"""A signal to every process of the service, as service managers send it, ends the service in the same way as
a signal to the launcher alone."""

import signal
from pathlib import Path

import pytest

from tests.support.served import Start, wait_until


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_all_processes_end_the_service_like_one_to_the_launcher(
    start: Start, sockets: Path, number: signal.Signals
) -> None:
    served = start("--shutdown-timeout", "60").wait_ready()
    with served.stream(300) as events:
        assert set(served.processes()) == {"cli", "router_process", "api", "worker"}
        served.signal_each(number)
        wait_until(lambda: served.request("/ready")[0] == 503)
        received = list(events)
    assert received[-1] == "[DONE]"
    assert received[-2]["choices"][0]["finish_reason"] == "length"
    assert served.wait() == 0
    assert list(sockets.iterdir()) == []
    assert "Traceback" not in served.log.read_text()


@pytest.mark.parametrize(
    ("process", "number"),
    [("router_process", signal.SIGINT), pytest.param("worker", signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_signals_to_all_processes_while_the_service_starts(
    start: Start, sockets: Path, process: str, number: signal.Signals
) -> None:
    served = start()
    wait_until(lambda: process in served.processes())
    served.signal_each(number)
    assert served.wait() == 0, served.log.read_text()
    assert list(sockets.iterdir()) == []
    assert "Traceback" not in served.log.read_text()
