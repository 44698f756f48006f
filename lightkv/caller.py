"""The one thread whose verbs change a cache's memory."""

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from lightkv.memory.kv_memory import KVMemory

from .edits import Edit
from .errors import LightKVError, MemoryFailed, WrongThread

_logger = logging.getLogger("lightkv")
OnEdits = Callable[[list[Edit], list[torch.Tensor]], None]


class Caller:
    """The thread that makes this, for which edits are applied to `memory` until that fails.

    failure: how it has failed, "" if it has not; every later verb raises MemoryFailed.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._owner = threading.current_thread()
        self._in_callback = False
        self.failure = ""

    def note_failure(self, error: BaseException) -> None:
        """Notes that the device memory failed in a verb."""
        self.failure = f"{type(error).__name__}: {error}"

    def require_readable(self) -> None:
        """Raises WrongThread, MemoryFailed unless the calling thread may read the memory."""
        caller = threading.current_thread()
        if caller is not self._owner:
            raise WrongThread(self._owner.name, caller.name)
        if self.failure:
            raise MemoryFailed(self.failure)

    def require_writable(self) -> None:
        """Raises what `require_readable` does, and LightKVError within a callback."""
        self.require_readable()
        if self._in_callback:
            raise LightKVError(
                "on_edits called a verb that changes the cache, in the middle of another; note it there, and "
                "call it once that one has returned"
            )

    def apply(
        self, edits: list[Edit], kept: Sequence[torch.Tensor], on_edits: OnEdits | None
    ) -> torch.Tensor | None:
        """Applies edits, and passes them to `on_edits`. Returns what `KVMemory.apply` does."""
        try:
            slots = self._memory.apply(edits, kept)
        except BaseException as error:  # Ctrl-C as well
            self.note_failure(error)
            raise
        if edits and on_edits is not None:
            self._in_callback = True
            try:
                on_edits(edits, list(kept))
            except Exception:  # the verb is complete, and its caller needs what it returns
                _logger.exception("on_edits failed on %d edits, which have been applied", len(edits))
            finally:
                self._in_callback = False
        return slots
