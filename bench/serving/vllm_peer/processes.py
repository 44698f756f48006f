"""Runs one engine at a time in processes of its own, so that each has the whole GPU and its own packages."""

import contextlib
import importlib.metadata
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.serving.served import serve_arguments
from lightkv.router import EngineConfig

ROOT = Path(__file__).resolve().parents[3]  # of lightkv's code: a checkout, or where run.sh unpacked it
POLL_SECONDS = 0.05
STOP_SECONDS = 40.0
GROUP_SECONDS = 10.0  # that the children have after their parent has ended
LOG_LINES = 20  # the last lines of a log that go into an error

Environment = dict[str, str]


class PartFailed(Exception):
    """Raised when a process of an engine ended early, failed or took too long."""


class Engine(NamedTuple):
    """How an engine is started.

    `name`: as `peer_bench.py` calls it. `version`: of its code. `ready`: the path at which its service answers
    200 when it is ready. `caches`: directories of compiled code, by the environment variable that names each.
    """

    name: str
    version: str
    search_path: tuple[Path, ...]
    serve: tuple[str, ...]
    ready: str
    caches: Mapping[str, Path]

    @property
    def environment(self) -> Environment:
        """The variables of its processes.

        Python must not find packages in the working directory: vLLM would take lightkv's `triton_kernels` for
        the package of that name that it looks for. It may write bytecode, which an installation by pip has.
        """
        given = os.environ | {name: str(path) for name, path in self.caches.items()}
        given.pop("PYTHONDONTWRITEBYTECODE", None)
        given |= {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        given["PYTHONPATH"] = os.pathsep.join(map(str, self.search_path))
        return given

    @property
    def compile_cache(self) -> str:
        """`filled` if an earlier start has left compiled code, else `empty`."""
        is_filled = any(file.is_file() for path in self.caches.values() for file in path.rglob("*"))
        return "filled" if is_filled else "empty"


def make_vllm(site: Path | None, work: Path, model: Path) -> Engine:
    """Returns vLLM as unpacked to `site`, or as installed. `work`: the directory for its compiled code."""
    search_path = (site / "site", site / "vllm") if site else ()
    places = [str(path) for path in search_path] or sys.path
    found = next(iter(importlib.metadata.distributions(name="vllm", path=places)), None)
    return Engine(
        "vllm",
        found.version if found else "not installed",
        search_path,
        ("-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1",
         "--gpu-memory-utilization", "0.9"),
        "/health",
        {"VLLM_CACHE_ROOT": work / "compiled" / "vllm"},
    )  # fmt: skip


def make_lightkv(site: Path | None, work: Path, model: Path, settings: Mapping[str, Any]) -> Engine:
    """Returns the lightkv of ROOT. `settings`: fields of its EngineConfig. Raises InvalidConfig, TypeError."""
    config = EngineConfig(model=str(model), **settings)
    compiled = work / "compiled" / "lightkv"
    return Engine(
        "lightkv",
        commit(ROOT),
        (site / "site", ROOT) if site else (ROOT,),
        ("-m", "lightkv.router.cli", "serve", *serve_arguments(config, [])),
        "/ready",
        {"TRITON_CACHE_DIR": compiled / "triton", "TORCHINDUCTOR_CACHE_DIR": compiled / "inductor"},
    )


def commit(root: Path) -> str:
    """Returns the commit of the code at `root`: what run.sh wrote, or what git says, or "unknown"."""
    written = root / "COMMIT"
    if written.exists():
        return written.read_text().strip()
    said = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return said.stdout.strip() or "unknown"


def last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def stop(process: "subprocess.Popen[Any]", seconds: float = STOP_SECONDS) -> None:
    """Ends a process and its children, which hold the GPU: asks first, and kills what is left of its group."""
    if process.poll() is None:
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    for _ in range(int(GROUP_SECONDS / POLL_SECONDS)):
        if not _group_runs(process.pid):
            return
        time.sleep(POLL_SECONDS)
    kill_group(process)
    process.wait()


def kill_group(process: "subprocess.Popen[Any]") -> None:
    """Kills a process and its children at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _group_runs(group: int) -> bool:
    """Returns whether a process of the group still runs, by proc(5). A zombie holds no memory."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, own, *_ = stat.read_text().rpartition(")")[2].split()
            if int(own) == group and state not in "ZX":
                return True
    return False


def run_child(
    command: Sequence[str], environment: Environment, log: Path, seconds: float, shown: re.Pattern[str]
) -> None:
    """Runs a Python command to its end. Appends its output to `log`, and prints the lines that match `shown`.

    Raises PartFailed.
    """
    with log.open("a") as file:
        process = subprocess.Popen(
            [sys.executable, *command], env=environment, cwd=log.parent, process_group=0, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
        )  # fmt: skip
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            kill_group(process)

        timer = threading.Timer(seconds, give_up)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                file.flush()
                if shown.match(line):
                    print("  ", line.rstrip(), flush=True)
            code = process.wait()
        finally:
            timer.cancel()
            stop(process)
    if is_late.is_set():
        raise PartFailed(f"not done within {seconds:g} s; the end of {log}:\n{last_lines(log)}")
    if code:
        raise PartFailed(f"ended with code {code}; the end of {log}:\n{last_lines(log)}")


class Service:
    """Runs the service of an engine for the length of a `with` block. Raises PartFailed if it does not start.

    `url`: its root. `start_seconds`: from the start of the process until the service was ready.
    """

    def __init__(self, engine: Engine, log: Path, seconds: float) -> None:
        self._engine = engine
        self._log = log
        self._seconds = seconds
        self.url = ""
        self.start_seconds = 0.0

    def __enter__(self) -> "Service":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, *self._engine.serve, "--port", str(port)]
        start = time.perf_counter()
        with self._log.open("w") as file:
            self._process = subprocess.Popen(
                command, env=self._engine.environment, cwd=self._log.parent, process_group=0,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            while not self._is_ready():
                self._check(time.perf_counter() - start)
                time.sleep(POLL_SECONDS)
        except BaseException:
            stop(self._process)
            raise
        self.start_seconds = time.perf_counter() - start
        return self

    def __exit__(self, *_: object) -> None:
        stop(self._process)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self._engine.ready, timeout=5.0) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _check(self, waited: float) -> None:
        code = self._process.poll()
        if code is not None:
            raise PartFailed(
                f"the service ended with code {code}; the end of {self._log}:\n{last_lines(self._log)}"
            )
        if waited > self._seconds:
            raise PartFailed(
                f"the service was not ready within {self._seconds:g} s; the end of {self._log}:\n"
                f"{last_lines(self._log)}"
            )
