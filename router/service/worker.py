"""The worker process, which owns the device and runs the steps that the router plans.

`worker_client.py` starts it with one end of a socket pair, so there is no file and no port to connect to, and
each process sees the end of the other as the end of the stream. rpyc serves calls of six methods there, which
take bytes and return bytes, encoded by msgspec; nothing is pickled. Steps overlap by one: a plan is launched
before the worker waits for the result of the plan before it, so a GPU always has its next step queued.

torch is imported when the model is loaded, so that a worker whose router dies before that ends at once.
"""

import logging
import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import msgspec
import rpyc
from rpyc.core.stream import Stream

from lightkv.errors import LightKVError
from lightkv.holdings import Holdings
from lightkv.router.engine.step import ExpectedMemory, PoolMap, RunnerInfo, StepPlan, StepResult
from lightkv.router.service.grammars.server import GrammarServer

from .child_process import end_with_parent, freeze_objects, ignore_signals
from .log_stream import drain_log, write_in_background
from .messages import BadFrame, Done, WorkerError, WorkerStart, decode

if TYPE_CHECKING:
    from lightkv.router.model.runner import ModelRunner

Request = TypeVar("Request")

# rpyc may look up exposed methods by name, and nothing else. Defaults that rpyc reads from the environment
# (bind_threads) or may change are written out, so that the configuration is complete.
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
    "sync_request_timeout": None,  # loading weights may take minutes; the process is watched instead
}

_LOG_SECONDS = 0.5  # for a traceback to be written, because the router may kill a worker that failed
_LOST = "the worker has lost its memory or its device; start another worker"
_logger = logging.getLogger("lightkv.worker")
_encode = msgspec.msgpack.encode


class BadRequest(LightKVError):
    """A call whose argument is not a valid message, or which comes at the wrong time. Nothing was done."""


class StepSkipped(LightKVError):
    """A step that was not computed, because the step before it had failed."""

    def __init__(self, failed: WorkerError) -> None:
        super().__init__(f"not computed, because step {failed.step} failed: {failed.kind}: {failed.message}")


def connect(root: rpyc.Service, stream: Stream, config: dict[str, Any]) -> rpyc.Connection:
    """Returns an rpyc connection over one end of a socket pair, without compression, which is on by default and
    takes ten times as long as the copy."""
    return rpyc.Connection(root, rpyc.Channel(stream, compress=False), config)


class StepPipeline:
    """Runs plans in order. Each call launches a plan and returns the result of the plan before it.

    A failed step is reported in place of its result. The next step was planned before the failure was known, so
    it is not computed and fails, too; its edits are applied, unless the failure was fatal. `launched` is called
    after a plan was launched, before the pipeline waits for the result of another.

    `is_rank`: whether other ranks run the same plans. They wait for a rank that has failed, and what is added
    up later would be of different layers. So its failure is fatal, and the call that launches it reports it.
    """

    def __init__(
        self, runner: "ModelRunner", launched: Callable[[], None] = lambda: None, is_rank: bool = False
    ) -> None:
        self._runner = runner
        self._launched = launched
        self._is_rank = is_rank
        self._last: int | WorkerError | None = None  # the step in flight: its number, or its failure

    def step(self, plan: StepPlan) -> Done[StepResult | None] | WorkerError:
        """Launches a plan, then returns the result of the step before it; None if there is none."""
        launched = self._launch(plan)
        self._launched()
        if self._is_rank and isinstance(launched, WorkerError):
            return launched
        answer = self.flush()
        self._last = launched
        return answer

    def flush(self) -> Done[StepResult | None] | WorkerError:
        """Returns the result of the last step; None if it was returned already."""
        last, self._last = self._last, None
        if last is None:
            return Done(None)
        if isinstance(last, WorkerError):
            return last
        try:
            return Done(self._runner.collect())
        except Exception as error:
            return failure(error, self._runner.fatal or self._is_rank, last)

    def _launch(self, plan: StepPlan) -> int | WorkerError:
        failed = self._last if isinstance(self._last, WorkerError) else None
        try:
            if self._runner.fatal:
                raise BadRequest(_LOST)
            if failed is None:
                self._runner.launch(plan)
                if self._is_rank and (error := self._runner.newest_error) is not None:
                    raise error
                return plan.step
            self._runner.skip(plan)
            raise StepSkipped(failed)
        except Exception as error:
            return failure(error, self._runner.fatal or self._is_rank, plan.step)


class SlowWork:
    """Reports slow work to the router: a line for each slow part of a call, then an empty line."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_announced = False

    def announce(self, line: str) -> None:
        """Reports the begin of work that may take long."""
        self._is_announced = True
        print(line, file=self._out)

    def finish(self) -> None:
        """Reports the end of the announced work."""
        if self._is_announced:
            self._is_announced = False
            print(file=self._out)


class Worker(rpyc.Service):
    """The methods that the router can call. They return the bytes of a `Done` or a `WorkerError`, and never
    raise.

    `progress` gets lines of text while the model loads, and whenever a step has to compile something; an empty
    line ends them. `grammars`: the router's orders to compile grammars come over it; None
    is a worker that compiles none.
    """

    def __init__(self, progress: TextIO, grammars: socket.socket | None = None) -> None:
        self._slow_work = SlowWork(progress)
        self._grammars = grammars
        self._runner: ModelRunner | None = None
        self._pipeline: StepPipeline | None = None
        self._is_rank = False

    def exposed_start(self, request: bytes) -> bytes:
        """`WorkerStart` → `RunnerInfo`: loads the model. Called once."""
        self._slow_work.announce("importing torch")
        return self._answer(_START, request, self._start)

    def exposed_step(self, request: bytes) -> bytes:
        """`StepPlan` → the `StepResult` of the plan before it; None for the first plan and after a flush."""
        return self._answer(_PLAN, request, lambda plan: self._started()[1].step(plan))

    def exposed_flush(self) -> bytes:
        """→ the `StepResult` of the last plan; None if it was returned already."""
        return self._answer(_NOTHING, b"\xc0", lambda _: self._started()[1].flush())

    def exposed_capture(self) -> bytes:
        """→ `Captured`: captures a CUDA graph that is missing, while the last step runs. A failure is fatal."""
        return self._answer(_NOTHING, b"\xc0", lambda _: Done(self._started()[0].capture()))

    def exposed_check(self, request: bytes) -> bytes:
        """(edits, `ExpectedMemory`) → a digest of a rank's tables, empty without ranks: applies the edits and
        recounts the memory. A failure is fatal."""
        return self._answer(_CHECK, request, self._check)

    def exposed_map(self, request: bytes) -> bytes:
        """(edits, `Holdings`) → `PoolMap`: applies the edits and finds what every slot is used for."""
        return self._answer(_MAP, request, self._map)

    def _start(self, start: WorkerStart) -> Done[RunnerInfo]:
        import torch

        from lightkv.router.model.build import build_runner, join_ranks
        from lightkv.router.model.sizes import pick_device

        config, rank = start.config, start.rank
        ranks = None if rank is None else join_ranks(config, rank.number, rank.size, rank.store)
        device = pick_device(config.device) if ranks is None else ranks.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # kernels are launched on the current device, not on their tensors'
        runner, info = build_runner(config, self._slow_work.announce, ranks=ranks)
        runner.grammars.prepare()
        if self._grammars is not None:
            GrammarServer(self._grammars, runner.grammars).start()
        _announce_compilation(self._slow_work.announce)
        self._is_rank = rank is not None
        self._runner = runner
        self._pipeline = StepPipeline(runner, self._slow_work.finish, self._is_rank)
        freeze_objects()
        return Done(info)

    def _check(self, request: tuple[bytes, ExpectedMemory]) -> Done[bytes]:
        runner = self._started()[0]
        runner.check(*request)
        runner.grammars.trim()  # no request waits now
        return Done(runner.digest() if self._is_rank else b"")

    def _map(self, request: tuple[bytes, Holdings]) -> Done[PoolMap]:
        runner = self._started()[0]
        if runner.fatal:
            raise BadRequest(_LOST)
        return Done(runner.map(*request))

    def _started(self) -> "tuple[ModelRunner, StepPipeline]":
        if self._runner is None or self._pipeline is None:
            raise BadRequest("the model is not loaded; call start first")
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
    """Makes Triton report when it compiles a kernel that this process has not run yet.

    Triton's own hook, `jit_cache_hook`, fails for kernels that get functions as constants, as attention's do.
    """
    try:
        from triton import JITFunction
    except ImportError:  # torch runs without Triton on a CPU
        return

    compile_kernel = JITFunction._do_compile

    def announced(kernel: Any, *args: Any, **named: Any) -> Any:
        announce(f"compiling {kernel.fn.__name__}")
        return compile_kernel(kernel, *args, **named)

    if compile_kernel.__name__ != announced.__name__:  # else a worker in this process was announced to before
        JITFunction._do_compile = announced


def _decode(decoder: "msgspec.msgpack.Decoder[Request]", request: bytes) -> Request:
    if type(request) is not bytes:  # anything else from rpyc may be a live reference to the caller's objects
        raise BadRequest(f"a request of type {type(request).__name__}; give bytes")
    try:
        return decode(decoder, request)
    except BadFrame as error:
        raise BadRequest(f"a request is not a valid message: {error}") from error


def failure(error: Exception, fatal: bool, step: int | None = None) -> WorkerError:
    """Returns the error as a message for the router. Unexpected errors are logged with their traceback."""
    if not isinstance(error, LightKVError):
        _logger.error("step %s failed", step, exc_info=error)
        drain_log(_LOG_SECONDS)
    message = str(error).encode("utf-8", "replace").decode()  # half a surrogate pair cannot be encoded
    return WorkerError(type(error).__name__, message, fatal, step)


_START = msgspec.msgpack.Decoder(WorkerStart)
_PLAN = msgspec.msgpack.Decoder(StepPlan)
_CHECK = msgspec.msgpack.Decoder(tuple[bytes, ExpectedMemory])
_MAP = msgspec.msgpack.Decoder(tuple[bytes, Holdings])
_NOTHING = msgspec.msgpack.Decoder(None)


def exit_with_peer(connection: socket.socket) -> None:
    """Waits until the other end is closed, which also happens when its process dies, and then ends this
    process."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)  # POLLHUP is always reported, too; data is not
    poll.poll()
    os._exit(0)  # even if the main thread is computing, because the router cannot use the result any more


def main(make_worker: Callable[[TextIO, socket.socket], Worker] = Worker) -> None:
    """Serves the router at the other end of an inherited socket until the router ends.

    The command line has three inherited descriptors: of a socket for calls, of a pipe for lines of progress,
    and of a socket for orders of grammars.
    """
    calls_fd, progress_fd, grammar_fd = map(int, sys.argv[1:])
    end_with_parent()  # also while it is stopped, when `exit_with_peer` does nothing
    ignore_signals()
    write_in_background()
    for fd in (calls_fd, progress_fd, grammar_fd):
        os.set_inheritable(fd, False)  # a child of this process must not keep them open
    connection = socket.socket(fileno=calls_fd)
    threading.Thread(target=exit_with_peer, args=(connection,), daemon=True).start()
    progress = os.fdopen(progress_fd, "w", buffering=1, encoding="utf-8")
    worker = make_worker(progress, socket.socket(fileno=grammar_fd))
    connect(worker, rpyc.SocketStream(connection), RPYC_CONFIG).serve_all()
    os._exit(0)  # without waiting for torch's threads and libraries


if __name__ == "__main__":
    main()
