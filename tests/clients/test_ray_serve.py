"""The application for Ray Serve: two replicas behind one endpoint, of which one is killed under 200 streams.

Ray is in an environment of its own, which `make clients` installs; its replicas start the service of this one.
"""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from lightkv.router.cli.http_client import UnixConnection
from tests.support.served import MARK, save_tiny_model, wait_until

ROOT = Path(__file__).parents[2]
SERVE = Path(sys.prefix) / "clients" / "ray" / "bin" / "serve"  # as in the Makefile
NUM_STREAMS = 200
PROCESSES = 4  # of a service: launcher, router, worker and API
SECONDS = 240.0  # for a start or for an answer, on a machine that is busy otherwise too
CHAT = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "stream": True}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class RayServe:
    """Runs `serve run` with two replicas of a model."""

    def __init__(self, model: Path, directory: Path) -> None:
        assert SERVE.exists(), f"{SERVE} is not there: run `make clients`, which installs it"
        self._mark = uuid.uuid4().hex
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        arguments = {
            "model": str(model),
            "options": "--device cpu --max-total-tokens 32768",
            "command": f"{sys.executable} -m lightkv.router.cli",
            "min_replicas": "2",
            "max_replicas": "2",
        }
        application = {"name": "lightkv", "import_path": "deploy.ray_serve:app", "args": arguments}
        config = directory / "config.yaml"  # JSON is YAML, too
        config.write_text(json.dumps({"http_options": {"port": self.port}, "applications": [application]}))
        home = directory / "home"  # where Ray keeps its token
        home.mkdir()
        self.log = directory / "log"
        own = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "HOME": str(home), MARK: self._mark}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [SERVE, "run", config], cwd=ROOT, env=os.environ | own, stdout=log, stderr=log
            )

    def processes(self) -> dict[int, tuple[int, bytes]]:
        """Returns the processes of all services: the parent and the command line of each."""
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended, or belongs to another user
                command = (directory / "cmdline").read_bytes()
                environment = (directory / "environ").read_bytes().split(b"\0")
                if b"lightkv.router" in command and f"{MARK}={self._mark}".encode() in environment:
                    fields = (directory / "stat").read_text().rpartition(")")[2].split()
                    found[int(directory.name)] = (int(fields[1]), command)
        return found

    def services(self) -> dict[int, int]:
        """Returns the launchers of the services, each with its replica."""
        return {pid: parent for pid, (parent, command) in self.processes().items() if b"--uds" in command}

    def is_ready(self) -> bool:
        """Sends a request. Returns whether two services have all their processes and are sent requests."""
        assert self.process.poll() is None, self.log.read_text()
        with suppress(OSError, http.client.HTTPException):
            is_answered = self.stream() == "completed"
            commands = [command for _, command in self.processes().values()]
            launchers = [command.decode().split("\0") for command in commands if b"--uds" in command]
            is_whole = (len(launchers), len(commands)) == (2, 2 * PROCESSES)
            return is_answered and is_whole and all(map(has_answered, launchers))
        return False

    def stream(self, started: threading.Semaphore | None = None) -> str:
        """Returns how a stream ends: completed, error (an event), refused (a status), broken (the connection),
        or truncated, which a client could take for a whole answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        received = b""
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(CHAT), headers)
            response = connection.getresponse()
            if response.status != 200:
                return "refused"
            while piece := response.read1(65536):
                if not received and started is not None:
                    started.release()
                received += piece
        except (ConnectionError, http.client.HTTPException):
            return "broken"
        finally:
            connection.close()
        if received.endswith(b"data: [DONE]\n\n"):
            return "completed"
        return "error" if b'data: {"error"' in received else "truncated"

    def close(self) -> None:
        """Ends all of it, and what a failed test has left."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(SECONDS)
        finally:
            self.process.kill()
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def has_answered(launcher: list[str]) -> bool:
    """Returns whether the service of a launcher's command line has answered a request."""
    with closing(UnixConnection(launcher[launcher.index("--uds") + 1])) as connection:
        connection.request("GET", "/metrics")
        return b"vllm:request_success_total{" in connection.getresponse().read()


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayServe]:
    assert shutil.which("setpriv"), "setpriv, of util-linux, is not there"
    directory = tmp_path_factory.mktemp("ray")
    running = RayServe(save_tiny_model(directory / "tiny"), directory)
    try:
        wait_until(running.is_ready, SECONDS)
        yield running
    finally:
        running.close()


def test_the_service_bounds_bodies_with_and_without_a_length(ray: RayServe) -> None:
    pieces = [b"a" * 2**20] * 64
    for body in (b"".join(pieces), iter(pieces)):  # an iterator is sent in chunks, without a length
        with closing(http.client.HTTPConnection("127.0.0.1", ray.port, timeout=SECONDS)) as connection:
            headers = {"Content-Type": "application/json"}
            with suppress(ConnectionError):  # the answer comes before the body ends
                connection.request("POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            assert response.status == 413, response.read()
    assert ray.stream() == "completed"


@pytest.mark.parametrize("victim", ["replica", "api process"])
def test_one_of_two_is_killed_under_streams(victim: str, ray: RayServe) -> None:
    """Each stream completes or ends with an error, none hangs, and then there are two again."""
    service, replica = next(iter(ray.services().items()))
    processes = ray.processes().items()
    (api,) = (pid for pid, (parent, line) in processes if parent == service and b"api.process" in line)
    started = threading.Semaphore(0)
    ends: list[str] = []

    def run() -> None:
        ends.append(ray.stream(started))

    threads = [threading.Thread(target=run) for _ in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    for _ in range(NUM_STREAMS // 2):
        assert started.acquire(timeout=SECONDS), ray.log.read_text()
    os.kill(replica if victim == "replica" else api, signal.SIGKILL)
    for thread in threads:
        thread.join()  # each answer has a time limit
    counts = Counter(ends)
    print(counts)
    assert len(ends) == NUM_STREAMS, "a stream hung"
    assert counts["completed"] >= 1, counts
    assert not counts["truncated"], counts
    assert counts["completed"] < NUM_STREAMS, (
        f"no stream was running on the {victim} that was killed: {counts}"
    )
    wait_until(lambda: service not in ray.services() and ray.is_ready(), SECONDS)


def test_how_many_replicas_there_are_to_be() -> None:
    """Of the tokens that wait, the shares of pools that are held, and the numbers that are and are wanted."""
    program = """
from types import SimpleNamespace
from deploy.ray_serve import WaitingTokens

def wanted(waiting, usages, current, target):
    metrics = {"waiting_tokens": dict(enumerate(waiting)), "usage": dict(enumerate(usages))}
    context = SimpleNamespace(
        aggregated_metrics=metrics, current_num_replicas=current, target_num_replicas=target
    )
    return WaitingTokens(1000)(context)[0]

print(
    wanted([999], [1.0], 1, 1),  # not enough waits
    wanted([2500], [1.0], 1, 1),
    wanted([2500], [1.0], 1, 3),  # those that are wanted have not started yet
    wanted([600, 600], [0.2, 0.2], 2, 2),  # full by the number of requests
    wanted([0, 0, 0], [0.5, 0.4, 0.3], 3, 3),  # two would hold all
    wanted([0], [0.0], 1, 3),  # two have not reported yet
    wanted([0, 0], [0.0, 0.0], 2, 2),
)
"""
    assert printed(program).split() == ["1", "3", "3", "3", "2", "3", "1"]


def test_targets_and_headers_of_any_bytes_arrive_as_they_are_or_are_refused() -> None:
    program = """
import asyncio
import aiohttp
from deploy.ray_serve import Replica
from starlette.requests import Request

class Session:
    async def request(self, method, url, data, headers, allow_redirects):
        print(url.raw_host, url.raw_path_qs, *(value.encode() for _, value in headers))
        raise aiohttp.ClientError

async def ask(path, query=b"", value=b"v"):
    scope = {"type": "http", "method": "GET", "path": "", "raw_path": path, "query_string": query}
    answer = await replica(Request({**scope, "headers": [(b"x-a", value)]}))
    print(answer.status_code)

replica = object.__new__(Replica)
replica._session = Session()
for request in [
    (b"/a%2f%ff/", b"b=%20&c=?"), (b"//evil/x",), (b"/\\xff\\xfe #", b"\\xff"), (b"/", b"", "\u00e9".encode()),
    (b"/", b"", b"\\xff"), (b"http://evil/x",), (b"@evil:80/x",), (b":99999/x",), (b"*",),
]:
    asyncio.run(ask(*request))
"""
    assert printed(program).splitlines() == [
        *("localhost /a%2f%ff/?b=%20&c=? b'v'", "503"),
        *("localhost //evil/x b'v'", "503"),
        *("localhost /%FF%FE%20%23?%FF b'v'", "503"),
        *(f"localhost / {'é'.encode()}", "503"),
        *("400", "400", "400", "400", "400"),
    ]


def test_the_error_of_a_service_that_is_gone_can_be_pickled() -> None:
    """Ray takes it to its controller, which replaces the replica."""
    program = """
import asyncio, pickle
import aiohttp
from deploy.ray_serve import Replica

async def ask():
    replica = object.__new__(Replica)
    replica._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector("/none/http.sock"))
    for asked in replica.check_health, replica.record_autoscaling_stats:
        try:
            await asked()
        except Exception as error:
            print(repr(pickle.loads(pickle.dumps(error))))
    await replica._session.close()
    del Replica.__del__  # which ends the service that this one has not

asyncio.run(ask())
"""
    health, stats = printed(program).splitlines()
    assert health.startswith("RuntimeError('the service does not answer /ready: ")
    assert stats.startswith("RuntimeError('the service does not answer /metrics: ")


def printed(program: str) -> str:
    """What a program prints where Ray is."""
    done = subprocess.run(
        [SERVE.parent / "python", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_end_leaves_no_process(ray: RayServe) -> None:
    assert ray.processes()
    ray.close()
    wait_until(lambda: not ray.processes(), SECONDS)
