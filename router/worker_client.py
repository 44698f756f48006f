"""The router's end of a worker: starts the process, calls it without blocking the event loop, sees its death.

Knows rpyc, msgspec and the process; knows no torch, and nothing of what plans mean. The worker does not outlive
this process, whose end of the socket pair is closed when it ends.
"""

import asyncio
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
import rpyc
from rpyc.core.consts import HANDLE_PING

from lightkv.errors import LightKVError

from .child_process import command
from .config import EngineConfig
from .engine import Holding
from .messages import Done, Owners, PoolMap, RunnerInfo, StepPlan, StepResult, WorkerError, WorkerStart
from .worker import RPYC_CONFIG, connect

Report = Callable[[str], None]
Result = TypeVar("Result")

_REAP_SECONDS = 1.0  # a dead process that held a GPU can take longer to be gone; whoever waits is told before
# This end calls, and can be called for nothing.
_CLIENT_CONFIG = {**RPYC_CONFIG, "allow_getattr": False, "allow_exposed_attrs": False}
_encode = msgspec.msgpack.encode


class WorkerDied(LightKVError):
    """The worker process has ended, and what it was asked is lost.

    `returncode`: its exit code, or minus the signal; None while the kernel is still taking it down.
    """

    def __init__(self, returncode: int | None) -> None:
        self.returncode = returncode
        if returncode is None:
            how = "closed its connection"
        elif returncode < 0:
            how = f"was ended by {signal.Signals(-returncode).name}"
        else:
            how = f"exited with code {returncode}"
        hint = " (by the kernel, if memory ran out: see dmesg)" if returncode == -signal.SIGKILL else ""
        super().__init__(f"the worker process {how}{hint}; what it printed last may say why; start another")


class WorkerFailed(LightKVError):
    """The worker lives, and answered with an error. The fields are those of `WorkerError`."""

    def __init__(self, error: WorkerError) -> None:
        self.kind = error.kind
        self.fatal = error.fatal
        self.step = error.step
        where = "" if error.step is None else f"step {error.step}: "
        super().__init__(f"{where}{error.kind}: {error.message}")


class WorkerClient:
    """One worker process: made with it, of no use after it. For one event loop, in which it is made.

    Calls are made one at a time. Each raises WorkerDied once the process has ended, however that came, and
    WorkerFailed for what the worker answers; after one that is `fatal`, `kill` it and make another. A call
    that is cancelled kills the worker: its place in the plans would not be known.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair()
        self._progress, progress_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                command("worker", "--fd", str(theirs.fileno()), "--progress-fd", str(progress_end)),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), progress_end),
                start_new_session=True,  # Ctrl-C in a terminal is for the router, which takes it down
            )
        except BaseException:
            self._socket.close()
            os.close(self._progress)
            raise
        finally:
            theirs.close()
            os.close(progress_end)
        self._connection = connect(rpyc.VoidService(), self._socket, _CLIENT_CONFIG)
        self._remote: dict[str, Any] = {}
        self._answer: asyncio.Future[Any] | None = None
        self._lines = asyncio.StreamReader()  # its progress
        self._ended: asyncio.Future[None] = self._loop.create_future()  # the stream
        self._exited: asyncio.Future[None] = self._loop.create_future()  # the process
        self._died: WorkerDied | None = None
        self._loop.add_reader(self._socket.fileno(), self._on_readable)
        self._loop.add_reader(self._progress, self._on_progress)
        self._burial = self._loop.create_task(self._bury())
        threading.Thread(target=self._reap, daemon=True).start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Can it still answer?"""
        return not self._ended.done() and not self._exited.done()

    async def start(self, config: EngineConfig, report: Report) -> RunnerInfo:
        """Load the model, however long it takes; `report` gets progress, a line at a time.

        Kills the worker if it fails. What `build_runner` raises comes as a WorkerFailed of that `kind`.
        """
        if self._remote:
            raise RuntimeError("this worker has been started; make another client for another one")
        relay = self._loop.create_task(self._relay(report))
        try:
            await self._wait_for(self._connection.async_request, HANDLE_PING, b"")
            await self._look_up()
            answer = await self._call("start", WorkerStart(config))
            await relay  # the worker has closed its end
            return _unpack(_INFO, answer)
        except BaseException:
            self.kill()
            raise
        finally:
            relay.cancel()

    async def step(self, plan: StepPlan) -> StepResult | None:
        """Launch a plan. Returns the result of the plan before it, or None if that was returned already.

        A WorkerFailed, too, is about the plan before it, `step`; the one given has been taken all the same.
        """
        return _unpack(_STEP, await self._call("step", plan))

    async def flush(self) -> StepResult | None:
        """The result of the last plan, or None if that was returned already."""
        return _unpack(_STEP, await self._call("flush"))

    async def check(self, edits: bytes, holding: Holding) -> None:
        """Apply the edits that no plan has carried yet and recount the memory. A WorkerFailed is fatal."""
        _unpack(_CHECKED, await self._call("check", (edits, holding)))

    async def map(self, edits: bytes, owners: Owners) -> PoolMap:
        """Apply the edits that no plan has carried yet, and get what every slot is used for."""
        return _unpack(_MAPPED, await self._call("map", (edits, owners)))

    def kill(self) -> None:
        """End the process; it has nothing to save."""
        self._process.kill()

    async def wait_dead(self) -> WorkerDied:
        """How it ended, once the process is gone and its memory is free again."""
        return await asyncio.shield(self._burial)

    async def _look_up(self) -> None:
        """Get hold of the remote methods once; each look-up costs as much as a call. The worker serves by now,
        so this does not block for long."""
        try:
            root = self._connection.root
            self._remote = {verb: rpyc.async_(getattr(root, verb)) for verb in _VERBS}
        except (EOFError, OSError):
            self._end()
            raise await self.wait_dead() from None

    async def _call(self, verb: str, *request: Any) -> bytes:
        """The worker's answer to `verb`, of which `request` is the one argument or none."""
        method = self._remote.get(verb)
        if method is None and self.alive:
            raise RuntimeError(f"{verb} before start")
        answer = await self._wait_for(method, *map(_encode, request))
        if type(answer) is not bytes:
            self.kill()
            raise TypeError(f"the worker answered {verb} with {type(answer).__name__}, not bytes")
        return answer

    async def _wait_for(self, send: Any, *request: Any) -> Any:
        """What comes back for `send(*request)`, an rpyc request that does not block."""
        if self._answer is not None:
            raise RuntimeError("a call is under way; await it first")
        if self._died is not None:
            raise self._died
        answer = self._answer = self._loop.create_future()
        try:
            if self.alive:  # else it is being buried, and the answer is that
                try:
                    send(*request).add_callback(partial(_resolve, answer))
                except (EOFError, OSError):
                    self._end()
            return await answer
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            self._answer = None

    def _on_readable(self) -> None:
        try:
            if not self._socket.recv(1, socket.MSG_PEEK):
                raise EOFError
            self._connection.serve(0)
        except Exception:  # the end of the stream, or what is no message of rpyc
            self._end()

    def _on_progress(self) -> None:
        if data := os.read(self._progress, 1 << 16):
            self._lines.feed_data(data)
        else:
            self._loop.remove_reader(self._progress)
            self._lines.feed_eof()

    def _end(self) -> None:
        """The stream is over; `_bury` goes on from here."""
        if not self._ended.done():
            self._loop.remove_reader(self._socket.fileno())
            self._ended.set_result(None)

    async def _bury(self) -> WorkerDied:
        """Wait for the end of the stream or the process, whichever shows first, and see to the rest."""
        try:
            await asyncio.wait((self._ended, self._exited), return_when=asyncio.FIRST_COMPLETED)
            self.kill()  # without its stream it is of no use
            await asyncio.wait((self._exited,), timeout=_REAP_SECONDS)
        finally:
            self.kill()  # also when the loop is taken down
            self._end()
            self._close()
        await asyncio.wait((self._exited,))
        self._died = WorkerDied(self._process.returncode)
        return self._died

    def _close(self) -> None:
        self._died = WorkerDied(self._process.poll())
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(self._died)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # so that rpyc does not wait for a farewell
        self._connection.close()
        self._loop.remove_reader(self._progress)
        os.close(self._progress)
        self._lines.feed_eof()

    def _reap(self) -> None:
        """In a thread of its own: it works under every event loop."""
        self._process.wait()
        with suppress(RuntimeError):  # the loop may be closed
            self._loop.call_soon_threadsafe(self._exited.set_result, None)

    async def _relay(self, report: Report) -> None:
        """Pass on progress until the worker closes its end."""
        async for line in self._lines:
            report(line.decode().rstrip("\n"))


def _resolve(answer: "asyncio.Future[Any]", result: rpyc.AsyncResult) -> None:
    if answer.done():  # cancelled
        return
    try:
        answer.set_result(result.value)
    except Exception as error:  # one that rpyc carried; the worker itself raises none
        answer.set_exception(error)


def _unpack(decoder: "msgspec.msgpack.Decoder[Done[Result] | WorkerError]", answer: bytes) -> Result:
    decoded = decoder.decode(answer)
    if isinstance(decoded, WorkerError):
        raise WorkerFailed(decoded)
    return decoded.result


_VERBS = ("start", "step", "flush", "check", "map")
_INFO = msgspec.msgpack.Decoder(Done[RunnerInfo] | WorkerError)
_STEP = msgspec.msgpack.Decoder(Done[StepResult | None] | WorkerError)
_CHECKED = msgspec.msgpack.Decoder(Done[None] | WorkerError)
_MAPPED = msgspec.msgpack.Decoder(Done[PoolMap] | WorkerError)
