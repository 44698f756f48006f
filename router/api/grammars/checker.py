"""Checks grammars of requests before they are queued, in a process beside this one (`check_process.py`).

One grammar is checked at a time. Each client's grammars wait in their own line, and the lines take turns. At
most MAX_WAITING wait in all. Answers are kept by the grammars' hashes.
"""

import asyncio
import hashlib
import logging
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from lightkv.router.engine.grammars.fair_queue import FairQueue
from lightkv.router.sampling_params import Grammar
from lightkv.router.service.child_process import command
from lightkv.router.service.messages import BadFrame, FrameStream
from lightkv.router.service.router_client import RequestRefused
from lightkv.router.text.grammars import InvalidGrammar

from .check_process import WALL_SECONDS, Checked

MAX_WAITING = 128
MAX_KNOWN = 4096  # grammars whose answers are kept
START_SECONDS = 60.0  # to read the tokenizer
ANSWER_SECONDS = WALL_SECONDS + 5.0  # after which the process is started anew
_logger = logging.getLogger("lightkv.api")
_ATTEMPTS = 2  # a child may be killed by another's need of memory


class _NoAnswer(Exception):
    """It is not known whether a grammar can be used: another time it may be."""


class _Waiting:
    """A grammar that is to be checked. `num`: the requests that wait for it. `owner`: whose line it is in."""

    def __init__(self, digest: bytes, grammar: Grammar, owner: bytes) -> None:
        self.digest = digest
        self.grammar = grammar
        self.owner = owner
        self.num = 0
        self.answer: asyncio.Future[Checked] = asyncio.get_running_loop().create_future()

    def refuse(self, error: RequestRefused) -> None:
        self.answer.set_exception(error)
        self.answer.exception()  # its clients may all have hung up


class GrammarChecker:
    """The process that checks grammars, which starts with the first of them, and its latest answers.

    directory: that of the model. vocab_size: returns the width of its logits, once the service is ready.
    """

    def __init__(self, directory: Path, vocab_size: Callable[[], int]) -> None:
        self._process = _CheckProcess(directory, vocab_size)
        self._queue = FairQueue[_Waiting](MAX_WAITING)
        self._working: asyncio.Task[None] | None = None
        self._known: OrderedDict[bytes, Checked] = OrderedDict()
        self._waiting: dict[bytes, _Waiting] = {}  # those that are being checked included

    async def check(self, grammar: Grammar, field: str, owner: bytes = b"") -> int:
        """Returns the bytes that the grammar takes when it is compiled, once it is known to compile fast.

        `owner`: what stands for the client. Raises InvalidGrammar, which names `field`, and
        RequestRefused if too many wait or the check failed. A cancelled check leaves the queue.
        """
        digest = hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()
        known = self._known.get(digest)
        if known is None:
            one = self._waiting.get(digest) or self._begin(digest, grammar, owner)
            self._queue.share(one, owner)
            known = await self._wait(one)
        else:
            self._known.move_to_end(digest)
        if known.wrong:
            raise InvalidGrammar(field, known.wrong)
        return known.num_bytes

    async def close(self) -> None:
        """Ends the process, and waits for its end. What waits is refused. A later check starts another one."""
        while (one := self._queue.pop()) is not None:
            self._forget(one)
            one.refuse(_closing())
        working, self._working = self._working, None
        if working is not None:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        await self._process.close()

    async def _wait(self, one: _Waiting) -> Checked:
        one.num += 1
        try:
            return await asyncio.shield(one.answer)
        finally:
            one.num -= 1
            if not one.num and self._queue.remove(one):
                self._forget(one)

    def _begin(self, digest: bytes, grammar: Grammar, owner: bytes) -> _Waiting:
        one = self._waiting[digest] = _Waiting(digest, grammar, owner)
        left = self._queue.push(one)
        if left is not None:
            self._forget(left)
            text = f"{MAX_WAITING} grammars wait to be checked, which is the limit; try again in a moment"
            left.refuse(RequestRefused("queue_full", text))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return one

    def _forget(self, one: _Waiting) -> None:
        if self._waiting.get(one.digest) is one:
            del self._waiting[one.digest]

    async def _work(self) -> None:
        """Checks the grammars of the queue, one after the other, until it is empty."""
        try:
            while (one := self._queue.pop()) is not None:
                await self._answer(one)
        finally:
            if self._working is asyncio.current_task():
                self._working = None

    async def _answer(self, one: _Waiting) -> None:
        try:
            known = await self._ask(one.grammar)
        except _NoAnswer as error:
            text = f"the grammar could not be checked ({error}); try again in a moment"
            one.refuse(RequestRefused("unavailable", text))
        except RequestRefused as error:  # the service is not ready
            one.refuse(error)
        except asyncio.CancelledError:
            one.refuse(_closing())
            raise
        except Exception as error:  # those that wait behind it are checked all the same
            _logger.exception("a grammar was not checked")
            text = f"the grammar could not be checked ({type(error).__name__}); try again in a moment"
            one.refuse(RequestRefused("unavailable", text))
        else:
            one.answer.set_result(known)
            self._known[one.digest] = known
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        finally:
            self._forget(one)

    async def _ask(self, grammar: Grammar) -> Checked:
        """Raises _NoAnswer."""
        failed = ""
        for _ in range(_ATTEMPTS):
            try:
                answer = await self._process.ask(grammar)
            except _NoAnswer as error:
                failed = str(error)
                continue
            if not answer.failed:
                return answer
            failed = answer.failed
        raise _NoAnswer(failed)


def _closing() -> RequestRefused:
    return RequestRefused("unavailable", "the service is shutting down")


class _CheckProcess:
    """The process, which is asked about one grammar at a time."""

    def __init__(self, directory: Path, vocab_size: Callable[[], int]) -> None:
        self._directory = directory
        self._vocab_size = vocab_size
        self._process: Process | None = None
        self._frames: FrameStream[Checked] | None = None  # to and from the process, once it has started

    async def ask(self, grammar: Grammar) -> Checked:
        """Returns the answer about a grammar. A process without an answer is ended. Raises _NoAnswer."""
        frames = await self._started()
        try:
            frames.send(grammar)
            if (answer := await asyncio.wait_for(frames.receive(), ANSWER_SECONDS)) is not None:
                return answer
        except (TimeoutError, OSError, BadFrame) as error:
            await self.close()
            raise _NoAnswer(f"its process gave no answer within {ANSWER_SECONDS:g} s") from error
        await self.close()
        raise _NoAnswer("its process has ended")

    async def close(self) -> None:
        """Ends the process, and waits for its end."""
        process, self._process, self._frames = self._process, None, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _started(self) -> FrameStream[Checked]:
        if self._process is not None and self._frames is not None and self._process.returncode is None:
            return self._frames
        await self.close()
        arguments = (str(self._directory), str(self._vocab_size()))
        try:
            process = await asyncio.create_subprocess_exec(
                *command("api.grammars.check_process", *arguments), stdin=PIPE, stdout=PIPE
            )
        except OSError as error:
            raise _NoAnswer(f"its process did not start: {error.strerror}") from error
        assert process.stdout is not None
        assert process.stdin is not None
        frames = FrameStream[Checked](process.stdout, process.stdin, Checked)
        self._process = process
        begun = None
        with suppress(TimeoutError):
            begun = await asyncio.wait_for(frames.receive(), START_SECONDS)
        if begun is None:
            await self.close()
            raise _NoAnswer("its process did not start")
        self._frames = frames
        return frames
