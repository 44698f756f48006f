"""The worker: the process that holds the device. Carries out step plans that come as bytes, answers in bytes.

Started by `worker_client.py` alone, which hands it one end of a socket pair: there is no file and no port to
find it by, and the end of the one process is seen by the other as the end of the stream. It serves rpyc there,
with nothing of rpyc but calls of five methods that take bytes and return bytes (msgspec's; nothing is
pickled). Knows no request and no text. Steps overlap by one: a plan is launched before the result of the plan
before it is waited for, so a GPU always has its next step queued.

torch is imported when the model is asked for, so that a worker whose router has died ends at once before, too.
"""

import argparse
import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import msgspec
import rpyc
from rpyc.core.stream import Stream

from lightkv.errors import LightKVError
from lightkv.router.config import EngineConfig
from lightkv.router.engine.step import ExpectedMemory, PoolMap, RunnerInfo, SlotOwners, StepPlan, StepResult

from .child_process import ignore_signals
from .messages import Done, WorkerError

if TYPE_CHECKING:
    from lightkv.router.model.runner import ModelRunner

Request = TypeVar("Request")

# Attributes: exposed methods by name, and nothing else. A default that rpyc takes from the environment
# (bind_threads) or that may change is written out, so that this is all of it.
RPYC_CONFIG: dict[str, Any] = {
    "allow_getattr": True,
    "allow_exposed_attrs": True,
    "allow_safe_attrs": False,
    "allow_public_attrs": False,
    "allow_all_attrs": False,
    "allow_setattr": False,
    "allow_delattr": False,
    "allow_pickle": False,
    "safe_attrs": frozenset(),
    "import_custom_exceptions": False,
    "instantiate_custom_exceptions": False,
    "instantiate_oldstyle_exceptions": False,
    "include_local_traceback": False,
    "include_local_version": False,
    "propagate_KeyboardInterrupt_locally": True,
    "propagate_SystemExit_locally": True,
    "close_catchall": True,
    "bind_threads": False,
    "sync_request_timeout": None,  # weights may take minutes; the process is watched instead
}

_LOST = "the worker has lost its memory or its device; start another"
_logger = logging.getLogger("lightkv.worker")
_encode = msgspec.msgpack.encode


class BadRequest(LightKVError):
    """A request that is no message, or that comes at the wrong time. Nothing was done."""


class StepSkipped(LightKVError):
    """A step that was not computed, since the one before it had failed."""

    def __init__(self, failed: WorkerError) -> None:
        super().__init__(f"not computed, since step {failed.step} failed: {failed.kind}: {failed.message}")


def connect(root: rpyc.Service, stream: Stream, config: dict[str, Any]) -> rpyc.Connection:
    """rpyc over one end of a socket pair. Compression, on by default, costs ten times the copy."""
    return rpyc.Connection(root, rpyc.Channel(stream, compress=False), config)


class StepPipeline:
    """Runs plans in order, one behind the other: each call answers for the step before.

    A step that fails is answered for in its turn. The step behind it, planned in ignorance, is not computed:
    its edits are applied, unless the failure was fatal, and it fails too. `launched` is called when a plan has
    been launched, before the result of another is waited for.
    """

    def __init__(self, runner: "ModelRunner", launched: Callable[[], None] = lambda: None) -> None:
        self._runner = runner
        self._launched = launched
        self._last: int | WorkerError | None = None  # the step not answered for: its number, or its failure

    def step(self, plan: StepPlan) -> Done[StepResult | None] | WorkerError:
        """Launch a plan, then answer for the step before; None where there is none."""
        launched = self._launch(plan)
        self._launched()
        answer = self.flush()
        self._last = launched
        return answer

    def flush(self) -> Done[StepResult | None] | WorkerError:
        """Answer for the last step; None where that was done."""
        last, self._last = self._last, None
        if last is None:
            return Done(None)
        if isinstance(last, WorkerError):
            return last
        try:
            return Done(self._runner.collect())
        except Exception as error:
            return failure(error, self._runner.fatal, last)

    def _launch(self, plan: StepPlan) -> int | WorkerError:
        failed = self._last if isinstance(self._last, WorkerError) else None
        try:
            if self._runner.fatal:
                raise BadRequest(_LOST)
            if failed is None:
                self._runner.launch(plan)
                return plan.step
            self._runner.skip(plan)
            raise StepSkipped(failed)
        except Exception as error:
            return failure(error, self._runner.fatal, plan.step)


class SlowWork:
    """Tells the router what keeps this process: a line for each slow part of a call, then an empty one."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_announced = False

    def announce(self, line: str) -> None:
        """Something begins that may take long."""
        self._is_announced = True
        print(line, file=self._out)

    def finish(self) -> None:
        """What was announced is over."""
        if self._is_announced:
            self._is_announced = False
            print(file=self._out)


class Worker(rpyc.Service):
    """What the router can call: bytes in, and the bytes of a `Done` or a `WorkerError` out, never an exception.

    `progress` takes lines of text while the model loads, and whenever a step has to compile or capture
    something; an empty line ends them.
    """

    def __init__(self, progress: TextIO) -> None:
        self._slow_work = SlowWork(progress)
        self._runner: ModelRunner | None = None
        self._pipeline: StepPipeline | None = None

    def exposed_start(self, request: bytes) -> bytes:
        """`WorkerStart` → `RunnerInfo`: load the model, once."""
        self._slow_work.announce("importing torch")
        return self._answer(_START, request, self._start)

    def exposed_step(self, request: bytes) -> bytes:
        """`StepPlan` → the `StepResult` of the plan before it; None for the first, and after a flush."""
        return self._answer(_PLAN, request, lambda plan: self._started()[1].step(plan))

    def exposed_flush(self) -> bytes:
        """→ the `StepResult` of the last plan; None if it was returned already."""
        return self._answer(_NOTHING, b"\xc0", lambda _: self._started()[1].flush())

    def exposed_check(self, request: bytes) -> bytes:
        """(edits, `ExpectedMemory`) → None: apply the edits and recount. A failure is fatal."""
        return self._answer(_CHECK, request, self._check)

    def exposed_map(self, request: bytes) -> bytes:
        """(edits, `SlotOwners`) → `PoolMap`: apply the edits, and tell what every slot is used for."""
        return self._answer(_MAP, request, self._map)

    def _start(self, config: EngineConfig) -> Done[RunnerInfo]:
        if self._runner is not None:
            raise BadRequest("this worker has its model; start another for another one")

        import torch

        from lightkv.router.model.build import build_runner, pick_device

        device = pick_device(config.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # kernels are launched there, wherever their tensors are
        runner, info = build_runner(config, self._slow_work.announce)
        runner.announce(self._slow_work.announce)
        _announce_compilation(self._slow_work.announce)
        self._runner, self._pipeline = runner, StepPipeline(runner, self._slow_work.finish)
        return Done(info)

    def _check(self, request: tuple[bytes, ExpectedMemory]) -> Done[None]:
        self._started()[0].check(*request)
        return Done(None)

    def _map(self, request: tuple[bytes, SlotOwners]) -> Done[PoolMap]:
        runner = self._started()[0]
        if runner.fatal:
            raise BadRequest(_LOST)
        return Done(runner.map(*request))

    def _started(self) -> "tuple[ModelRunner, StepPipeline]":
        if self._runner is None or self._pipeline is None:
            raise BadRequest("no model yet; call start first")
        return self._runner, self._pipeline

    def _answer(
        self,
        decoder: "msgspec.msgpack.Decoder[Request]",
        request: bytes,
        verb: "Callable[[Request], Done[Any] | WorkerError]",
    ) -> bytes:
        try:
            return _encode(verb(_decode(decoder, request)))
        except Exception as error:
            return _encode(failure(error, self._runner is not None and self._runner.fatal))
        finally:
            self._slow_work.finish()


def _announce_compilation(announce: Callable[[str], None]) -> None:
    """Have Triton tell when it compiles a kernel that no cache holds, unless something else listens there."""
    try:
        from triton import knobs
    except ImportError:  # torch runs without it on a CPU
        return

    def hook(*, fn: Any, **_: Any) -> None:
        announce(f"compiling {fn.name}")

    if knobs.runtime.jit_cache_hook is None:
        knobs.runtime.jit_cache_hook = hook


def _decode(decoder: "msgspec.msgpack.Decoder[Request]", request: bytes) -> Request:
    if type(request) is not bytes:  # what else rpyc passes may be a live reference to the caller's objects
        raise BadRequest(f"a request of {type(request).__name__}; give bytes")
    try:
        return decoder.decode(request)
    except (msgspec.DecodeError, ValueError) as error:
        raise BadRequest(f"a request of {len(request)} bytes that is no such message: {error}") from error


def failure(error: Exception, fatal: bool, step: int | None = None) -> WorkerError:
    """The error as the router is told it; one that nobody raised on purpose is logged with its traceback."""
    if not isinstance(error, LightKVError):
        _logger.error("step %s failed", step, exc_info=error)
    message = str(error).encode("utf-8", "replace").decode()  # half a surrogate pair cannot be encoded
    return WorkerError(type(error).__name__, message, fatal, step)


_START = msgspec.msgpack.Decoder(EngineConfig)
_PLAN = msgspec.msgpack.Decoder(StepPlan)
_CHECK = msgspec.msgpack.Decoder(tuple[bytes, ExpectedMemory])
_MAP = msgspec.msgpack.Decoder(tuple[bytes, SlotOwners])
_NOTHING = msgspec.msgpack.Decoder(None)


def exit_with_peer(connection: socket.socket) -> None:
    """Wait until the other end is closed, by its process's death if not otherwise; then end this process."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)  # and POLLHUP, which is always told; never data
    poll.poll()
    os._exit(0)  # whatever the main thread is computing: nobody is left to want it


def main() -> None:
    """Serve the router at the other end of an inherited socket until it goes."""
    parser = argparse.ArgumentParser(description="The process that holds the device. Started by the router.")
    parser.add_argument("--fd", type=int, required=True, help="the inherited end of a socket pair")
    parser.add_argument("--progress-fd", type=int, required=True, help="a pipe, for lines of progress")
    args = parser.parse_args()
    ignore_signals()  # it ends with the router
    for fd in (args.fd, args.progress_fd):
        os.set_inheritable(fd, False)  # a child of this process must not keep them open after it
    connection = socket.socket(fileno=args.fd)
    threading.Thread(target=exit_with_peer, args=(connection,), daemon=True).start()
    worker = Worker(os.fdopen(args.progress_fd, "w", buffering=1, encoding="utf-8"))
    connect(worker, rpyc.SocketStream(connection), RPYC_CONFIG).serve_all()
    os._exit(0)  # torch's threads and libraries are not waited for


if __name__ == "__main__":
    main()
