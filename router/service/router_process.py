"""The router process, which runs a `Router` over a worker process until the launcher ends it.

`launch.py` starts it with its settings as a line of JSON on standard input, and keeps standard input open.
DRAIN and ABORT come there. When standard input ends, this process ends too, and with it the worker and the API.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import uvloop

from lightkv.router.config import EngineConfig
from lightkv.router.service.ranks.worker_group import Worker, WorkerGroup

from .child_process import ignore_signals
from .log_stream import write_in_background
from .router import Router
from .worker_client import WorkerClient

DRAIN = b"drain\n"  # finish running requests, within the shutdown timeout
ABORT = b"abort\n"  # abort running requests now
RANKS_FILE = "ranks"  # beside the socket: by which the ranks of a model find each other
ABORT_SECONDS = 2.0  # for the steps in flight, once every request is aborted; then the worker is killed


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the router process.

    socket: path to listen at. step_timeout: as in `WorkerClient`. leftovers: paths of sockets, and of a
    directory after the files in it, which the launcher removes at the end, or this process if the launcher
    was killed.
    """

    config: EngineConfig
    socket: str
    max_queued_requests: int
    shutdown_timeout: float
    step_timeout: float | None
    leftovers: list[str]


class _Process:
    """Runs one router, from its start to its exit code."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        make_worker: Callable[[], Worker] = partial(WorkerClient, settings.step_timeout)
        if settings.config.tensor_parallel > 1:
            store = Path(settings.socket).with_name(RANKS_FILE)
            make_worker = partial(WorkerGroup, settings.config.tensor_parallel, store, settings.step_timeout)
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
            self._serving.cancel()  # no request runs, and loading the weights may take long
        else:
            self._router.drain()
            self._loop.call_later(self._settings.shutdown_timeout, self._abort)

    def _abort(self) -> None:
        self._router.abort_all()
        self._loop.call_later(ABORT_SECONDS, self._serving.cancel)

    def _on_stdin(self) -> None:
        received = os.read(sys.stdin.fileno(), 4096)
        for line in received.splitlines(keepends=True):  # lines this short are written in one piece
            if line == DRAIN:
                self._drain()
            elif line == ABORT:
                self._abort()
        if not received:  # the launcher has ended, or wants this process to end
            self._loop.remove_reader(sys.stdin.fileno())
            self._is_orphan = True
            self._serving.cancel()


def remove(leftovers: list[str]) -> None:
    """Removes sockets, and directories if they are empty then. Paths that do not exist are no error."""
    for path in leftovers:
        with suppress(OSError):
            os.rmdir(path) if os.path.isdir(path) else os.unlink(path)


async def _run(settings: RouterSettings) -> int:
    return await _Process(settings).run()


def main() -> int:
    """Runs a router, with `RouterSettings` as a line of JSON on standard input, which stays open."""
    ignore_signals()
    write_in_background()
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:  # reads nothing beyond the line
        settings = msgspec.json.decode(stdin.readline(), type=RouterSettings)
    return uvloop.run(_run(settings))


if __name__ == "__main__":
    sys.exit(main())
