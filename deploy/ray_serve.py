"""A Ray Serve application whose replicas run one `lightkv serve` each, behind one OpenAI endpoint.

    serve run deploy.ray_serve:app                                    the default model, one replica
    serve run deploy.ray_serve:app model=DIR gpus=1 max_replicas=8 options="--kv-dtype int8"

A replica starts the service as a child process on a unix socket and passes requests and answers through as
bytes, streams piece by piece. Where a client goes away, its stream is closed, and the service aborts it.
A replica takes requests once its service is ready, and counts as healthy as long as `/ready` says so. A replica
that Ray Serve stops gets no more requests; once the running ones have ended, or their time is up, its service
drains and ends (`Replica.__del__`). A replica that is killed takes its service with it.

Where replicas run, this file needs Ray, and a program that starts the service (`command`).
"""

import asyncio
import json
import math
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from pathlib import Path
from string import punctuation
from typing import Any
from urllib.parse import quote

import aiohttp
from ray import serve
from ray.serve.config import AutoscalingContext
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Scope
from yarl import URL

_MARGIN_SECONDS = 15  # for a service that has drained to end its processes
_NOT_SENT = {b"connection", b"keep-alive", b"transfer-encoding"}  # aiohttp's own
_NOT_ANSWERED = {
    b"connection",
    b"keep-alive",
    b"transfer-encoding",
    b"date",
    b"server",
    b"x-request-id",
}  # Ray's
_SENT_AS_IT_IS = punctuation.replace("#", "")  # of a target
_KEY = "LIGHTKV_API_KEY"
_LOCAL = "http://localhost"  # the host that requests of the replica's own name
_METRICS = {"waiting_tokens": "lightkv:waiting_tokens{", "usage": "vllm:kv_cache_usage_perc{"}


@dataclass(frozen=True)
class Settings:
    """What `serve run` is given as NAME=VALUE.

    Attributes:
        model: a directory or the id of a model; empty: the default model.
        options: further options of `lightkv serve`, as on a command line.
        command: the program that has `serve`, as on a command line.
        gpus: those of one replica.
        cpus: the processor cores of one replica.
        min_replicas, max_replicas: the bounds of the autoscaling.
        waiting_tokens: for each so many waiting prompt tokens another replica is started.
        drain_seconds: the time that running requests have when a replica is stopped.
        max_ongoing_requests: those that one replica is sent at a time; its service queues what it cannot admit.
    """

    model: str = ""
    options: str = ""
    command: str = "lightkv"
    gpus: float = 0.0
    cpus: float = 1.0
    min_replicas: int = 1
    max_replicas: int = 1
    waiting_tokens: int = 16384
    drain_seconds: int = 60
    max_ongoing_requests: int = 1000

    def arguments(self, socket: Path) -> list[str]:
        """Returns the command line of a service on `socket`. The service ends when its parent does. Without
        a key it answers requests to addresses and localhost alone, as one on a port does (docs/security.md)."""
        ends_with_parent = ["setpriv", "--pdeathsig", "TERM", *shlex.split(self.command), "serve"]
        own = ["--uds", str(socket), "--shutdown-timeout", str(self.drain_seconds)]
        hosts = [] if os.environ.get(_KEY) else ["--allowed-hosts", "localhost"]
        model = [self.model] if self.model else []
        return [*ends_with_parent, *model, *own, *hosts, *shlex.split(self.options)]


class WaitingTokens:
    """The number of replicas: more of them while prompts wait, fewer once the rest would hold all requests."""

    def __init__(self, tokens_per_replica: int) -> None:
        self._tokens = tokens_per_replica

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        waiting = sum(metrics.get("waiting_tokens", {}).values())
        target: int = context.target_num_replicas
        if waiting >= self._tokens:
            return max(target, context.current_num_replicas + int(waiting // self._tokens)), {}
        usages = metrics.get("usage", {})
        if len(usages) < target:  # some have not reported yet
            return target, {}
        return min(target, max(1, math.ceil(sum(usages.values())))), {}


class Replica:
    """Runs one service and passes requests through to it."""

    async def __init__(self, settings: Settings) -> None:
        self._directory = tempfile.mkdtemp(prefix="lightkv-ray-")
        socket = Path(self._directory) / "http.sock"
        # The parent whose end ends the service is the thread that starts it: this one, and none of a pool.
        self._service = subprocess.Popen(settings.arguments(socket), stdout=subprocess.PIPE, text=True)
        assert self._service.stdout is not None
        line = await asyncio.to_thread(self._service.stdout.readline)
        if not line.startswith("lightkv serves "):
            code = await asyncio.to_thread(self._service.wait)
            shutil.rmtree(self._directory, ignore_errors=True)
            raise RuntimeError(f"lightkv serve ended with code {code} before it was ready; see its log above")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(socket), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
            auto_decompress=False,
        )

    async def __call__(self, request: Request) -> Response:
        """Passes a request through, and its answer back as it comes. The body is passed on piece by
        piece, and the service bounds it."""
        try:
            url = _target(request.scope)
            headers = [
                (name.decode(), value.decode())
                for name, value in request.headers.raw
                if name.lower() not in _NOT_SENT
            ]
        except ValueError as error:
            message = f"this request cannot be passed on: {error}; percent-encode what is not ASCII"
            return JSONResponse(_error(message, "invalid_request_error", 400), 400)
        has_body = "content-length" in request.headers or "transfer-encoding" in request.headers
        body = request.stream() if has_body else None
        try:
            answer = await self._session.request(
                request.method, url, data=body, headers=headers, allow_redirects=False
            )
        except aiohttp.ClientError as error:
            return JSONResponse(_lost(error), 503)
        response = StreamingResponse(_pieces(answer), answer.status)
        response.raw_headers = [
            (name.lower(), value) for name, value in answer.raw_headers if name.lower() not in _NOT_ANSWERED
        ]
        return response

    async def check_health(self) -> None:
        """Raises RuntimeError unless the service takes requests. Ray Serve replaces a replica that keeps
        failing."""
        status, text = await self._ask("/ready")
        if status != 200:
            raise RuntimeError(f"the service is not ready: {text}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the service's waiting prompt tokens, and the share of its pool that requests hold."""
        _, text = await self._ask("/metrics")
        return {
            name: float(line.rsplit(" ", 1)[1])
            for name, start in _METRICS.items()
            for line in text.splitlines()
            if line.startswith(start)
        }

    async def _ask(self, path: str) -> tuple[int, str]:
        """Returns the status and the text of the service's answer. Raises RuntimeError if there is none: Ray
        pickles errors for its controller, and aiohttp's cannot be unpickled."""
        key = os.environ.get(_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with self._session.get(_LOCAL + path, headers=headers) as answer:
                return answer.status, await answer.text()
        except aiohttp.ClientError as error:
            raise RuntimeError(f"the service does not answer {path}: {error}") from None

    async def __del__(self) -> None:
        """Lets the service drain and end."""
        self._service.terminate()
        await asyncio.to_thread(self._service.wait)
        await self._session.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def app(arguments: dict[str, str]) -> serve.Application:
    """Returns the application, for `serve run` and the configuration file of `serve deploy`."""
    settings = _settings(arguments)
    deployment = serve.deployment(
        Replica,
        name="lightkv",
        max_ongoing_requests=settings.max_ongoing_requests,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=settings.drain_seconds + _MARGIN_SECONDS,
        autoscaling_config={
            "min_replicas": settings.min_replicas,
            "max_replicas": settings.max_replicas,
            "policy": {
                "policy_function": WaitingTokens,
                "policy_kwargs": {"tokens_per_replica": settings.waiting_tokens},
            },
        },
    )
    return deployment.bind(settings)


def _settings(arguments: dict[str, str]) -> Settings:
    kinds = {field.name: type(field.default) for field in fields(Settings)}
    if unknown := sorted(arguments.keys() - kinds.keys()):
        raise ValueError(f"no setting is named {', '.join(unknown)}; there are {', '.join(kinds)}")
    return Settings(**{name: kinds[name](value) for name, value in arguments.items()})


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields an answer as it comes. A stream of events that breaks off ends with an event that says so."""
    try:
        async for piece in answer.content.iter_any():
            yield piece
    except aiohttp.ClientError as error:
        if answer.content_type != "text/event-stream":
            raise
        yield b"data: " + json.dumps(_lost(error)).encode() + b"\n\n"
    finally:
        answer.close()


def _target(scope: Scope) -> URL:
    """Returns where the service has what a request asks for, byte by byte. Raises ValueError if that is no
    path."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    if not path.startswith(b"/"):
        raise ValueError(f"its target is {path!r}, which does not begin with /")
    target = b"?".join(filter(None, (path, scope["query_string"])))
    return URL(_LOCAL + quote(target, safe=_SENT_AS_IT_IS), encoded=True)


def _lost(error: Exception) -> dict[str, Any]:
    message = f"the replica has lost its service ({error}); send the request again"
    return _error(message, "server_error", 503)


def _error(message: str, kind: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
