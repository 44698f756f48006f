"""The routes that say how the service is, and that change what it keeps: models, health, counts, the cache and
sessions."""

import time
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from lightkv import __version__
from lightkv.router.api.answers.sessions import UnknownSession
from lightkv.router.api.metrics import CONTENT_TYPE

from .generation import Desk, json_response
from .sharing import session_name


class ServiceRoutes:
    """What the service says of itself."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._backend = desk.backend
        self._client = desk.backend.client
        self._settings = desk.settings
        self._created = int(time.time())

    async def release_session(self, request: Request) -> Response:
        """POST /v1/sessions/{session_id}/release: end a session; its tokens are cached like any others."""
        session_id = request.path_params["session_id"]
        if not self._backend.sessions.release(session_name(self._desk.settings, request, session_id)):
            raise UnknownSession(session_id)
        return json_response({"id": session_id, "object": "session", "released": True})

    async def models(self) -> Response:
        """GET /v1/models: return the names that requests may use for the model."""
        models = [self._described(name) for name in self._settings.served_model_name]
        return json_response({"object": "list", "data": models})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/{model}: describe one name."""
        return json_response(self._described(self._desk.model(request.path_params["model"])))

    async def health(self) -> Response:
        """GET /health: return 200 while the service takes requests and completes steps when there is work."""
        latest = self._client.latest
        is_healthy = latest.is_healthy
        body = {
            "healthy": is_healthy,
            "state": latest.status.state,
            "step_age": latest.status.load.step_age,
            "router_silence": latest.age,
        }
        return json_response(body, 200 if is_healthy else 503)

    async def ready(self) -> Response:
        """GET /ready: return 200 while the service takes requests and steps are not late."""
        latest = self._client.latest
        is_ready = latest.takes_requests
        body = {"ready": is_ready, "state": latest.status.state, "detail": latest.detail}
        return json_response(body, 200 if is_ready else 503)

    async def metrics(self) -> Response:
        """GET /metrics: return all series in Prometheus' text format."""
        return Response(self._backend.metrics.text(), media_type=CONTENT_TYPE)

    async def load(self) -> Response:
        """GET /load: return the router's counts as JSON."""
        status, age = self._client.latest
        state = {
            "state": status.state,
            "detail": status.detail,
            "router_silence": age,
            "kv_dtype": self._kv_type,
        }
        return json_response(state | msgspec.structs.asdict(status.load))

    async def pool_map(self) -> Response:
        """GET /map: return as JSON what every slot of the pool is used for."""
        return json_response(await self._client.pool_map())

    async def version(self) -> Response:
        """GET /version: return lightkv's version."""
        return json_response({"version": __version__})

    async def server_info(self) -> Response:
        """GET /server_info: return the version, the settings without secrets, and what runs the model."""
        info = self._client.status.info
        runner = None if info is None else msgspec.to_builtins(info)
        configuration = self._settings.configuration
        return json_response({"version": __version__, "configuration": configuration, "runner": runner})

    async def reset_cache(self) -> Response:
        """POST /reset_prefix_cache: evict every cached token that no running request holds."""
        return json_response({"num_evicted_tokens": await self._client.reset_cache()})

    @property
    def _kv_type(self) -> str | None:
        info = self._client.status.info
        return None if info is None else info.kv_type

    def _described(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "lightkv",
            "max_model_len": self._desk.max_model_len,
            "kv_dtype": self._kv_type,
        }
