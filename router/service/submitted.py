"""The requests that the router has accepted and that have not ended, the memory that they take, and the clients
that get their events."""

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from lightkv.errors import CheckFailed, LightKVError
from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.memory_map import Owner
from lightkv.router.engine.request import Request
from lightkv.router.engine.step import TokenEvent
from lightkv.router.service.access.key_usage import KeyUsage, UsageByName

from .messages import Events, FrameStream, Submit, ToRouter

Client = FrameStream[ToRouter]

# Bytes of all requests that have not ended. 4,096 requests of 16,000 tokens fit.
MAX_REQUEST_BYTES = 256 * 2**20
ANSWER_BYTES = 2**11  # of one answer in the router's queues and tables, without what its request shares
_OBJECT_SHARE = 12  # decoded lists and dictionaries take at most so many times the bytes of their message
_TEXT_BYTES = 4  # of a character, at most

# Of a client that has not read so many bytes no more requests are accepted, and beyond the second number its
# requests end. The events of one step come on top of them.
MAX_UNREAD_BYTES, MAX_KEPT_BYTES = 16 * 2**20, 64 * 2**20


class NoRoom(LightKVError):
    """There is no room for a request. `is_too_large`: there never will be, whatever ends before."""

    def __init__(self, num_bytes: int, num_taken: int, limit: int) -> None:
        self.is_too_large = num_bytes > limit
        if self.is_too_large:
            remedy = "send fewer prompts or answers at once, or shorter ones"
        else:
            remedy = f"the requests before it have taken {num_taken}; try again in a moment"
        super().__init__(
            f"the request takes {num_bytes} of the router's {limit} bytes for requests; {remedy}"
        )


@dataclass(eq=False)
class _Submission:
    """Requests that came together: the client that gets their events, the bytes that they take until the last
    of them has ended, and the name that they are counted by, if they have a key."""

    client: Client
    num_bytes: int
    num_living: int
    key: str | None


class _One(NamedTuple):
    request: Request
    submission: _Submission


class SubmittedRequests:
    """The accepted requests by id, until each has ended. `num_bytes`: what they take, of `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_REQUEST_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._usage = UsageByName()
        self._by_id: dict[str, _One] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def require_room(self, submit: Submit) -> int:
        """Returns the bytes that the requests of `submit` take. Raises NoRoom if they do not fit."""
        num_bytes = request_bytes(submit)
        if self.num_bytes + num_bytes > self.max_bytes:
            raise NoRoom(num_bytes, self.num_bytes, self.max_bytes)
        return num_bytes

    def add(self, client: Client, requests: list[Request], num_bytes: int, key: str | None = None) -> None:
        """Adds the requests of one submission, which take `num_bytes` together. `key`: the name of theirs."""
        name = None if key is None else self._usage.begin(key, len(requests))
        submission = _Submission(client, num_bytes, len(requests), name)
        self.num_bytes += num_bytes
        for request in requests:
            self._by_id[request.id] = _One(request, submission)

    def forget(self, request_id: str) -> bool:
        """Removes a request that has ended. Returns False if it is not there."""
        one = self._by_id.pop(request_id, None)
        if one is None:
            return False
        if one.submission.key is not None:
            self._usage.end(one.submission.key, one.request)
        one.submission.num_living -= 1
        if not one.submission.num_living:
            self.num_bytes -= one.submission.num_bytes
        return True

    def usage(self, has_memory: bool) -> dict[str, KeyUsage]:
        """Returns what each key has used, by its name. `has_memory`: whether a worker has what they hold."""
        living = [(one.submission.key, one.request) for one in self._by_id.values()]
        return self._usage.with_living([(key, one) for key, one in living if key is not None], has_memory)

    def ids(self, client: Client | None = None) -> list[str]:
        """Returns the ids of all requests, or of one client's."""
        return [
            name for name, one in self._by_id.items() if client is None or one.submission.client is client
        ]

    def named(self, holders: list[Owner]) -> list[Owner]:
        """Returns the rows that alone hold tokens, with the ids of their requests."""
        names = {
            one.request.sequence.row: name
            for name, one in self._by_id.items()
            if one.request.sequence is not None
        }
        return [Owner(one.row, one.num_tokens, names.get(one.row, "")) for one in holders]

    def send(self, events: list[TokenEvent]) -> list[Client]:
        """Sends each event to the client of its request, and removes the requests that end. Returns the clients
        that have left too much unread."""
        by_client: dict[Client, list[TokenEvent]] = {}
        for event in events:
            one = self._by_id.get(event.request_id)
            if one is None:
                continue
            if event.num_cached is not None:
                event = msgspec.structs.replace(event, waited=one.request.waited)
            own = by_client.setdefault(one.submission.client, [])
            if event.prompt_logprobs is None:
                own.append(event)
            else:  # these may be tens of megabytes, and a message has its limit
                one.submission.client.send(Events([event]))
        for client, own in by_client.items():
            if own:
                client.send(Events(own))
        for event in events:
            if event.finish_reason is not None:
                self.forget(event.request_id)
        return [client for client in by_client if client.num_unread > MAX_KEPT_BYTES]

    def check(self) -> None:
        """Recounts the bytes and the requests that have not ended. Raises CheckFailed."""
        submissions = {one.submission for one in self._by_id.values()}
        total = sum(one.num_bytes for one in submissions)
        living = sum(one.num_living for one in submissions)
        if total != self.num_bytes or living != len(self._by_id):
            raise CheckFailed(
                f"requests are counted with {self.num_bytes} bytes and {living} answers; a recount finds "
                f"{total} bytes and {len(self._by_id)} answers"
            )


def requests_of(submit: Submit) -> list[Request]:
    """Returns the requests for the answers of `submit`, which share their prompts and parameters, less their
    grammar, which the worker compiles beforehand, and their stop strings, which the API process looks for."""
    stop_ids, params = frozenset(submit.stop_ids), submit.params
    if params.grammar is not None or params.stop:
        params = msgspec.structs.replace(params, grammar=None, stop=())
    others = params.of_others
    return [
        Request(
            answer.request_id,
            prompt.prompt_ids,
            others if idx else params,
            answer.seed,
            stop_ids,
            submit.namespace,
            submit.priority,
            states_length=submit.states_length,
            shows_answer=submit.shows_answer,
            boundary=prompt.boundary,
        )
        for prompt in submit.prompts
        for idx, answer in enumerate(prompt.answers)
    ]


def request_bytes(submit: Submit) -> int:
    """Returns how many bytes the requests of `submit` take in the router at most, with the log-probabilities of
    their prompts."""
    params = submit.params
    prompts = sum(len(prompt.prompt_ids) for prompt in submit.prompts)
    scores = 0
    if params.prompt_logprobs is not None:
        scores = prompts // TOKEN_BYTES * 8 * (params.prompt_logprobs + 1)
    packed = len(params.banned.bits)
    if params.allowed is not None:
        packed += len(params.allowed.bits)
    if params.grammar is not None:
        packed += _TEXT_BYTES * len(params.grammar.text)
    rest = msgspec.structs.replace(params, allowed_token_ids=None, banned_token_ids=(), grammar=None)
    others = len(_encode((rest, submit.stop_ids, submit.namespace, submit.session)))
    return prompts + scores + packed + _OBJECT_SHARE * others + ANSWER_BYTES * submit.num_answers


_encode = msgspec.msgpack.encode
