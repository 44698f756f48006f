"""A small HTTP client of the service for the commands of the terminal: JSON answers, and streamed chats."""

import http.client
import json
import socket
import ssl
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import msgspec

from lightkv.errors import LightKVError
from lightkv.router.config import InvalidConfig

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_SECONDS = 600.0  # without a byte, because a request may wait long in the queue


class ServiceUnreachable(LightKVError):
    """No service answers at the address, or its answer broke off."""

    def __init__(self, url: str, reason: object) -> None:
        super().__init__(f"{url}: {reason}; is the service running? lightkv serve starts one")


class ServiceRefused(LightKVError):
    """The service answered with an error. `status`: the HTTP status, or the code of an error inside a
    stream."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(f"the service answers {status}: {message}")


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one answer: of the prompt, of its cached tokens (None if the service does not report
    them), and of new tokens."""

    num_prompt: int
    num_cached: int | None
    num_new: int


class ServiceClient:
    """A client of one service, which opens a connection for each request.

    `url`: an http or https URL, or unix: and the path of a socket. `cacert`: a PEM file of certificates to
    trust instead of the system's. Raises InvalidConfig for another URL or an unusable file. Every call
    may raise ServiceUnreachable and ServiceRefused.
    """

    def __init__(self, url: str, api_key: str | None = None, cacert: str | None = None) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        try:
            self._parts = urlsplit(url.rstrip("/"))
            is_tcp = self._parts.scheme in ("http", "https") and bool(self._parts.hostname)
            is_known = is_tcp or (self._parts.scheme == "unix" and bool(self._parts.path))
            self._port = self._parts.port
        except ValueError:  # the port is not a number
            is_known = False
        try:
            self._tls = None if cacert is None else ssl.create_default_context(cafile=cacert)
        except OSError as error:  # ssl.SSLError is one
            raise InvalidConfig(f"--cacert {cacert} cannot be used ({error}); give a PEM file") from error
        if not is_known:
            raise InvalidConfig(f"--url is {url!r}; give http://HOST:PORT, https://HOST:PORT or unix:PATH")

    def get(self, path: str) -> bytes:
        """Sends GET and returns the body of the answer."""
        with closing(self._connect()) as connection:
            try:
                return self._send(connection, "GET", path, None).read()
            except (OSError, http.client.HTTPException) as error:
                raise ServiceUnreachable(self._url, error) from error

    def chat(
        self, messages: list[dict[str, str]], options: dict[str, Any]
    ) -> Generator[str | Usage, None, None]:
        """Yields the answer to a chat in pieces of text, then its token counts.

        `options`: further fields of the request. Closing the iterator early aborts the answer in the service,
        too.
        """
        body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **options}
        with closing(self._connect()) as connection:
            try:
                response = self._send(connection, "POST", "/v1/chat/completions", json.dumps(body).encode())
                while line := response.readline():
                    data = line.removeprefix(b"data: ").strip()
                    if data == b"[DONE]":
                        return
                    if data:
                        yield from _pieces(json.loads(data))
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise ServiceUnreachable(self._url, error) from error
        raise ServiceUnreachable(self._url, "the answer broke off")

    def _connect(self) -> http.client.HTTPConnection:
        if self._parts.scheme == "unix":
            return UnixConnection(self._parts.path)
        host = self._parts.hostname or ""
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, self._port, timeout=TIMEOUT_SECONDS, context=self._tls)
        return http.client.HTTPConnection(host, self._port, timeout=TIMEOUT_SECONDS)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        base = "" if self._parts.scheme == "unix" else self._parts.path.removesuffix("/v1")
        connection.request(method, base + path, body, self._headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ServiceRefused(response.status, _error_text(response.read()))
        return response


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _pieces(chunk: dict[str, Any]) -> Iterator[str | Usage]:
    if "error" in chunk:
        raise ServiceRefused(chunk["error"]["code"], chunk["error"]["message"])
    for choice in chunk["choices"]:
        if text := choice["delta"].get("content"):
            yield text
    if usage := chunk.get("usage"):
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens")
        yield Usage(usage["prompt_tokens"], cached, usage["completion_tokens"])


def _error_text(body: bytes) -> str:
    """Returns the message of OpenAI's error object, or the beginning of any other body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
