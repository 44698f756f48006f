"""The router's process: a `Router` over a worker process, what it is told, and its end.

Started by `launch.py` alone, with its settings as a line of JSON on stdin. Standard input stays open behind
that line for as long as the launcher lives: DRAIN and ABORT come there, and at its end this process ends too,
and with it the worker and the API. Signals are the launcher's. Knows no HTTP and no torch.
"""

import asyncio
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import uvloop

from lightkv.router.config import EngineConfig

from .child_process import ignore_signals
from .router import Router
from .worker_client import WorkerClient

DRAIN = b"drain\n"  # finish what runs, within the time for it
ABORT = b"abort\n"  # end what runs now
ABORT_SECONDS = 2.0  # for the step under way, once every request is aborted; then the worker is killed in it


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the router's process is started with.

    socket: path to listen at. step_timeout: as in `WorkerClient`. leftovers: paths of sockets, and a directory
    after what it holds, that the launcher removes at the end; this process does so where the launcher was
    killed.
    """

    config: EngineConfig
    socket: str
    max_queued_requests: int
    shutdown_timeout: float
    step_timeout: float | None
    leftovers: list[str]


class _Process:
    """One router, from its start to its exit code."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        make_worker = partial(WorkerClient, settings.step_timeout)
        self._router = Router(settings.config, make_worker, settings.max_queued_requests)
        self._serving = self._loop.create_task(self._router.serve(Path(settings.socket)))
        self._is_orphan = False

    async def run(self) -> int:
        self._loop.add_reader(sys.stdin.fileno(), self._on_stdin)
        try:
            code = await self._serving
        except asyncio.CancelledError:
            code = 1 if self._is_orphan else 0
        if self._is_orphan:
            remove(self._settings.leftovers)
        return code

    def _drain(self) -> None:
        if self._router.status().state == "starting":
            self._serving.cancel()  # nothing runs, and the weights are not waited for
        else:
            self._router.drain()
            self._loop.call_later(self._settings.shutdown_timeout, self._abort)

    def _abort(self) -> None:
        self._router.abort_all()
        self._loop.call_later(ABORT_SECONDS, self._serving.cancel)

    def _on_stdin(self) -> None:
        told = os.read(sys.stdin.fileno(), 4096)
        for line in told.splitlines(keepends=True):  # never cut: what is this short is written at once
            if line == DRAIN:
                self._drain()
            elif line == ABORT:
                self._abort()
        if not told:  # the launcher is gone, or wants this process to be
            self._loop.remove_reader(sys.stdin.fileno())
            self._is_orphan = True
            self._serving.cancel()


def remove(leftovers: list[str]) -> None:
    """Remove sockets, and directories that are empty then; what is gone already is none."""
    for path in leftovers:
        with suppress(OSError):
            os.rmdir(path) if os.path.isdir(path) else os.unlink(path)


async def _run(settings: RouterSettings) -> int:
    return await _Process(settings).run()


def main() -> int:
    """Run a router; stdin brings `RouterSettings` as a line of JSON, and stays open."""
    ignore_signals()
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:  # takes nothing behind the line
        settings = msgspec.json.decode(stdin.readline(), type=RouterSettings)
    return uvloop.run(_run(settings))


if __name__ == "__main__":
    sys.exit(main())
