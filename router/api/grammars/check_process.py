"""The process that checks grammars. It compiles each as a worker would, in a child of its own that may die.

The process reads the model's tokenizer once. For each grammar it forks: the child compiles the grammar with the
worker's code, limits and tokens, but on a smaller stack, follows one text of it for a while, and answers. The
kernel ends a child that takes too long, needs too much memory, or nests too deeply for its stack. So whatever
passes fits in the worker, and no grammar makes this process read the tokenizer again.

    standard input   Grammar ──► fork ──► the child's Checked ──► standard output
                                  └── its death ──► this process's Checked ─┘

One grammar is checked at a time, so the answers come in the order of the grammars.
"""

import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np
from llguidance import LLMatcher

from lightkv.router.sampling_params import Grammar
from lightkv.router.service.child_process import end_with_parent, freeze_objects, how_ended, ignore_signals
from lightkv.router.service.messages import LENGTH, decode
from lightkv.router.text.grammars import InvalidGrammar, ModelTokens, heap_bytes, reason_of

MAX_WORK_SECONDS = 0.25  # of the processor, to compile a grammar and to follow a short text of it
KILL_SECONDS = 0.5  # of the processor, after which a child is ended
WALL_SECONDS = 10.0  # in which a machine that is busy may not come to it
STACK_BYTES = 4 * 2**20  # a sixteenth of the worker's
MEMORY_BYTES = 2**30  # that a child may map beside what this process has
NICENESS = 5  # of the children: steps go before checks
_WALK_TOKENS = 48  # the length of the text that is followed


class Checked(msgspec.Struct, frozen=True):
    """The answer about a grammar. `wrong`: why it is refused, or an empty text. `failed`: why it is not known
    whether it can be used, or an empty text. `num_bytes`: what it takes when it is compiled."""

    wrong: str = ""
    failed: str = ""
    num_bytes: int = 0


def check(grammar: Grammar, model: ModelTokens) -> tuple[str, int]:
    """Returns why a grammar is refused, or an empty text, and what it takes when it is compiled. Follows one
    text of the grammar for a while, since some limits are met there only."""
    before, begun = heap_bytes(), time.process_time()
    wrong, matcher = _followed(grammar, model, begun)
    taken, num_bytes = time.process_time() - begun, max(heap_bytes() - before, 0)
    if matcher is not None and taken > MAX_WORK_SECONDS:
        return too_slow(taken), 0
    return wrong, 0 if wrong else num_bytes


def _followed(grammar: Grammar, model: ModelTokens, begun: float) -> tuple[str, LLMatcher | None]:
    """Returns what is wrong with a grammar, or an empty text, and its matcher if it could be compiled."""
    try:
        matcher = model.compile(grammar, STACK_BYTES)
    except InvalidGrammar as error:
        return error.reason, None
    except MemoryError:
        return "it takes too much memory to be compiled; simplify it", None
    for _ in range(_WALK_TOKENS):
        if matcher.is_stopped() or time.process_time() - begun > MAX_WORK_SECONDS:
            break
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = (token for token in np.flatnonzero(bits).tolist() if token not in model.end_ids)
        token = next(allowed, None)
        if matcher.is_error() or token is None or not matcher.consume_token(token):
            break
    return reason_of(matcher.get_error()) if matcher.is_error() else "", matcher


def too_slow(seconds: float) -> str:
    """Returns why a grammar is refused that takes so long."""
    return f"it takes {seconds:.2f} s to compile, and at most {MAX_WORK_SECONDS} s are allowed; simplify it"


def _check_in_child(grammar: Grammar, model: ModelTokens) -> None:
    """Checks a grammar in a child, and answers for a child that has ended without an answer of its own."""
    try:
        pid = os.fork()
    except OSError as error:
        _write(Checked(failed=f"no process could be started: {error.strerror}"))
        return
    if pid == 0:
        _check_and_exit(grammar, model)
    descriptor = os.pidfd_open(pid)
    ended, _, _ = select.select([descriptor], [], [], WALL_SECONDS)
    os.close(descriptor)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == -signal.SIGPROF:
        _write(Checked(too_slow(KILL_SECONDS)))
    elif -code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
        _write(Checked("it nests too deeply, or takes too much memory, to be compiled; simplify it"))
    elif not ended:
        _write(Checked(failed=f"it was not checked within {WALL_SECONDS:g} s"))
    elif code:
        _write(Checked(failed=f"the process that checked it {how_ended(code)}"))


def _check_and_exit(grammar: Grammar, model: ModelTokens) -> NoReturn:
    """Checks a grammar in a child process, and ends it."""
    code = 1
    try:
        end_with_parent()
        os.nice(NICENESS)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, KILL_SECONDS)  # SIGPROF ends a process that does not handle it
        wrong, num_bytes = check(grammar, model)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(Checked(wrong, num_bytes=num_bytes))
        code = 0
    finally:
        os._exit(code)


def _write(answer: Checked) -> None:
    """Writes an answer in one piece, which is short enough for a pipe to keep it whole."""
    content = msgspec.msgpack.encode(answer)
    assert len(content) + LENGTH.size <= select.PIPE_BUF
    os.write(sys.stdout.fileno(), LENGTH.pack(len(content)) + content)


def main() -> None:
    """Runs the process for the model in a directory, with logits of a width, until standard input ends."""
    ignore_signals()  # this process ends with the API process
    directory, vocab_size = Path(sys.argv[1]), int(sys.argv[2])
    model: ModelTokens | str
    try:
        model = ModelTokens.load(directory, vocab_size)
        check(Grammar("json_object"), model)  # what is made once is not made in every child, and not counted
    except InvalidGrammar as error:
        model = error.reason
    freeze_objects()
    _write(Checked())  # it has started
    decoder = msgspec.msgpack.Decoder(Grammar)
    while header := sys.stdin.buffer.read(LENGTH.size):
        grammar = decode(decoder, sys.stdin.buffer.read(LENGTH.unpack(header)[0]))
        if isinstance(model, str):
            _write(Checked(model))
        else:
            _check_in_child(grammar, model)


if __name__ == "__main__":
    main()
