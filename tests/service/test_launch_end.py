"""How the service ends: signals, time limits, lost processes, and a model that cannot be loaded. SIGTERM
while a request runs ends the service of `test_launch.py`, SIGKILL of the launcher that of
`test_operators_service.py`, and SIGKILL of the router that of `test_openai_client.py`."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.served import Start, starting, wait_until


@pytest.mark.slow
def test_a_second_ctrl_c_aborts_at_once(start: Start, sockets: Path) -> None:
    served = start("--shutdown-timeout", "600").wait_ready()
    with served.stream(7000) as events:
        served.signal(signal.SIGINT)
        wait_until(lambda: served.request("/ready")[0] == 503)
        assert "choices" in next(events)  # the request still runs
        served.signal(signal.SIGINT)
        assert "shutting down" in list(events)[-1]["error"]["message"]
    assert served.wait() == 0
    assert list(sockets.iterdir()) == []


@pytest.mark.slow
def test_requests_that_do_not_finish_in_time_are_aborted(start: Start) -> None:
    served = start("--shutdown-timeout", "0.3").wait_ready()
    with served.stream(7000) as events:
        served.process.terminate()
        assert "shutting down" in list(events)[-1]["error"]["message"]
    assert served.wait() == 0


def test_sigterm_does_not_wait_for_the_weights(start: Start, sockets: Path) -> None:
    served = start()
    wait_until(lambda: "worker" in served.processes())
    served.process.terminate()
    assert served.wait() == 0
    assert "K/V pool" not in served.log.read_text()
    assert list(sockets.iterdir()) == []


@pytest.mark.slow
def test_the_service_ends_when_its_api_process_is_killed(start: Start, sockets: Path) -> None:
    served = start().wait_ready()
    with served.stream(7000) as events:
        os.kill(served.processes()["api"], signal.SIGKILL)
        list(events)
    assert served.wait() == 1
    assert "was ended by SIGKILL" in served.log.read_text().splitlines()[-1]
    assert list(sockets.iterdir()) == []


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_service_with_the_reason(start: Start, sockets: Path) -> None:
    served = start("--max-total-tokens", "100000000000000")
    assert served.wait() == 1
    log = served.log.read_text()
    assert "a K/V pool of 100000000000000 tokens takes" in log
    assert "Traceback" not in log
    assert list(sockets.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba", "some of its layers keep a state that is not computed here: Mamba-1"),
        pytest.param(None, "lacks tokenizer.json", marks=pytest.mark.slow),
    ],
    ids=["architecture", "files"],
)
def test_the_architecture_is_refused_before_the_files(
    model: Path, tmp_path: Path, sockets: Path, model_type: str | None, reason: str
) -> None:
    directory = tmp_path / "incomplete"
    directory.mkdir()
    config = (model / "config.json").read_text() if model_type is None else '{"model_type": "mamba"}'
    (directory / "config.json").write_text(config)
    with starting(directory, tmp_path / "log", sockets) as begin:
        served = begin()
        assert served.wait() == 1
        log = served.log.read_text()
    assert reason in " ".join(log.split())
    assert "Traceback" not in log
    assert ("lacks" in log) == (model_type is None)
    assert "is not a tokenizer" not in log
