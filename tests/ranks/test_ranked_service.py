"""A service whose model runs on two ranks: a rank that is killed ends the streams, and a new group starts."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.served import COMPLETIONS, Served, own_text, save_tiny_model, wait_until


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "life"), [("", 0), ("", 1), ("", 2), ("", 3), ("", 4), ("gemma3", 0), ("gpt-oss", 0)]
)
def test_ranks_that_are_killed_under_streams_are_replaced(family: str, life: int, tmp_path: Path) -> None:
    """Each rank dies once in each of these services: three deaths within a minute would end a service. Two have
    a model of which most layers have windows."""
    model = save_tiny_model(tmp_path / "model", family=family)
    served = Served(model, tmp_path / "log", "--tensor-parallel", "2").wait_ready()
    try:
        text = own_text(model, "Once", 4)
        assert served.complete() == text
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
