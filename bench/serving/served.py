"""Starts and stops `lightkv serve`, and reads the processor time and memory of its processes from /proc."""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from lightkv.router import EngineConfig

START_SECONDS = 1800.0  # enough for a large model, or graphs of many batch sizes
STOP_SECONDS = 60.0
ROLES = {
    "lightkv.router.api.process": "api",
    "lightkv.router.service.router_process": "router",
    "lightkv.router.service.worker": "worker",
    "lightkv.router.api.grammars.check_process": "checker",
}


class Memory(NamedTuple):
    """Physical memory of a process, in bytes. `proportional`: shared pages are divided by their sharers."""

    resident: int
    proportional: int


class ServerFailed(Exception):
    """Raised when the server does not start, or does not stop as it should."""


class Server:
    """Runs `lightkv serve` with `arguments` for the length of a `with` block. `url`: its root.

    `folder`: the checkout whose lightkv it runs; None for the one that this process runs. `environment`:
    variables that it has beside those of this process. Raises ServerFailed with the last lines that the server
    wrote.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._arguments = arguments
        self._folder = folder
        self._environment = environment
        self.url = ""

    def __enter__(self) -> "Server":
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        command = [sys.executable, "-m", "lightkv.router.cli", "serve", "--port", "0", *self._arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=self._folder,
            env=os.environ | dict(self._environment or {}),
        )
        killer = threading.Timer(START_SECONDS, self._process.kill)
        killer.start()
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:  # the server writes one line, when it is ready
                if found := re.search(r"https?://\S+", line):
                    self.url = found[0]
                    return self
            code = self._process.wait()
            raise ServerFailed(f"lightkv serve ended with code {code} before it was ready:\n{self._said()}")
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._log.close()
            raise
        finally:
            killer.cancel()

    def __exit__(self, *_: object) -> None:
        try:
            self._process.send_signal(signal.SIGTERM)
            code = self._process.wait(STOP_SECONDS)
            if code:
                raise ServerFailed(f"lightkv serve ended with code {code}:\n{self._said()}")
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise ServerFailed(
                f"lightkv serve did not end within {STOP_SECONDS:g} s:\n{self._said()}"
            ) from None
        finally:
            self._log.close()

    def cpu_seconds(self) -> dict[str, float]:
        """Returns the processor time of each process since its start, by role: api, router, worker."""
        return {role: cpu_seconds(pid) for pid in descendants(self._process.pid) if (role := _role(pid))}

    def pids(self) -> dict[str, int]:
        """Returns the id of each live process, by role: launcher, api, router, worker."""
        found = {role: pid for pid in descendants(self._process.pid) if (role := _role(pid))}
        return {"launcher": self._process.pid, **found}

    def memory(self) -> dict[str, Memory]:
        """Returns the memory of each process, by role."""
        return {role: _memory(pid) for role, pid in self.pids().items()}

    def _said(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-20:])


def serve_arguments(config: EngineConfig, more: Sequence[str]) -> list[str]:
    """Returns the arguments of `lightkv serve` for this configuration."""
    given = [config.model]
    for field in fields(EngineConfig):
        value, flag = getattr(config, field.name), field.name.replace("_", "-")
        if field.name == "model" or value == field.default:
            continue
        if isinstance(value, bool):
            given.append(f"--{'' if value else 'no-'}{flag}")
        else:
            given += [f"--{flag}", str(value)]
    return [*given, *more]


def parse_with_serve(made: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses a command line (None: this process's). `serve` gets what follows `--`, for `lightkv serve`."""
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    options = made.parse_args(given[:end])
    options.serve = given[end + 1 :]
    return options


def descendants(pid: int) -> list[int]:
    """Returns the ids of a process's children, of theirs, and so on."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            found += [child, *descendants(child)]
    return found


def _role(pid: int) -> str | None:
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return next((role for module, role in ROLES.items() if module in command), None)


def cpu_seconds(pid: int) -> float:
    """Returns the processor time of a process in seconds.

    It is utime and stime, fields 14 and 15 of proc(5). Field 2 is a name in brackets with any characters.
    """
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> Memory:
    """Reads Rss and Pss of proc_pid_smaps_rollup(5), which are in KiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(size.split()[0]) * 1024 for name, size in (line.split(":", 1) for line in lines)}
    return Memory(sizes["Rss"], sizes["Pss"])
