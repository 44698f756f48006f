"""A service whose model runs on two ranks: a rank that is killed ends the streams, and a new group starts."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.served import COMPLETIONS, Served, save_tiny_model, wait_until


@pytest.mark.slow
def test_a_rank_that_is_killed_under_streams_ten_times(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    served = Served(model, tmp_path / "log", "--tensor-parallel", "2").wait_ready()
    try:
        text = served.complete()
        kills: list[float] = []
        for turn in range(10):
            if len(kills) > 1:  # three in a minute end the service; a death is noticed late here
                wait_until(lambda: time.monotonic() - kills[-2] > 75, seconds=90)
            wait_until(lambda: served.request("/health")[0] == 200, seconds=60)
            with served.stream(4000) as events:
                os.kill(served.all_processes()["worker"][turn % 2], signal.SIGKILL)
                kills.append(time.monotonic())
                last = list(events)[-1]
                waited = time.monotonic() - kills[-1]
            print(f"kill {turn}: the client was told after {waited:.3f} s")
            assert last["error"]["code"] == 503
            assert waited < 30, "the client is told at once; this bound is for a machine that is busy"
            assert served.request(COMPLETIONS, {"prompt": "a"})[0] in (200, 503)
        wait_until(lambda: served.request("/health")[0] == 200, seconds=60)
        assert served.complete() == text
        assert served.at_rest()["num_worker_starts"] == 11
        assert len(served.all_processes()["worker"]) == 2
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
        assert not served.all_processes()
    finally:
        served.close()
