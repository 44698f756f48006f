"""Checks grammars of requests before they are queued, in a process of its own.

A compilation cannot be stopped once it runs, and a grammar that is made to take long would hold a thread for
minutes. So a child process compiles each grammar first, and is killed if it does not answer in time. It uses a
tokenizer of single bytes, with which a grammar takes about as long as with the model's.
"""

import asyncio
import os
import resource
import select
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from contextlib import suppress

import msgspec
from llguidance import LLTokenizer

from lightkv.router.sampling_params import Grammar
from lightkv.router.service.child_process import command, ignore_signals
from lightkv.router.text.grammars import InvalidGrammar, compile_grammar, reason_of

MAX_WORK_SECONDS = 0.1  # of the processor, to compile a grammar and to follow a short text of it
DEADLINE_SECONDS = 0.8  # after which the child process is killed
START_SECONDS = 20.0
MAX_SHORT = 4096  # characters of a grammar that does not wait for longer ones
_WALK_BYTES = 48  # the length of that text
_MAX_KNOWN = 256  # grammars whose answers are kept
_MEMORY_BYTES = 2 << 30
_LENGTH_BYTES = 4


class _NoAnswer(Exception):
    """The child process gave none, which may be for want of time or memory: another time it may."""


class GrammarChecker:
    """The child processes that check grammars, each of which starts with the first of them, and their latest
    answers. Short grammars do not wait for long ones, which are those that take long."""

    def __init__(self) -> None:
        self._children = _Child(), _Child()
        self._known: OrderedDict[Grammar, str] = OrderedDict()  # grammar → what is wrong, or nothing

    async def check(self, grammar: Grammar, field: str) -> None:
        """Returns once the grammar is known to compile fast. Raises InvalidGrammar, which names `field`."""
        wrong = self._known.get(grammar)
        if wrong is None:
            child = self._children[len(grammar.text) > MAX_SHORT]
            async with child.turn:
                wrong = self._known.get(grammar)
                if wrong is None:
                    try:
                        wrong = await child.ask(grammar)
                    except _NoAnswer as error:
                        raise InvalidGrammar(field, str(error)) from error
            self._known[grammar] = wrong
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        if wrong:
            raise InvalidGrammar(field, wrong)

    async def close(self) -> None:
        """Ends the child processes, and waits for their end. A later check starts another one."""
        for child in self._children:
            await child.close()


class _Child:
    """One child process. `turn`: is held by the one check that it makes."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self._child: Process | None = None

    async def close(self) -> None:
        """Ends the child process, and waits for its end. A later check starts another one."""
        child, self._child = self._child, None
        if child is not None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def ask(self, grammar: Grammar) -> str:
        """Returns what is wrong with a grammar, or an empty text. Raises _NoAnswer."""
        try:
            if self._child is None:
                self._child = await asyncio.create_subprocess_exec(
                    *command("api.grammar_checker"), stdin=PIPE, stdout=PIPE
                )
                await asyncio.wait_for(self._answer(self._child), START_SECONDS)
            assert self._child.stdin is not None
            content = msgspec.msgpack.encode(grammar)
            self._child.stdin.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)
            return await asyncio.wait_for(self._answer(self._child), DEADLINE_SECONDS)
        except TimeoutError as error:
            await self.close()
            raise _NoAnswer(f"it takes more than {DEADLINE_SECONDS} s to compile; simplify it") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            await self.close()
            raise _NoAnswer("its compilation failed, or took too much memory; simplify it") from error
        except BaseException:  # the request was cancelled, and the child would answer the next one
            await self.close()
            raise

    async def _answer(self, child: Process) -> str:
        assert child.stdout is not None
        size = int.from_bytes(await child.stdout.readexactly(_LENGTH_BYTES), "little")
        return (await child.stdout.readexactly(size)).decode()


def what_is_wrong(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    """Returns why a grammar is refused, or an empty text. It follows one text of the grammar for a while, since
    some limits are met there only."""
    begun = time.thread_time()
    try:
        matcher = compile_grammar(grammar, tokenizer)
    except InvalidGrammar as error:
        return error.reason
    for _ in range(_WALK_BYTES):
        if matcher.is_stopped() or time.thread_time() - begun > MAX_WORK_SECONDS:
            break
        allowed = matcher.compute_bitmask()
        word = next((i for i, bits in enumerate(allowed) if bits), None)
        if matcher.is_error() or word is None:
            break
        token = 8 * word + (allowed[word] & -allowed[word]).bit_length() - 1
        if token in tokenizer.eos_tokens or not matcher.consume_token(token):
            break
    taken = time.thread_time() - begun
    if taken > MAX_WORK_SECONDS:
        return f"it takes {taken:.2f} s to compile, and at most {MAX_WORK_SECONDS} s are allowed; simplify it"
    return reason_of(matcher.get_error()) if matcher.is_error() else ""


def main() -> None:
    """Answers one grammar after the other, from standard input to standard output, until the input ends."""
    ignore_signals()  # this process ends with the API process
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    tokenizer = LLTokenizer("byte")
    _write("")
    while size := sys.stdin.buffer.read(_LENGTH_BYTES):
        content = sys.stdin.buffer.read(int.from_bytes(size, "little"))
        _write(what_is_wrong(msgspec.msgpack.decode(content, type=Grammar), tokenizer))


def _exit_with_parent() -> None:
    """Waits until the other end of standard input is closed, then ends this process, even while it compiles."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), 0)  # POLLHUP is always reported
    poll.poll()
    os._exit(0)


def _write(text: str) -> None:
    content = text.encode("utf-8", "replace")
    sys.stdout.buffer.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
