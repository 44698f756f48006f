"""The messages between the API process and the router, and a worker's answers, and the streams that carry them:
each message is plain data that msgspec encodes, and is preceded by its length in four bytes.

A peer is disconnected if it sends a frame that is too long or is not a message. A peer that reads slowly is
not: each end sees how much is unread, and sends less (`router.py`, `router_client.py`). Only processes of the
same user are accepted. Plans and results of steps are in `lightkv.router.engine.step`.
"""

import asyncio
import os
import socket
import struct
from typing import Any, Generic, Literal, TypeVar

import msgspec

from lightkv.errors import LightKVError
from lightkv.router.config import EngineConfig
from lightkv.router.engine.loop import EngineStats
from lightkv.router.engine.step import PoolMap, RunnerInfo, TokenEvent
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.service.access.key_usage import KeyUsage

Result = TypeVar("Result")
Received = TypeVar("Received")

MAX_FRAME_BYTES = 64 * 2**20
_READ_BYTES = 2**18
LENGTH = struct.Struct("<I")
_PEER = struct.Struct("3i")  # pid, uid, gid (SO_PEERCRED)
State = Literal["starting", "ready", "draining", "dead"]
WAITS_FOR = {  # in words for people
    "rows": "one of --max-num-seqs to end",
    "states": "a state slot, of which each running request takes one",
    "prefill": "steps that have prompt tokens left",
    "slots": "slots that are expected to be free",
    "guarantee": "slots up to their max_tokens",
}


class NewAnswer(msgspec.Struct, frozen=True, array_like=True):
    """One answer that is asked for. Its events have its `request_id`, and its random numbers depend on its
    `seed`."""

    request_id: str
    seed: int


class NewPrompt(msgspec.Struct, frozen=True, array_like=True):
    """One prompt, int32 bytes, and the answers to it, of which there is at least one. `boundary`: how many of
    its tokens the next turn of its chat begins with, too; 0 if that is not known."""

    prompt_ids: bytes
    answers: list[NewAnswer]
    boundary: int = 0


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Asks for the answers to the prompts of one client's request: all are queued, or none. The router replies
    with Accepted or Refused, which have the `request_id` of the first answer, and then with events.

    `params`: those of each answer; their `n` and `seed` mean nothing here. The first answer to each prompt
    alone computes the log-probabilities of its prompt. `states_length`: whether the client stated its
    max_tokens, or it is only the most that there is room for. `stop_ids`: token ids that end an answer.
    `priority`: requests with a lower one run first. `namespace`: prefixes are shared only within it. `session`:
    the name of the session that protects the answers' tokens, until ReleaseSession. `shows_answer`: if not, the
    client gets none of the tokens, and a prompt may fill the context. `grammar_bytes`: what the grammar of
    `params` takes when it is compiled. `grammar_owner`: what stands for the client; the owners' grammars are
    compiled in turns. `key`: the name of the client's API key, which has used what the answers take.
    """

    prompts: list[NewPrompt]
    params: SamplingParams
    stop_ids: list[int]
    priority: int = 0
    namespace: tuple[str, ...] = ()
    session: str | None = None
    states_length: bool = True
    shows_answer: bool = True
    grammar_bytes: int = 0
    grammar_owner: bytes = b""
    key: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError where a prompt has no answers, or there is no prompt."""
        if not self.prompts or not all(prompt.answers for prompt in self.prompts):
            raise ValueError("a submission without prompts, or with a prompt without answers")

    @property
    def request_id(self) -> str:
        """The id of the first answer, which stands for all of them until they are accepted."""
        return self.prompts[0].answers[0].request_id

    @property
    def request_ids(self) -> list[str]:
        """The ids of all answers."""
        return [answer.request_id for prompt in self.prompts for answer in prompt.answers]

    @property
    def num_answers(self) -> int:
        """The number of answers."""
        return sum(len(prompt.answers) for prompt in self.prompts)


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Ends a request early. `reason`: "stop" if its text reached a stop string. The router does not reply."""

    request_id: str
    reason: str = "abort"


class ReleaseSession(msgspec.Struct, frozen=True, tag=True):
    """Ends a session that requests have named: its time is over, or its client has released it. The router does
    not reply. If the session's client disconnects, the router does the same."""

    session: str


class AskMap(msgspec.Struct, frozen=True, tag=True):
    """Asks what each slot of the pool is used for. The router replies with Mapped, between two steps."""


class ResetCache(msgspec.Struct, frozen=True, tag=True):
    """Asks to evict every cached token that no running request holds. The router replies with CacheReset."""


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """All answers of a Submit are queued; events will follow. `request_id`: that of the first."""

    request_id: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """No answer of a Submit is queued. `request_id`: that of the first.

    `kind`: "invalid" and "never_fits" are the request's fault; "queue_full" and "unavailable" (the router is
    starting, draining or dead) may pass.
    """

    request_id: str
    kind: Literal["invalid", "never_fits", "queue_full", "unavailable"]
    message: str


class Events(msgspec.Struct, frozen=True, tag=True):
    """The events of one step."""

    events: list[TokenEvent]


class Mapped(msgspec.Struct, frozen=True, tag=True):
    """The answer to AskMap: the map, or None and the reason."""

    pool: PoolMap | None
    error: str = ""


class CacheReset(msgspec.Struct, frozen=True, tag=True):
    """The answer to ResetCache: how many tokens were evicted, or None and the reason."""

    num_tokens: int | None
    error: str = ""


class Load(EngineStats, frozen=True):
    """The engine's counts and the service's. Totals are those since the start, over all workers.

    Attributes:
        num_ledger_checks: how often the device's count was compared with the ledger's; a mismatch ends the
            service.
        step_age: seconds since the last step completed, or since work began to wait; 0 when idle.
        router_seconds: the router's own time in steps.
        num_dropped_log_lines: those of the router process's log.
        by_key: what each API key has used, by its name; `KeyUsage.held` is of now.
    """

    num_ledger_checks: int = 0
    num_worker_starts: int = 0
    step_age: float = 0.0
    router_seconds: float = 0.0
    num_dropped_log_lines: int = 0
    by_key: dict[str, KeyUsage] = msgspec.field(default_factory=dict)

    @property
    def num_provisional(self) -> int:
        """The running requests that are not guaranteed."""
        return self.num_running - self.num_guaranteed

    @property
    def held_share(self) -> float:
        """The share of the pool that running requests hold; 0 without a pool."""
        return self.held / self.capacity if self.capacity else 0.0

    @property
    def why_waiting(self) -> str:
        """A line for people that says why requests wait; empty if none does."""
        if not self.waits_for or not self.num_waiting:
            return ""
        return (
            f"{self.num_waiting} requests wait for {WAITS_FOR[self.waits_for]}; {self.num_guaranteed} "
            f"guaranteed and {self.num_provisional} provisional ones run; of {self.capacity} slots {self.held} "
            f"are held, {self.guaranteed_peak} promised, and {self.forecast_peak} expected to be held at most"
        )


class Status(msgspec.Struct, frozen=True, tag=True):
    """Sent when the state changes, and some four times a second. `detail`: a line for people."""

    state: State
    detail: str
    load: Load
    info: RunnerInfo | None = None


class Rank(msgspec.Struct, frozen=True):
    """The place of a worker in a group of `size` that runs one model: its number, from 0, and the file by which
    the ranks find each other."""

    number: int
    size: int
    store: str


class WorkerStart(msgspec.Struct, frozen=True):
    """Asks a worker to load a model, or a rank's part of one. The config is wrapped, because all of its fields
    have defaults: without the required field any map would decode to a config."""

    config: EngineConfig
    rank: Rank | None = None


class Done(msgspec.Struct, Generic[Result], frozen=True, tag=True):
    """A worker's answer to a call that succeeded."""

    result: Result


class WorkerError(msgspec.Struct, frozen=True, tag=True):
    """A worker's answer to a call that failed.

    `kind`: name of the error's class. `step`: number of the failed step, if a step failed. After a `fatal`
    error the worker's memory or device cannot be trusted, and another worker has to be started.
    """

    kind: str
    message: str
    fatal: bool
    step: int | None = None


ToRouter = Submit | Abort | ReleaseSession | AskMap | ResetCache
ToApi = Accepted | Refused | Events | Status | Mapped | CacheReset


class BadFrame(LightKVError):
    """A frame is not a message. The stream cannot be used any more."""


def decode(decoder: "msgspec.msgpack.Decoder[Received]", data: bytes) -> Received:
    """Returns the message that `data` is. Raises BadFrame if it is none of the decoder's types, or nests too
    deeply."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(f"{len(data)} bytes are not a message: {error}") from error


class FrameStream(Generic[Received]):
    """Both directions of one stream. `types`: the types of messages that may arrive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, types: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(types)
        self._received = bytearray()  # and not decoded yet

    @property
    def num_unread(self) -> int:
        """The bytes that were sent and that the peer has not read, less those in the socket's own buffers."""
        return self._writer.transport.get_write_buffer_size()

    def send(self, message: msgspec.Struct) -> None:
        """Queues a message; `drain` waits until the peer has read enough of what is queued. Once the stream is
        closed, messages are lost."""
        self.send_frame(self.frame(message))

    def frame(self, message: msgspec.Struct) -> bytes:
        """Returns the bytes of a message as it is sent."""
        data = self._encoder.encode(message)
        return LENGTH.pack(len(data)) + data

    def send_frame(self, frame: bytes) -> None:
        """Queues what `frame` returned."""
        if not self._writer.transport.is_closing():
            self._writer.write(frame)

    async def drain(self) -> None:
        await self._writer.drain()

    async def receive(self) -> Received | None:
        """Returns the next message, or None once the peer has closed the stream. Raises BadFrame."""
        try:
            while (message := self._next()) is None:
                data = await self._reader.read(_READ_BYTES)
                if not data:
                    return None
                self._received += data
            return message
        except ConnectionError:
            return None

    def _next(self) -> Received | None:
        """Returns the next message if all of it has been read."""
        received = self._received
        if len(received) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(received)
        if length > MAX_FRAME_BYTES:
            raise BadFrame(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
        end = LENGTH.size + length
        if len(received) < end:
            return None
        frame = bytes(received[LENGTH.size : end])
        del received[:end]
        return decode(self._decoder, frame)

    def close(self) -> None:
        self._writer.close()


def is_own(writer: asyncio.StreamWriter) -> bool:
    """Returns whether the peer, on a unix socket (Linux), runs as the same user as this process."""
    connection = writer.get_extra_info("socket")
    _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(uid == os.geteuid())
