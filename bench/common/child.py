"""Runs a part of a benchmark in a process of its own, so that its memory is freed and a time limit can end it.

The parent calls `ask`, which sends one line of JSON. The child is a module that ends with a call of `serve`; it
answers in lines of JSON. Whatever else the child prints does not mix with its answers.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

LOG_LINES = 5  # the last lines of a dead child's stderr that go into the error


class ChildFailed(Exception):
    """Raised when a child raised, died or ran out of time. Its earlier answers stay valid."""


def ask(module: str, request: Any, seconds: float) -> Iterator[Any]:
    """Yields the answers of `python -m module` to `request` as they arrive.

    Kills the child after `seconds`, or when the iterator is dropped. Raises ChildFailed.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        given_up = threading.Event()

        def give_up() -> None:
            given_up.set()
            child.kill()

        timer = threading.Timer(seconds, give_up)
        timer.start()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with child.stdin as stdin:
                json.dump(request, stdin)
            for line in child.stdout:
                message = json.loads(line)
                if "error" in message:
                    raise ChildFailed(message["error"])
                yield message["answer"]
            code = child.wait()
            if given_up.is_set():
                raise ChildFailed(f"not done within {seconds:g} s")
            if code:
                raise ChildFailed(_death(code, log))
        except BrokenPipeError:
            raise ChildFailed(_death(child.wait(), log)) from None
        finally:
            timer.cancel()
            child.kill()
            child.wait()
            child.stdout.close()


def serve(handle: Callable[[Any], Iterable[Any]]) -> NoReturn:
    """Answers the parent's request with what `handle` yields, then ends this process and all its threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and kills this process
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    code = 0
    try:
        for answer in handle(json.load(sys.stdin)):
            send({"answer": answer})
    except Exception as error:  # any error goes to the parent
        send({"error": f"{type(error).__name__}: {error}"})
        code = 1
    sys.stderr.flush()
    os._exit(code)


def _death(code: int, log: Any) -> str:
    log.seek(0)
    said = "".join(log.readlines()[-LOG_LINES:]).strip()
    return f"it ended with code {code}: {said}"
