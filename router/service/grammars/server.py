"""Compiles grammars in the worker, in a thread beside the one that runs the steps.

The router sends Compile and Forget over a stream of its own, framed as in `messages.py`, so that no step waits
for a compilation, and no compilation for a step.
"""

import logging
import socket
import threading
from typing import TYPE_CHECKING

import msgspec

from lightkv.errors import LightKVError
from lightkv.router.engine.grammars.grammar_desk import Compile, Compiled, Forget
from lightkv.router.service.messages import LENGTH, MAX_FRAME_BYTES, decode

if TYPE_CHECKING:
    from lightkv.router.text.grammars import Grammars

NICENESS = 10  # of the threads that compile: the threads of a step go before them
_logger = logging.getLogger("lightkv.worker")


class GrammarServer:
    """Carries out the orders that come over `connection`, one after the other, until the router closes it."""

    def __init__(self, connection: socket.socket, grammars: "Grammars") -> None:
        self._connection = connection
        self._grammars = grammars
        self._decoder = msgspec.msgpack.Decoder(Compile | Forget)
        self._thread = threading.Thread(target=self._serve, name="grammars", daemon=True)

    def start(self) -> None:
        """Begins to serve, in a thread."""
        self._thread.start()

    def _serve(self) -> None:
        try:
            with self._connection, self._connection.makefile("rb") as received:
                while header := received.read(LENGTH.size):
                    (length,) = LENGTH.unpack(header)
                    if length > MAX_FRAME_BYTES:
                        raise ValueError(f"an order of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
                    self._carry_out(decode(self._decoder, received.read(length)))
        except Exception:  # the stream is closed, which ends this process
            _logger.exception("the orders to compile grammars cannot be read any more")

    def _carry_out(self, order: Compile | Forget) -> None:
        if isinstance(order, Forget):
            self._grammars.release(order.grammar_id)
            return
        error = ""
        try:
            self._grammars.compile(order.grammar_id, order.grammar, NICENESS)
        except LightKVError as wrong:
            error = str(wrong)
        except Exception as defect:
            _logger.exception("grammar %d was not compiled", order.grammar_id)
            error = f"it was not compiled ({type(defect).__name__}: {defect})"
        answer = msgspec.msgpack.encode(Compiled(order.grammar_id, error.encode("utf-8", "replace").decode()))
        self._connection.sendall(LENGTH.pack(len(answer)) + answer)
