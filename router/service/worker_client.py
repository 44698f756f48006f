"""The router's client of a worker: starts the process, calls it without blocking the event loop, and notices
its end.

A worker that does not answer a call in time is killed, and this is reported like any other end of the
process. The worker does not outlive this process, because it ends when its socket is closed.
"""

import asyncio
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
import rpyc
from rpyc.core.consts import HANDLE_PING

from lightkv.errors import LightKVError
from lightkv.holdings import Holdings
from lightkv.router.config import EngineConfig
from lightkv.router.engine.grammars.grammar_desk import Compile, Compiled, Forget
from lightkv.router.engine.step import Captured, ExpectedMemory, PoolMap, RunnerInfo, StepPlan, StepResult

from .call_watch import COMPILE_SECONDS, CPU_STEP_SECONDS, GPU_STEP_SECONDS, CallWatch
from .child_process import command, how_ended
from .loop_stream import LoopStream
from .messages import BadFrame, Done, FrameStream, Rank, WorkerError, WorkerStart, decode
from .worker import RPYC_CONFIG, connect

Report = Callable[[str], None]
Result = TypeVar("Result")

# Callers wait no longer for the exit code: a process that used a GPU can take long to exit.
_REAP_SECONDS = 1.0
_LOOK_UP_SECONDS = 10.0  # for looking up the worker's methods, the only calls that block the event loop
# This end makes calls and accepts none.
_CLIENT_CONFIG = {
    **RPYC_CONFIG,
    "allow_getattr": False,
    "allow_exposed_attrs": False,
    "sync_request_timeout": _LOOK_UP_SECONDS,
}
_encode = msgspec.msgpack.encode


class WorkerDied(LightKVError):
    """The worker process has ended, and the call is lost.

    `returncode`: its exit code, or minus the number of the signal; None while the process is still exiting.
    `reason`: why the router killed it, if it did.
    """

    def __init__(self, returncode: int | None, reason: str = "") -> None:
        self.returncode = returncode
        if reason:
            super().__init__(f"the worker process was killed: {reason}; start another worker")
            return
        how = "closed its connection" if returncode is None else how_ended(returncode)
        hint = " (by the kernel, if memory ran out: see dmesg)" if returncode == -signal.SIGKILL else ""
        super().__init__(f"the worker process {how}{hint}; its last output may say why; start another worker")


class WorkerFailed(LightKVError):
    """The worker answered with an error and is still running. The fields are those of `WorkerError`."""

    def __init__(self, error: WorkerError) -> None:
        self.kind = error.kind
        self.fatal = error.fatal
        self.step = error.step
        where = "" if error.step is None else f"step {error.step}: "
        super().__init__(f"{where}{error.kind}: {error.message}")


class WorkerClient:
    """One worker process, which starts with the client. A client belongs to the event loop in which it is made.

    Calls are made one at a time. Each raises WorkerDied once the process has ended, and WorkerFailed if the
    worker answers with an error; after a `fatal` one, `kill` the worker and make another client. Cancelling a
    call kills the worker, because it would be unknown which plans it has run.

    `step_timeout`: seconds that a call may take once the model is loaded, before the worker is killed; None
    means 60 on a GPU and 600 on a CPU. While the worker reports that it compiles something, a
    call may take 600 seconds. `program`: the command that runs the worker, without the descriptors that it
    inherits; None is the worker of this package.
    """

    def __init__(self, step_timeout: float | None = None, program: Sequence[str] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._step_timeout = step_timeout
        ours, theirs = socket.socketpair()
        self._grammar_socket, grammar_end = socket.socketpair()
        self._progress, progress_end = os.pipe()
        inherited = theirs.fileno(), progress_end, grammar_end.fileno()
        try:
            self._process = subprocess.Popen(
                [*(program or command("service.worker")), *map(str, inherited)],
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                start_new_session=True,  # Ctrl-C in a terminal does not reach it; it ends with the router
            )
        except BaseException:
            ours.close()
            self._grammar_socket.close()
            os.close(self._progress)
            raise
        finally:
            theirs.close()
            grammar_end.close()
            os.close(progress_end)
        self._stream = LoopStream(self._loop, ours, self._on_message, self._end)
        self._connection = connect(rpyc.VoidService(), self._stream, _CLIENT_CONFIG)
        self._grammars: FrameStream[Compiled] | None = None  # once the model is loaded
        self._remote: dict[str, Any] = {}
        self._answer: asyncio.Future[Any] | None = None
        self._lines = asyncio.StreamReader()  # its progress
        self._ended: asyncio.Future[None] = self._loop.create_future()  # the stream
        self._exited: asyncio.Future[None] = self._loop.create_future()  # the process
        self._died: WorkerDied | None = None
        self._kill_reason = ""
        self._watch: CallWatch | None = None  # once the model is loaded
        self._watchers: list[asyncio.Task[None]] = []
        self._loop.add_reader(self._progress, self._on_progress)
        self._cleanup = self._loop.create_task(self._clean_up())
        threading.Thread(target=self._reap, daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the worker can still answer."""
        return not self._ended.done() and not self._exited.done()

    async def start(self, config: EngineConfig, report: Report, rank: Rank | None = None) -> RunnerInfo:
        """Loads the model, without a time limit. `report` gets progress, a line at a time. `rank`: the worker's
        place in a group; None is a worker that runs the whole model.

        Kills the worker on failure. An error that `build_runner` raises becomes a WorkerFailed of that `kind`.
        """
        relay = self._loop.create_task(self._relay(report))
        try:
            await self._wait_for(self._connection.async_request, HANDLE_PING, b"")
            await self._look_up()
            info = await self._call("start", _INFO, WorkerStart(config, rank))
            reader, writer = await asyncio.open_unix_connection(sock=self._grammar_socket)
            self._grammars = FrameStream(reader, writer, Compiled)
            await relay  # until the worker has reported the end of its slow work
            default = CPU_STEP_SECONDS if info.device == "cpu" else GPU_STEP_SECONDS
            watch = self._watch = CallWatch(default if self._step_timeout is None else self._step_timeout)
            whiles = self._kill_when_overdue(watch), self._postpone_while_busy(watch)
            self._watchers = [self._loop.create_task(one) for one in whiles]
            return info
        except BaseException:
            self.kill()
            raise
        finally:
            relay.cancel()

    async def step(self, plan: StepPlan) -> StepResult | None:
        """Launches a plan. Returns the result of the plan before it, or None if that was returned already.

        A WorkerFailed is about the plan before it, too (its `step`); the given plan is in flight all the same.
        """
        return await self._call("step", _STEP, plan)

    async def flush(self) -> StepResult | None:
        """Returns the result of the last plan, or None if that was returned already."""
        return await self._call("flush", _STEP)

    async def capture(self) -> Captured:
        """Captures a CUDA graph that is missing, while the last plan runs. A WorkerFailed is fatal."""
        return await self._call("capture", _CAPTURED)

    async def check(self, edits: bytes, expected: ExpectedMemory) -> bytes:
        """Applies edits that no plan has carried yet, and recounts the memory. Returns a digest of a rank's
        tables, which is empty for a worker that is no rank. A WorkerFailed is fatal."""
        return await self._call("check", _CHECKED, (edits, expected))

    async def map(self, edits: bytes, holdings: Holdings) -> PoolMap:
        """Applies edits that no plan has carried yet, and returns what every slot is used for."""
        return await self._call("map", _MAPPED, (edits, holdings))

    def send_grammar(self, order: Compile | Forget) -> None:
        """Has the worker compile or forget a grammar, beside its steps. One that has ended gets nothing."""
        assert self._grammars is not None
        self._grammars.send(order)

    async def take_grammar(self) -> Compiled:
        """Returns the next answer to a Compile."""
        assert self._grammars is not None
        reason = ""
        try:
            answer = await self._grammars.receive()
        except BadFrame as error:
            answer, reason = None, f"it sent no answer about a grammar: {error}"
        if answer is None:  # as a rule the process has ended, and its end says how
            self.kill(reason)
            raise await self.wait_dead()
        return answer

    def kill(self, reason: str = "") -> None:
        """Kills the process, which has nothing to save. The WorkerDied that follows has the `reason`."""
        self._kill_reason = self._kill_reason or reason
        self._process.kill()

    async def wait_dead(self) -> WorkerDied:
        """Waits until the process has exited and its memory is free. Returns how it ended."""
        return await asyncio.shield(self._cleanup)

    async def _look_up(self) -> None:
        """Looks up the remote methods once, because each look-up takes as long as a call. The worker is
        serving by now, so this blocks the event loop only briefly."""
        try:
            root = self._connection.root
            self._remote = {verb: rpyc.async_(getattr(root, verb)) for verb in _VERBS}
        except TimeoutError:
            self.kill(f"it did not list its methods within {_LOOK_UP_SECONDS:g} s")
            raise await self.wait_dead() from None
        except (EOFError, OSError):
            self.kill()
            raise await self.wait_dead() from None

    async def _call(
        self, verb: str, decoder: "msgspec.msgpack.Decoder[Done[Result] | WorkerError]", *request: Any
    ) -> Result:
        """Returns the worker's answer to the method `verb`. `request`: its argument, or nothing.

        A worker whose answer is not a valid message is killed.
        """
        answer = await self._wait_for(self._remote.get(verb), *map(_encode, request))
        try:
            # Anything but exactly bytes may be a live reference to an object of the worker.
            decoded = decode(decoder, answer if type(answer) is bytes else b"")
        except BadFrame:
            self.kill(f"its answer to {verb} is not a valid message")
            raise await self.wait_dead() from None
        if isinstance(decoded, WorkerError):
            raise WorkerFailed(decoded)
        return decoded.result

    async def _wait_for(self, send: Any, *request: Any) -> Any:
        """Returns the result of `send(*request)`, an rpyc request that does not block."""
        if self._died is not None:
            raise self._died
        answer = self._answer = self._loop.create_future()
        try:
            if self.alive:  # otherwise `_clean_up` sets the answer to WorkerDied
                with suppress(EOFError):  # the stream reports its end by itself
                    send(*request).add_callback(partial(_resolve, answer))
                if self._watch is not None:
                    self._watch.begin()
            return await answer
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            self._answer = None
            if self._watch is not None:
                self._watch.end()

    async def _kill_when_overdue(self, watch: CallWatch) -> None:
        while not watch.look():
            await asyncio.sleep(watch.tick_seconds)
        self.kill(f"a call took more than {watch.allowed:g} s (--step-timeout is {watch.limit:g})")

    async def _postpone_while_busy(self, watch: CallWatch) -> None:
        """Allows calls more time while the worker reports that it compiles something."""
        async for line in self._lines:
            watch.postpone(COMPILE_SECONDS if line.strip() else None)

    def _on_message(self) -> None:
        try:
            self._connection.serve(0)
        except Exception:  # the bytes are not a message of rpyc
            self.kill("it sent bytes that are not an rpyc message")

    def _on_progress(self) -> None:
        if data := os.read(self._progress, 1 << 16):
            self._lines.feed_data(data)
        else:
            self._loop.remove_reader(self._progress)
            self._lines.feed_eof()

    def _end(self) -> None:
        """Notes the end of the stream; `_clean_up` does the rest."""
        if not self._ended.done():
            self._ended.set_result(None)

    async def _clean_up(self) -> WorkerDied:
        """Waits until the stream or the process has ended, ends the other, and closes everything."""
        try:
            await asyncio.wait((self._ended, self._exited), return_when=asyncio.FIRST_COMPLETED)
            self.kill()  # without its stream the worker cannot be used
            await asyncio.wait((self._exited,), timeout=_REAP_SECONDS)
        finally:
            self.kill()  # also if the event loop is closed
            self._end()
            self._close()
        await asyncio.wait((self._exited,))
        self._died = WorkerDied(self._process.returncode, self._kill_reason)
        return self._died

    def _close(self) -> None:
        self._died = WorkerDied(self._process.poll(), self._kill_reason)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(self._died)
        for task in self._watchers:
            task.cancel()
        self._stream.close()  # before the connection, which would wait for the peer's goodbye
        self._connection.close()
        if self._grammars is not None:
            self._grammars.close()
        else:
            self._grammar_socket.close()
        self._loop.remove_reader(self._progress)
        os.close(self._progress)
        self._lines.feed_eof()

    def _reap(self) -> None:
        """Waits for the process to exit, in its own thread, which works with every event loop."""
        self._process.wait()
        with suppress(RuntimeError):  # the event loop may be closed
            self._loop.call_soon_threadsafe(self._exited.set_result, None)

    async def _relay(self, report: Report) -> None:
        """Passes on lines of progress until an empty line or the end of the worker."""
        async for line in self._lines:
            text = line.decode().rstrip("\n")
            if not text:
                return
            report(text)


def _resolve(answer: "asyncio.Future[Any]", result: rpyc.AsyncResult) -> None:
    if answer.done():  # cancelled
        return
    # The worker's methods never raise, so an exception that rpyc carried is not a valid answer.
    answer.set_result(None if result.error else result.value)


_VERBS = ("start", "step", "flush", "capture", "check", "map")
_INFO = msgspec.msgpack.Decoder(Done[RunnerInfo] | WorkerError)
_STEP = msgspec.msgpack.Decoder(Done[StepResult | None] | WorkerError)
_CAPTURED = msgspec.msgpack.Decoder(Done[Captured] | WorkerError)
_CHECKED = msgspec.msgpack.Decoder(Done[bytes] | WorkerError)
_MAPPED = msgspec.msgpack.Decoder(Done[PoolMap] | WorkerError)
