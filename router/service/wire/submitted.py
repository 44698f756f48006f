"""The requests that the router has accepted and that have not ended, and the clients that get their events."""

from typing import NamedTuple

import msgspec

from lightkv.memory_map import Owner
from lightkv.router.engine.request import Request
from lightkv.router.engine.step import TokenEvent
from lightkv.router.service.messages import Events, FrameStream, Submit, ToRouter

from .request_room import Claim, RequestRoom

Client = FrameStream[ToRouter]

# Of a client that has not read so many bytes no more requests are accepted, and beyond the second number its
# requests end. The events of one step come on top of them.
MAX_UNREAD_BYTES, MAX_KEPT_BYTES = 16 * 2**20, 64 * 2**20


class _One(NamedTuple):
    """A request, the client that gets its events, and its claim on memory."""

    client: Client
    request: Request
    claim: Claim


class SubmittedRequests:
    """The accepted requests by id, until each has ended. `room`: the memory that they may take."""

    def __init__(self, room: RequestRoom | None = None) -> None:
        self.room = room or RequestRoom()
        self._by_id: dict[str, _One] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, client: Client, requests: list[Request], claim: Claim) -> None:
        """Adds the requests of one submission, which `room` has a claim for."""
        for request in requests:
            self._by_id[request.id] = _One(client, request, claim)

    def forget(self, request_id: str) -> bool:
        """Removes a request that has ended. Returns False if it is not there."""
        one = self._by_id.pop(request_id, None)
        if one is not None:
            self.room.end(one.claim)
        return one is not None

    def ids(self, client: Client | None = None) -> list[str]:
        """Returns the ids of all requests, or of one client's."""
        return [name for name, one in self._by_id.items() if client is None or one.client is client]

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
            if event.prompt_logprobs is None:
                by_client.setdefault(one.client, []).append(event)
            else:  # these may be tens of megabytes, and a message has its limit
                one.client.send(Events([event]))
                by_client.setdefault(one.client, [])
        for client, own in by_client.items():
            if own:
                client.send(Events(own))
        for event in events:
            if event.finish_reason is not None:
                self.forget(event.request_id)
        return [client for client in by_client if client.num_unread > MAX_KEPT_BYTES]

    def check(self) -> None:
        """Recounts the memory that is claimed. Raises CheckFailed."""
        self.room.check([one.claim for one in self._by_id.values()])


def requests_of(submit: Submit) -> list[Request]:
    """Returns the requests for the answers of `submit`, which share their prompts and parameters, less their
    grammar, which the worker compiles beforehand."""
    stop_ids, params = frozenset(submit.stop_ids), submit.params
    if params.grammar is not None:
        params = msgspec.structs.replace(params, grammar=None)
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
        )
        for prompt in submit.prompts
        for idx, answer in enumerate(prompt.answers)
    ]
