"""A part of a benchmark in a process of its own: its memory goes with it, and it can be given up.

The parent asks by `ask`, a line of JSON; the child is a module that ends in `serve`, and answers in lines of
JSON. What else it prints is kept from them. Knows nothing of what is asked.
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

LOG_LINES = 5  # of a child that died, in the error


class ChildFailed(Exception):
    """A child that raised, died, or was not done in time. What it answered before stands."""


def ask(module: str, request: Any, seconds: float) -> Iterator[Any]:
    """The answers of `python -m module` to `request`, as they come. It is killed after `seconds`, or when the
    iterator is dropped. Raises ChildFailed."""
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
    """Answer the parent's request by what `handle` yields, and end this process: whatever threads it has."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, who ends this
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    code = 0
    try:
        for answer in handle(json.load(sys.stdin)):
            send({"answer": answer})
    except Exception as error:  # the parent is told, whatever it is
        send({"error": f"{type(error).__name__}: {error}"})
        code = 1
    sys.stderr.flush()
    os._exit(code)


def _death(code: int, log: Any) -> str:
    log.seek(0)
    said = "".join(log.readlines()[-LOG_LINES:]).strip()
    return f"it ended with code {code}: {said}"
