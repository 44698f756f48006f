"""Faults that once ended or froze a running service: plans larger than a socket's buffer, a worker that
hangs, a router that is stopped."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.support.combinations import slow
from tests.support.served import COMPLETIONS, Served, save_tiny_model, starting, wait_until

STEP_TIMEOUT = 5


@pytest.fixture(scope="module", params=["", *slow("gemma3", "gpt-oss", "Qwen3_5ForCausalLM")])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Also with models of which most layers have windows or states."""
    directory = tmp_path_factory.mktemp("service")
    model = save_tiny_model(directory / "model", family=request.param)
    with starting(model, directory / "log", directory) as begin:
        served = begin("--step-timeout", str(STEP_TIMEOUT), "--prefill-chunk", "512")
        yield served.wait_ready()


def is_ready(service: Served) -> bool:
    return service.request("/ready")[0] == 200


def metric(service: Served, name: str) -> str:
    """Returns the lines of one metric."""
    connection = service.connect()
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return "\n".join(line for line in text.splitlines() if line.startswith(name))


@pytest.mark.slow  # test_launch.py does the same with its service
def test_many_answers_with_penalties_to_a_long_cached_prompt(service: Served) -> None:
    service.check_many_answers_to_a_long_prompt()
    assert service.at_rest()["num_worker_starts"] == 1


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced(service: Served) -> None:
    expected = service.complete()
    starts = service.request("/load")[1]["num_worker_starts"]
    worker = service.processes()["worker"]
    with service.stream(max_tokens=8000) as events:
        os.kill(worker, signal.SIGSTOP)
        last = list(events)[-1]  # the stream ends, but not with [DONE]
        assert last["error"]["code"] == 503
        assert (
            f"took more than {STEP_TIMEOUT} s (--step-timeout is {STEP_TIMEOUT})" in last["error"]["message"]
        )
    assert not is_ready(service)
    assert service.request(COMPLETIONS, {"prompt": "a"})[0] == 503
    wait_until(lambda: is_ready(service), 60)
    assert service.processes()["worker"] != worker
    assert service.complete() == expected
    assert service.at_rest()["num_worker_starts"] == starts + 1
    assert "--step-timeout" in service.log.read_text()


@pytest.mark.slow
def test_a_stopped_router_is_not_ready_and_loses_no_request(service: Served) -> None:
    """The time in which the router itself was stopped does not count: it does not kill the worker."""
    service.complete()
    starts = service.at_rest()["num_worker_starts"]
    router, worker = service.processes()["router_process"], service.processes()["worker"]
    with service.stream(max_tokens=200) as events:
        os.kill(worker, signal.SIGSTOP)
        os.kill(router, signal.SIGSTOP)
        wait_until(lambda: not is_ready(service), 30)
        assert metric(service, "lightkv:ready").endswith(" 0.0")
        assert not metric(service, "vllm:num_requests_running")
        os.kill(router, signal.SIGCONT)
        os.kill(worker, signal.SIGCONT)
        assert list(events)[-1] == "[DONE]"
    wait_until(lambda: is_ready(service), 30)
    assert metric(service, "vllm:num_requests_running")
    assert service.at_rest()["num_worker_starts"] == starts
