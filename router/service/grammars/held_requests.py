"""Holds requests outside the engine until the worker has compiled their grammars.

add ──► (the desk's orders to the worker) ──► Compiled ──► the request is queued in the engine
                                                    └──► or ends, with the reason
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Sequence

from lightkv.errors import LightKVError
from lightkv.router.engine.grammars.grammar_desk import Compile, Compiled, GrammarDesk
from lightkv.router.engine.loop import Engine
from lightkv.router.engine.request import Request
from lightkv.router.service.messages import Submit
from lightkv.router.service.ranks.worker_group import Worker
from lightkv.router.service.worker_client import WorkerDied, WorkerFailed

COMPILE_SECONDS = 60.0  # after which a worker that compiles a grammar is killed
# How a process ends whose stack overflows, or that native code aborts.
_CRASHES = frozenset((-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT))
_logger = logging.getLogger("lightkv.router")


class HeldRequests:
    """The requests of one router that wait for a grammar, and the grammars that all its requests hold.

    `wake`: is called when the engine has got a request. `fail`: ends a request whose grammar cannot be used, by
    its id, with the reason.
    """

    def __init__(self, wake: Callable[[], None], fail: Callable[[str, str], None]) -> None:
        self._wake = wake
        self._fail = fail
        self._desk = GrammarDesk()
        self._held: dict[str, Request] = {}
        self._worker: Worker | None = None
        self._serving: asyncio.Task[None] | None = None
        self._asked = 0.0  # when the last Compile was sent to the worker
        self._is_overdue = False  # was the worker killed because it compiled for too long?

    def __len__(self) -> int:
        return len(self._held)

    def begin(self, worker: Worker, engine: Engine) -> None:
        """Notes the worker that compiles from now on, and the engine that gets the requests."""
        self._worker = worker
        self._is_overdue = False
        self._serving = asyncio.create_task(self._serve(worker, engine))

    def lose_worker(self, error: WorkerDied | WorkerFailed) -> bool:
        """Forgets all requests, whose worker has ended with `error`. Returns whether a grammar is to blame, and
        is refused from now on: the worker was compiling it, and crashed in native code or took too long.

        A failed step, a step that took too long and the kernel's need of memory are no grammar's fault.
        """
        if self._serving is not None:
            self._serving.cancel()
        self._worker = self._serving = None
        self._held.clear()
        has_crashed = isinstance(error, WorkerDied) and error.returncode in _CRASHES
        return self._desk.lose_device(has_crashed or self._is_overdue)

    def add(self, engine: Engine, requests: Sequence[Request], submit: Submit) -> None:
        """Queues the requests of a submission in the engine once its grammar is ready.

        Raises as `Request.validate` does, also for a grammar that is refused, and TooManyGrammars; nothing is
        held then.
        """
        grammar = submit.params.grammar
        if grammar is None:
            raise ValueError("the submission has no grammar; add its requests to the engine")
        scheduler, now = engine.scheduler, time.monotonic()
        for request in requests:
            request.validate(scheduler.limits, scheduler.ledger.capacity, scheduler.ledger.groups)
        names = [request.id for request in requests]
        grammar_id = self._desk.hold(names, grammar, submit.grammar_bytes, submit.grammar_owner)
        for request in requests:
            request.queued, request.grammar = now, grammar_id
        if self._desk.is_ready(grammar_id):
            engine.add(*requests)
        else:
            self._held.update((request.id, request) for request in requests)
        self.send_orders()

    def end(self, name: str, is_spoilt: bool = False) -> None:
        """Notes that a request has ended, or was aborted. `is_spoilt`: its text could not go on."""
        self._held.pop(name, None)
        self._desk.release(name, is_spoilt)

    def send_orders(self) -> None:
        """Sends the worker what it is to compile and to forget. To be called from time to time."""
        if self._worker is None:
            return
        for order in self._desk.orders():
            if isinstance(order, Compile):
                self._asked = time.monotonic()
            self._worker.send_grammar(order)

    def check(self) -> None:
        """Recounts the grammars. Raises CheckFailed."""
        self._desk.check()

    async def _serve(self, worker: Worker, engine: Engine) -> None:
        """Takes the worker's answers until it dies. A worker whose answers cannot be taken is killed, since no
        grammar would be compiled any more."""
        taking = asyncio.create_task(worker.take_grammar())
        try:
            while True:
                done, _ = await asyncio.wait((taking,), timeout=COMPILE_SECONDS)
                if done:
                    self._take(taking.result(), engine)
                    taking = asyncio.create_task(worker.take_grammar())
                elif self._desk.is_compiling and time.monotonic() - self._asked > COMPILE_SECONDS:
                    self._is_overdue = True
                    worker.kill(f"a grammar took more than {COMPILE_SECONDS:g} s to compile")
        except WorkerDied:
            return
        except Exception as error:
            _logger.exception("the worker's answers about grammars cannot be taken any more")
            worker.kill(f"its answer about a grammar could not be taken ({type(error).__name__}: {error})")
        finally:
            taking.cancel()

    def _take(self, answer: Compiled, engine: Engine) -> None:
        """Queues the requests that waited for a grammar in the engine, or ends them."""
        for name in self._desk.take(answer):
            request = self._held.pop(name)
            if answer.error:
                self._fail(name, answer.error)
                continue
            try:
                engine.add(request)
            except LightKVError as error:  # the engine is dead
                self._fail(name, str(error))
        self._wake()
        self.send_orders()
