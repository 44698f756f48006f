"""On a GPU, a worker with CUDA graphs that dies under 64 streams is replaced in the same memory."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.served import COMPLETIONS, Served, save_tiny_model, starting, wait_until

pytestmark = pytest.mark.gpu

NUM_STREAMS = 64
STEP_TIMEOUT = 5


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("service")
    model = save_tiny_model(directory / "model")
    with starting(model, directory / "log", directory) as begin:
        sizes = ("--max-num-seqs", str(NUM_STREAMS), "--max-total-tokens", "600000")
        served = begin("--device", "cuda", *sizes, "--step-timeout", str(STEP_TIMEOUT))
        yield served.wait_ready()


def used_bytes() -> int:
    """Returns the memory of the device that all processes use."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def info(service: Served) -> dict[str, Any]:
    load = service.request("/load")[1]
    return {"capacity": load["capacity"], "starts": load["num_worker_starts"]}


class Stream(threading.Thread):
    """A client that reads its stream to the end. `last`: the last event."""

    def __init__(self, service: Served) -> None:
        super().__init__()
        self._service = service
        self.num_events = 0
        self.last: Any = None

    def run(self) -> None:
        with self._service.stream(max_tokens=8000) as events:
            for event in events:
                self.num_events += 1
                self.last = event


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_worker_lost_under_64_streams_is_replaced_in_the_same_memory(
    service: Served, number: signal.Signals
) -> None:
    expected = service.complete(max_tokens=32)
    service.at_rest()
    before, used = info(service), used_bytes()
    streams = [Stream(service) for _ in range(NUM_STREAMS)]
    for stream in streams:
        stream.start()
    wait_until(lambda: all(stream.num_events > 5 for stream in streams), 120)
    lost = service.processes()["worker"]
    begun = time.monotonic()
    os.kill(lost, number)
    for stream in streams:
        stream.join(60)
        assert stream.last["error"]["code"] == 503, stream.last
    noticed = time.monotonic() - begun
    assert service.request("/ready")[0] == 503
    assert service.request(COMPLETIONS, {"prompt": "a"})[0] == 503
    wait_until(lambda: service.request("/ready")[0] == 200, 180)
    print(f"{number.name}: noticed after {noticed:.2f} s, ready again after {time.monotonic() - begun:.1f} s")
    assert info(service) == {"capacity": before["capacity"], "starts": before["starts"] + 1}
    assert service.processes()["worker"] != lost
    assert service.complete(max_tokens=32) == expected
    service.at_rest()
    assert abs(used_bytes() - used) < 64 << 20
