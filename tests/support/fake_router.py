"""A fake router for tests of the API process, which answers frames as the test tells it to.

`ApiUnderTest` serves the real application over it, on a loopback port, in a thread of its own.
"""

import asyncio
import http.client
import json
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvicorn
from msgspec.structs import replace

from lightkv.router.api.app import create_app
from lightkv.router.api.http.guard import RequestTaker
from lightkv.router.config import EngineConfig
from lightkv.router.engine.step import (
    Limits,
    PoolMap,
    PromptLogprobs,
    RunnerInfo,
    TokenEvent,
    TokenLogprobs,
)
from lightkv.router.model_files import resolve
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.service.api_settings import ApiSettings
from lightkv.router.service.messages import (
    Abort,
    Accepted,
    AskMap,
    CacheReset,
    Events,
    FrameStream,
    Load,
    Mapped,
    Refused,
    ReleaseSession,
    ResetCache,
    State,
    Status,
    Submit,
    ToRouter,
)
from lightkv.router.service.router import STATUS_SECONDS
from lightkv.router.service.router_client import RouterClient
from lightkv.router.text.tokenizer import Tokenizer

MODEL = "smol"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello!"}]}
TEXT = " one two three four five"
CAPACITY = 4000
LIMITS = Limits(max_num_seqs=8, max_model_len=1024, prefill_chunk=64, vocab_size=49152)
INFO = RunnerInfo(
    architecture="LlamaForCausalLM",
    device="cpu",
    dtype="float32",
    attention_backend="torch",
    cuda_graphs=False,
    capacity=CAPACITY,
    bytes_per_token=4,
    pool_bytes=4 * CAPACITY,
    pool_reason="given",
    limits=LIMITS,
)
POOL = PoolMap(
    capacity=CAPACITY,
    num_free=2500,
    num_cached=500,
    num_shared=400,
    num_own=600,
    longest_free_run=2400,
    slots_per_cell=2,
    cells=[2] * 200 + [4] * 300 + [1] * 250 + [0] * 1250,
    num_bytes=4 * (CAPACITY + 1),
)
IDLE = Load(capacity=CAPACITY, free=CAPACITY)


class Asked(NamedTuple):
    """One answer that was asked for."""

    request_id: str
    prompt_ids: bytes
    seed: int
    submit: Submit
    params: SamplingParams

    @property
    def what(self) -> tuple[object, ...]:
        """All that was asked for, without the names of the answers."""
        submit = self.submit
        shared = (submit.stop_ids, submit.priority, submit.namespace, submit.session, submit.states_length)
        return self.prompt_ids, self.seed, self.params, *shared

    @property
    def stop_ids(self) -> list[int]:
        return self.submit.stop_ids

    @property
    def priority(self) -> int:
        return self.submit.priority

    @property
    def namespace(self) -> tuple[str, ...]:
        return self.submit.namespace

    @property
    def session(self) -> str | None:
        return self.submit.session

    @property
    def states_length(self) -> bool:
        return self.submit.states_length


class FakeRouter:
    """Answers every request with `script`, repeated up to max_tokens, one token every `delay` seconds.

    `refuse(submit)`: returns a Refused to send in place of Accepted, or None. `fail_after`: after so many
    tokens an answer ends with `fail_reason`. `hold`: accept requests and never answer them. `mute`: do not
    even accept them. `first_state`: the state that a new client is sent. `mapped`: the answer to AskMap; None
    sends no answer. `cache_reset`: the answer to ResetCache. `submits` (one for each answer), `aborts`,
    `released` (names of sessions), `num_map_asks`: what was received. The last status is repeated four
    times a second, unless the router `is_silent`.
    """

    def __init__(self) -> None:
        self.num_running = 0
        self._stream: FrameStream[ToRouter] | None = None
        self._answering: dict[str, asyncio.Task[None]] = {}
        self._last = Status("ready", "for the test", IDLE, INFO)
        self.reset([1])

    def reset(self, script: list[int]) -> None:
        """Resets everything except running answers."""
        self.script = script
        self.delay = 0.0
        self.refuse: Callable[[Asked], Refused | None] = lambda submit: None
        self.fail_after: int | None = None
        self.fail_reason = "error"
        self.hold = False
        self.mute = False
        self.first_state: State = "ready"
        self.num_cached = 0
        self.num_interruptions = 0  # of each answer, after its second token
        self.submits: list[Asked] = []
        self.aborts: list[Abort] = []
        self.released: list[str] = []
        self.mapped: Mapped | None = Mapped(POOL)
        self.num_map_asks = 0
        self.cache_reset = CacheReset(500)
        self.is_silent = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._stream = FrameStream(reader, writer, ToRouter)
        self.report(self.first_state)
        repeating = asyncio.create_task(self._repeat(self._stream))
        try:
            await self._take_messages(self._stream)
        finally:
            repeating.cancel()

    async def _repeat(self, stream: FrameStream[ToRouter]) -> None:
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            if not self.is_silent:
                stream.send(self._last)

    async def _take_messages(self, stream: FrameStream[ToRouter]) -> None:
        while (message := await stream.receive()) is not None:
            if isinstance(message, Abort):
                self.aborts.append(message)
                if message.request_id in self._answering:
                    self._answering.pop(message.request_id).cancel()
                continue
            if isinstance(message, ReleaseSession):
                self.released.append(message.session)
                continue
            if isinstance(message, AskMap):
                self.num_map_asks += 1
                if self.mapped is not None:
                    stream.send(self.mapped)
                continue
            if isinstance(message, ResetCache):
                stream.send(self.cache_reset)
                continue
            asked = asked_of(message)
            self.submits += asked
            refused = next((found for one in asked if (found := self.refuse(one))), None)
            if refused is not None:
                stream.send(Refused(message.request_id, refused.kind, refused.message))
            elif not self.mute:
                stream.send(Accepted(message.request_id))
                for one in asked:
                    self._answering[one.request_id] = asyncio.create_task(self._answer(one))

    def report(self, state: State, load: Load | None = None, ready: RunnerInfo = INFO) -> None:
        assert self._stream is not None
        info = None if state == "starting" else ready
        self._last = Status(state, "for the test", load or IDLE, info)
        self._stream.send(self._last)

    def die(self) -> None:
        assert self._stream is not None
        for task in self._answering.values():
            task.cancel()
        self._stream.close()

    async def _answer(self, submit: Asked) -> None:
        self.num_running += 1
        try:
            await self._send_tokens(submit)
        finally:
            self.num_running -= 1
            self._answering.pop(submit.request_id, None)

    async def _send_tokens(self, submit: Asked) -> None:
        assert self._stream is not None
        if self.hold:
            await asyncio.Event().wait()
        for i in range(submit.params.max_tokens):
            await asyncio.sleep(self.delay)
            if i == self.fail_after:
                event = TokenEvent(submit.request_id, None, self.fail_reason, error="out of luck")
                self._stream.send(Events([event]))
                return
            token = self.script[i % len(self.script)]
            reason = "length" if i + 1 == submit.params.max_tokens else None
            reason = "stop" if token in submit.stop_ids else reason
            logprobs = None
            if submit.params.logprobs is not None:
                top = [token, 2, 3][: submit.params.logprobs]
                logprobs = TokenLogprobs(-0.5, top, [-0.5, -1.5, float("-inf")][: len(top)])
            cached = self.num_cached if i == 0 else None
            scores = _scores(submit) if i == 0 else None
            told = self.num_interruptions if i == 2 else 0
            event = TokenEvent(submit.request_id, token, reason, logprobs, None, cached, scores, None, told)
            self._stream.send(Events([event]))
            if reason is not None:
                return


def asked_of(submit: Submit) -> list[Asked]:
    """Returns each answer that a submission asks for, with its own parameters."""
    others = replace(submit.params, prompt_logprobs=None)
    return [
        Asked(answer.request_id, prompt.prompt_ids, answer.seed, submit, others if idx else submit.params)
        for prompt in submit.prompts
        for idx, answer in enumerate(prompt.answers)
    ]


def _scores(submit: Asked) -> PromptLogprobs | None:
    """Returns -1, -2, … for the tokens of the prompt, whose ranks are 2; token 7 is always the likeliest."""
    num_top = submit.params.prompt_logprobs
    if num_top is None:
        return None
    num = len(submit.prompt_ids) // 4 - 1
    top = np.arange(7, 7 + num_top, dtype=np.int32)
    return PromptLogprobs(
        (-1 - np.arange(num, dtype=np.float32)).tobytes(),
        np.full(num, 2, np.int32).tobytes(),
        np.tile(top, num).tobytes(),
        np.tile(-0.25 * top.astype(np.float32), num).tobytes(),
    )


class ApiUnderTest:
    """The application over a fake router. `router`'s attributes may be set from the test's thread."""

    def __init__(self, tokenizer: Tokenizer, socket_path: Path, settings: ApiSettings) -> None:
        self.tokenizer = tokenizer
        self.router = FakeRouter()
        self.router.reset(tokenizer.encode(TEXT).tolist())
        self.port = 0
        self.router_socket = socket_path
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._run()])
        self._stopped = asyncio.Event()

    @contextmanager
    def running(self, take: Sequence[RequestTaker] = ()) -> Iterator["ApiUnderTest"]:
        self._take = take
        self._thread.start()
        assert self._started.wait(20), "the server did not start"
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(20)
            assert not self._thread.is_alive(), "the server did not stop"
            self._loop.close()

    async def _run(self) -> None:
        listener = await asyncio.start_unix_server(self.router.serve, self.router_socket)
        self.client = await RouterClient.connect(self.router_socket)
        while self.client.status.state != "ready":
            await asyncio.sleep(0.001)
        app = create_app(self.client, self.tokenizer, self._settings, take=self._take)
        config = uvicorn.Config(
            app, "127.0.0.1", 0, http="h11", lifespan="off", log_level="error", timeout_graceful_shutdown=1
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        self.port = server.servers[0].sockets[0].getsockname()[1]
        ticking = asyncio.create_task(server.main_loop())  # its end alone would take a tick of 0.1 s
        self._started.set()
        await self._stopped.wait()
        ticking.cancel()
        await server.shutdown()
        await app.state.grammars.close()
        await self.client.close()
        listener.close()

    def call(self, function: Callable[[], None]) -> None:
        """Runs a function in the service's event loop, and waits for it."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (function(), done.set()))
        assert done.wait(60)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Sends one request; a `body` other than bytes is sent as JSON. Returns status, headers and content."""
        connection = self.connect()
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"} | (headers or {}))
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, response.headers, content

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        """Returns the answer's JSON, which has to have this status."""
        found, _, content = self.send("POST", path, body)
        assert found == status, (found, content)
        return json.loads(content)

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Returns all events of a stream, decoded except for "[DONE]"."""
        status, headers, content = self.send("POST", path, body | {"stream": True})
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8"), content
        lines = content.decode().split("\n\n")
        assert lines.pop() == ""
        assert all(line.startswith("data: ") for line in lines)
        events = [line.removeprefix("data: ") for line in lines]
        return [event if event == "[DONE]" else json.loads(event) for event in events]


def ids_of(submit: Asked) -> list[int]:
    return array("i", submit.prompt_ids).tolist()


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.005)


def stream_texts(events: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


def error_of(content: bytes) -> dict[str, Any]:
    body = json.loads(content)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def metrics_text(api: ApiUnderTest) -> str:
    return api.send("GET", "/metrics")[2].decode()


@cache
def default_tokenizer() -> Tokenizer:
    """Returns the default model's tokenizer, of which every service has a copy that a test may change."""
    return Tokenizer(resolve(EngineConfig.model, report=lambda line: None))


def service(directory: Path, **settings: Any) -> ApiUnderTest:
    """Returns a service with the default model's tokenizer which answers TEXT repeatedly. `settings`: fields of
    ApiSettings."""
    usual: dict[str, Any] = {"max_body_bytes": 200_000, "max_answers": 16}
    limits = ApiSettings(served_model_name=(MODEL, "alias/of-it"), **usual | settings)
    tokenizer = copy(default_tokenizer())
    tokenizer.__dict__.pop("_template", None)  # compiled; a test may give it another source
    return ApiUnderTest(tokenizer, directory / "router", limits)


def idle(api: ApiUnderTest) -> ApiUnderTest:
    """Returns the same service as if it had just started, except for its metrics."""
    wait_until(lambda: api.client.num_open == 0 and api.router.num_running == 0)
    api.call(lambda: api.router.report("ready"))
    wait_until(lambda: api.client.status.load == IDLE and api.client.status.state == "ready")
    api.router.reset(api.tokenizer.encode(TEXT).tolist())
    return api
