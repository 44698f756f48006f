"""The API process for tests, started over a fake router, and reading what a raw connection receives."""

import os
import socket
import subprocess
import sys
from typing import Any

import msgspec

from lightkv.router.config import EngineConfig
from lightkv.router.model_files import resolve
from lightkv.router.service.api_settings import ApiSettings, ServeSettings

from .fake_router import MODEL, ApiUnderTest


def start_api_process(
    api: ApiUnderTest, listener: socket.socket, limits: dict[str, Any] | None = None, **settings: Any
) -> subprocess.Popen[bytes]:
    """Starts an API process on `listener`, connected to the fake router of `api`.

    `limits`: fields of ApiSettings. `settings`: further fields of ServeSettings.
    """
    os.set_inheritable(listener.fileno(), True)
    serve_settings = ServeSettings(
        api=ApiSettings(served_model_name=(MODEL,), **(limits or {})),
        model_directory=str(resolve(EngineConfig.model, report=lambda line: None)),
        router_socket=str(api.router_socket),
        listen_fd=listener.fileno(),
        **settings,
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "lightkv.router.api.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[listener.fileno()],
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(serve_settings))
    process.stdin.close()
    return process


def until_closed(connection: socket.socket) -> bytes:
    """Returns the bytes that arrive until the peer closes the connection."""
    received = b""
    while data := connection.recv(65536):
        received += data
    return received
