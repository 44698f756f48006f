"""The loss of a worker, measured: on a small service, and what is no figure."""

import argparse
import json
import signal
from pathlib import Path

import pytest

from bench.serving import worker_loss
from bench.serving.load_client import Reply
from bench.serving.served import Server
from bench.serving.worker_loss import Losses, arguments
from tests.support.served import save_tiny_model

LOAD = {"capacity": 100, "free": 40, "cached": 60, "held": 0, "num_running": 0, "num_waiting": 0}


def losses() -> Losses:
    server = Server([])
    server.url = "http://127.0.0.1:1"
    return Losses(server, argparse.Namespace(device="cpu"))


@pytest.mark.parametrize(
    ("changed", "last", "complaint"),
    [
        ({}, b"[DONE]", "1 of 1 streams ended without an error"),
        ({"capacity": 90, "free": 30}, b'{"error": {}}', "a pool of 90, not 100 tokens"),
        ({"num_worker_starts": 3}, b'{"error": {}}', "started 3 times"),
        ({"held": 5}, b'{"error": {}}', "5 tokens are held"),
        ({"free": 41}, b'{"error": {}}', "do not add up to"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, int], last: bytes, complaint: str) -> None:
    before = LOAD | {"num_worker_starts": 1, "num_ledger_checks": 5}
    after = LOAD | {"num_worker_starts": 2, "num_ledger_checks": 9} | changed
    found = losses()
    found.compare(signal.SIGKILL, before, after, [Reply(200, b"", [last])])
    assert complaint in "\n".join(found.failures)
    assert all(failure.startswith("SIGKILL: ") for failure in found.failures)


def test_a_service_that_comes_back_whole_is_not_complained_of() -> None:
    before = LOAD | {"num_worker_starts": 1, "num_ledger_checks": 5}
    after = LOAD | {"num_worker_starts": 2, "num_ledger_checks": 9}
    found = losses()
    found.compare(signal.SIGKILL, before, after, [Reply(200, b"", [b"{}", b'{"error": {"code": 503}}'])])
    assert not found.failures


@pytest.mark.slow
def test_a_small_service_loses_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    given = ["--model", str(save_tiny_model(tmp_path / "model")), "--streams", "4", "--rounds", "1"]
    given += ["--step-timeout", "3", "--max-total-tokens", "40000", "--out", str(out)]
    monkeypatch.setattr(worker_loss, "arguments", lambda: arguments(given))
    worker_loss.main()
    assert "ready again" in capsys.readouterr().out
    found = json.loads(out.read_text())["results"]["losses"]
    assert found["SIGSTOP"][0]["noticed"] > 3 > found["SIGKILL"][0]["noticed"]
