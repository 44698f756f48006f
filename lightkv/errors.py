"""The errors of the memory manager. Each carries the numbers that explain it and says what to do.

A verb that raises one of these has changed nothing.
"""

from importlib.util import find_spec
from typing import ClassVar

from lightkv.triton_kernels.layout.slot_flags import describe_flags


class LightKVError(Exception):
    """Base of every error that lightkv raises on purpose."""


class MissingExtra(LightKVError, ModuleNotFoundError):
    """A package is not installed that a part of lightkv beyond the memory manager needs. `option`: the option
    that needs it, if it is one."""

    def __init__(self, package: str, extra: str = "router", option: str = "") -> None:
        needs = f"{option} needs the package {package}, which" if option else f"the package {package}"
        # The name lightkv on PyPI is not this project's, so what it brings is not ours.
        remedy = f'run pip install ".[{extra}]" in a checkout of lightkv'
        super().__init__(f"{needs} is not installed; {remedy}")
        self.name = package


def require_packages(option: str, extra: str, *packages: str) -> None:
    """Raises MissingExtra for the first package of an option that is not installed."""
    for package in packages:
        try:
            is_installed = find_spec(package) is not None
        except ModuleNotFoundError:  # a package above it is missing
            is_installed = False
        if not is_installed:
            raise MissingExtra(package, extra, option)


class InvalidDevice(LightKVError, ValueError):
    """Memory cannot be made on this device."""

    def __init__(self, device: object, reason: str) -> None:
        self.device = device
        super().__init__(f"device is {str(device)!r}: {reason}")


class OutOfTokens(LightKVError):
    """More tokens were asked for than are free or can be evicted."""

    unit: ClassVar[str] = "tokens"

    def __init__(self, needed: int, free: int, capacity: int) -> None:
        self.needed = needed
        self.free = free
        self.capacity = capacity
        remedy = (
            f"the pool is too small for it at any time: give it more memory or ask for fewer {self.unit}"
            if needed > capacity
            else "wait for running sequences to close, or admit fewer at once"
        )
        numbers = f"{needed} {self.unit} needed, {free} available, of {capacity} in the pool"
        super().__init__(f"{numbers}; {remedy}")


class OutOfStates(OutOfTokens):
    """More sequences are to grow that have no state of their own than there are state slots for."""

    unit: ClassVar[str] = "state slots"


class OutOfRows(LightKVError):
    """Every row of the token table holds a sequence."""

    def __init__(self, max_sequences: int) -> None:
        self.max_sequences = max_sequences
        super().__init__(
            f"all {max_sequences} rows of the token table are in use; close a sequence first, or make the "
            "table larger (max_sequences)"
        )


class SequenceTooLong(LightKVError):
    """A sequence would become longer than a row of the token table."""

    def __init__(self, length: int, max_entries: int) -> None:
        self.length = length
        self.max_entries = max_entries
        super().__init__(
            f"a sequence of {length} tokens does not fit a table row of {max_entries} entries; shorten it, "
            "or make the rows longer (max_entries)"
        )


class WrongThread(LightKVError):
    """A verb was called from another thread than the one that made the cache."""

    def __init__(self, owner: str, caller: str) -> None:
        super().__init__(
            f"the cache belongs to thread {owner}, and {caller} called it; have {owner} make the call, say "
            "through a queue"
        )


class InvalidFree(LightKVError):
    """A slot was freed that was free already, or that is not a slot of this pool."""


class LedgerMismatch(LightKVError):
    """The device's own count of free slots differs from the ledger's: neither can be used any further.

    `flags`: the allocator's error bits (`SlotFlag`). `edits`: those of the step; the message shows the first of
    them.
    """

    def __init__(self, step: int, device: int, ledger: int, flags: int = 0, edits: str = "") -> None:
        self.step = step
        self.device = device
        self.ledger = ledger
        self.flags = flags
        self.edits = edits
        found = f"the device counts {device} free slots, the ledger {ledger}"
        if flags:
            found += f", and on the device {describe_flags(flags)}"
        shown = edits if len(edits) <= 300 else edits[:300] + " …"
        recent = f"; the step's edits: {shown}" if edits else ""
        super().__init__(
            f"step {step}: {found}; stop using this cache and report it, with these numbers{recent}"
        )


class MemoryFailed(LightKVError):
    """The device memory of a cache failed in an earlier verb, so it may not hold what the ledger counts.

    `failure`: the type and the text of that error.
    """

    def __init__(self, failure: str) -> None:
        self.failure = failure
        super().__init__(
            f"the device memory of this cache failed in an earlier verb ({failure[:300]}), and may not hold "
            "what the ledger counts; make a new cache, and compute again what this one held"
        )


class OutOfMemory(LightKVError):
    """The device has no room for the pool that was asked for, or for a pool of a single token."""

    def __init__(
        self, available: int, bytes_per_token: int, num_tokens: int = 1, unit: str = "tokens"
    ) -> None:
        self.available = available
        self.bytes_per_token = bytes_per_token
        self.num_tokens = num_tokens
        super().__init__(
            f"a K/V pool of {num_tokens} {unit} takes {num_tokens * bytes_per_token} bytes "
            f"({bytes_per_token} each), and {available} are left; ask for fewer {unit}, free memory on the "
            "device, raise the memory fraction, or use a smaller model or dtype"
        )


class CheckFailed(LightKVError):
    """A recount differs from the counts kept so far, by a bug in lightkv or by a caller's stray write."""


class UnsupportedModel(LightKVError):
    """A model with an attention that lightkv does not compute."""

    def __init__(self, architecture: str, reason: str) -> None:
        self.architecture = architecture
        self.reason = reason
        super().__init__(f"{architecture} cannot run on lightkv: {reason}; choose another model")


class UnknownBackend(LightKVError, ValueError):
    """No attention backend has this name."""

    def __init__(self, name: str, known: list[str]) -> None:
        self.name = name
        super().__init__(f"no attention backend is called {name!r}; there are {', '.join(known)}")
