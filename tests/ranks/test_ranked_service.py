"""A service whose model runs on two ranks: a rank that is killed ends the streams, and a new group starts."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.served import COMPLETIONS, Served, save_tiny_model, wait_until


@pytest.mark.slow
@pytest.mark.parametrize("life", range(5))
def test_ranks_that_are_killed_under_streams_are_replaced(life: int, tmp_path: Path) -> None:
    """Each rank dies once in each of five services: three deaths within a minute would end a service."""
    model = save_tiny_model(tmp_path / "model")
    served = Served(model, tmp_path / "log", "--tensor-parallel", "2").wait_ready()
    try:
        text = served.complete()
        for rank in range(2):
            with served.stream(4000) as events:
                os.kill(served.all_processes()["worker"][rank], signal.SIGKILL)
                killed = time.monotonic()
                last = list(events)[-1]
            print(f"rank {rank}: the client was told after {time.monotonic() - killed:.3f} s")
            assert last["error"]["code"] == 503
            assert served.request(COMPLETIONS, {"prompt": "a"})[0] in (200, 503)
            wait_until(lambda: served.request("/health")[0] == 200, seconds=60)
            assert served.complete() == text
        assert served.at_rest()["num_worker_starts"] == 3
        assert len(served.all_processes()["worker"]) == 2
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
        assert not served.all_processes()
    finally:
        served.close()
