"""Logs that nobody reads: a stream's bound, a full device, and whole processes beside them."""

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TextIO

import pytest

from lightkv.router.config import EngineConfig
from lightkv.router.service.log_stream import LogStream
from lightkv.router.service.router import Router
from tests.support.fake_router import INFO, MODEL, idle, service
from tests.support.served import Served, save_tiny_model

LINE = "x" * 99 + "\n"


@contextmanager
def pipe_of(num_bytes: int) -> Iterator[tuple[int, TextIO]]:
    """Yields the two ends of a pipe with room for so many bytes."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, num_bytes)
    with os.fdopen(writer, "w") as end:
        yield reader, end
        with os.fdopen(reader, "rb", closefd=True):  # the stream's thread ends its write with an error
            pass


def read(reader: int, num_bytes: int) -> str:
    """Returns so many bytes of the pipe, once they have come. Asserts that there are no more at present."""
    text = b""
    while len(text) < num_bytes:
        text += os.read(reader, 65536)
    assert not select.select([reader], [], [], 0.0)[0]
    return text.decode()


def test_lines_arrive_whole_and_in_order() -> None:
    with pipe_of(4096) as (reader, end):
        log = LogStream(end)
        log.write("a")
        print("b", "c", file=log)
        log.write("no end")
        assert log.drain(60.0)
        assert read(reader, 11) == "ab c\nno end"


@pytest.mark.parametrize("beyond", [0, 1, 50])
def test_beyond_its_bound_lines_are_dropped_and_counted(beyond: int) -> None:
    with pipe_of(4096) as (reader, end):
        os.write(end.fileno(), b"x" * 4096)  # the pipe is full
        log = LogStream(end, max_bytes=100 * len(LINE))
        for _ in range(100 + beyond):
            log.write(LINE)  # does not wait for the pipe, which nothing reads yet
        log.flush()
        assert not log.drain(0.0)
        assert log.num_dropped == beyond
        assert read(reader, 4096 + 100 * len(LINE)) == "x" * 4096 + 100 * LINE
        log.write("again\n")
        told = f"lightkv: {beyond} lines were dropped here, because nothing read them in time\n"
        told = (told if beyond else "") + "again\n"
        assert read(reader, len(told)) == told


def test_a_full_device_raises_nothing_and_its_lines_are_counted() -> None:
    with open("/dev/full", "w") as full:
        log = LogStream(full)
        print("the reason", file=log)
        assert log.drain(60.0)
        assert log.num_dropped == 1


def test_a_service_answers_while_nobody_reads_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pipe_of(4096) as (reader, end):
        monkeypatch.setattr(sys, "stderr", LogStream(end, max_bytes=8192))
        with service(tmp_path, log_requests=True).running() as api:
            idle(api)
            connection = api.connect()
            for _ in range(120):  # lines of more than 150 bytes
                connection.request("GET", "/v1/models")
                response = connection.getresponse()
                assert MODEL in response.read().decode()
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            connection.close()
        counts = [line for line in text.splitlines() if line.startswith("lightkv:log_dropped_lines_total")]
        (line,) = [line for line in counts if 'process="api"' in line]
        assert float(line.split()[-1]) > 20
        assert os.read(reader, 4096).startswith(b"{")


@pytest.mark.slow
def test_a_whole_service_starts_serves_and_stops_with_a_log_that_nobody_reads(tmp_path: Path) -> None:
    fifo = tmp_path / "log"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * 4096)  # the pipe is full before the service starts
    served = Served(save_tiny_model(tmp_path / "tiny"), fifo, "--log-requests")
    try:
        served.wait_ready()
        for _ in range(3):
            assert served.request("/v1/models")[0] == 200
        served.complete()
        served.signal(signal.SIGTERM)
        assert served.wait(20.0) == 0
    finally:
        served.close()
        os.close(reader)
        os.close(writer)


@pytest.mark.slow
def test_a_full_device_does_not_end_a_service(tmp_path: Path) -> None:
    served = Served(save_tiny_model(tmp_path / "tiny"), Path("/dev/full"), "--log-requests")
    try:
        served.wait_ready()
        served.complete()
        assert served.request("/health")[1]["healthy"]
        served.signal(signal.SIGTERM)
        assert served.wait(20.0) == 0
    finally:
        served.close()


def test_a_full_device_leaves_the_exit_code() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, open("/dev/full", "w") as full:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "lightkv.router.cli", "serve", "--port", port]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")


def test_the_routers_dropped_lines_are_counted_with_and_without_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_worker() -> NoReturn:
        raise AssertionError("no worker is needed to count")

    with pipe_of(4096) as (_, end):
        os.write(end.fileno(), b"x" * 4096)  # the pipe is full
        log = LogStream(end, max_bytes=len(LINE))
        monkeypatch.setattr(sys, "stderr", log)
        router = Router(EngineConfig(), no_worker, 10)
        assert router.load().num_dropped_log_lines == 0
        log.write(3 * LINE)
        assert router.load().num_dropped_log_lines == log.num_dropped > 0
        router._start_engine(INFO)
        assert router.load().num_dropped_log_lines == log.num_dropped
        monkeypatch.undo()


def test_a_signal_that_is_held_back_does_not_come_by_the_thread_of_the_log() -> None:
    before = set(threading.enumerate())
    with open(os.devnull, "w") as sink:
        stream = LogStream(sink)
        (thread,) = set(threading.enumerate()) - before
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        blocked = int(status.split("SigBlk:")[1].split()[0], 16)
        for number in (signal.SIGINT, signal.SIGTERM):
            assert blocked >> (number - 1) & 1
        assert stream.drain(5.0)
