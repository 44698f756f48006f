"""A whole service whose pool holds K/V in 8 bits: it answers, says so, and its counts hold to the end."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.served import Served, save_tiny_model, wait_until


def test_a_service_in_int8_answers_and_counts(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    served = Served(model, tmp_path / "log", "--kv-dtype", "int8", "--kv-skip-layers", "1")
    try:
        served.wait_ready()
        text = served.complete("Once upon a time", 12)
        with ThreadPoolExecutor(8) as crowd:
            texts = list(crowd.map(lambda i: served.complete(f"the number {i} of", 20 + i), range(16)))
        assert all(texts)
        assert served.complete("Once upon a time", 12) == text  # its prompt is cached now
        load = served.at_rest()
        assert (load["kv_dtype"], load["capacity"]) == ("int8", 8192)
        assert load["num_ledger_checks"] > 0
        assert served.request("/v1/models")[1]["data"][0]["kv_dtype"] == "int8"
        # Two layers of two heads, of 8 + 8 dims: one with two scales a head, the other in float32.
        config = 'bytes_per_token="176",cache_dtype="int8"'
        assert config in metrics(served)
        top = [sys.executable, "-m", "lightkv.router.cli", "top", "--once", "--interval", "0.1"]
        frame = subprocess.check_output([*top, "--url", served.url], text=True, timeout=60)
        assert "free of 8,192 tokens, in int8" in " ".join(frame.split())
        status, pool, _ = served.request("/map")
        assert (status, pool["capacity"], pool["num_own"]) == (200, 8192, 0)
        os.kill(served.processes()["worker"], signal.SIGKILL)  # another worker takes its place
        wait_until(lambda: served.request("/load")[1]["num_worker_starts"] == 2, 60.0)
        wait_until(lambda: served.request("/load")[1]["state"] == "ready", 60.0)
        assert served.complete("Once upon a time", 12) == text
        served.at_rest()
        served.process.terminate()
        assert served.wait() == 0, served.log.read_text()
    finally:
        served.close()
    assert "tokens in int8, layer 1 in float32" in served.log.read_text()


def metrics(served: Served) -> str:
    connection = served.connect()
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text


@pytest.mark.slow
def test_a_service_refuses_a_format_that_does_not_fit(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    command = [
        sys.executable,
        "-m",
        "lightkv.router.cli",
        "serve",
        str(model),
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    for given, told in (
        (["--kv-dtype", "int9"], "--kv-dtype: 'int9' is no K/V format"),
        (["--kv-dtype", "int8-g3"], "heads of 8 K dims do not fit 3 elements"),
    ):
        found = subprocess.run([*command, *given], capture_output=True, text=True, timeout=120)
        assert found.returncode != 0
        assert told in " ".join(found.stderr.split())
