"""What the API keys of a service have used, by the keys' names: of requests that have ended, and of those that
run. All of them together are the engine's totals, also after aborts and lost workers."""

from collections.abc import Iterable

import msgspec

from lightkv.router.engine.request import Request

MAX_NAMES = 256  # further ones are OTHERS together
OTHERS = "others"
_NAME_CHARS = 64  # of a name, which is in every status


class KeyUsage(msgspec.Struct):
    """What one key has used.

    num_requests: answers that were queued. prompt_tokens: those of admitted requests, of which cached_tokens
    were found in the cache. interruptions: how often its requests were preempted. held: the tokens that they
    hold now; a shared one counts in each.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    interruptions: int = 0
    held: int = 0

    def add(self, request: Request) -> None:
        """Adds what a request has used so far: nothing until it was admitted."""
        if request.sequence is not None or request.num_preemptions:
            self.prompt_tokens += request.num_prompt
            self.cached_tokens += request.num_hit
            self.generated_tokens += len(request.output)
            self.interruptions += request.num_preemptions


class UsageByName:
    """The usage of ended requests, by the name of their key."""

    def __init__(self) -> None:
        self._ended: dict[str, KeyUsage] = {}

    def begin(self, given: str, num_requests: int) -> str:
        """Counts requests that were queued. Returns the name under which their key is counted."""
        name = given[:_NAME_CHARS]
        if name not in self._ended:
            name = name if len(self._ended) < MAX_NAMES else OTHERS
            self._ended.setdefault(name, KeyUsage())
        self._ended[name].num_requests += num_requests
        return name

    def end(self, name: str, request: Request) -> None:
        """Notes that a request has ended."""
        self._ended[name].add(request)

    def with_living(self, living: Iterable[tuple[str, Request]], has_memory: bool) -> dict[str, KeyUsage]:
        """Returns the usage by name, with that of requests that have not ended. `has_memory`: whether the
        memory that these hold is still there."""
        usage = {name: msgspec.structs.replace(ended) for name, ended in self._ended.items()}
        for name, request in living:
            usage[name].add(request)
            if has_memory and (sequence := request.sequence) is not None:
                usage[name].held += sequence.length
        return usage
