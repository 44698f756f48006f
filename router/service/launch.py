"""Starts the service's processes, watches them, and ends them in order.

    launcher ─┬─ router ── worker     (the router starts its worker)
              └─ api

Problems that need no model (port, certificate, directory) are found before anything is loaded. The sockets
between the processes lie in a temporary directory of this service, which only this user may enter.
The router ends with the launcher, and the worker and the API end with the router. Signals are handled here
alone: the other processes ignore them, and the launcher sends the router its orders.
"""

import asyncio
import ipaddress
import os
import signal
import socket
import ssl
import stat
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console

from lightkv.errors import LightKVError, require_packages
from lightkv.router.config import (
    API_KEY_VARIABLE,
    METRICS_KEY_VARIABLE,
    EngineConfig,
    InvalidConfig,
    ServiceConfig,
)
from lightkv.router.model_files import resolve
from lightkv.router.service.access.key_file import read_keys
from lightkv.router.terminal import progress, say

from .api_settings import ServeSettings, api_settings
from .child_process import SIGNALS, command, how_ended, signals_held_back
from .messages import FrameStream, Status, ToApi
from .router_process import ABORT, ABORT_SECONDS, DRAIN, RANKS_FILE, RouterSettings, remove

_ROUTER_SOCKET = "router.sock"
_MAX_PATH_BYTES = 107  # of a unix socket (Linux)
_BACKLOG = 2048
_SECRETS = (API_KEY_VARIABLE, METRICS_KEY_VARIABLE)
_FLUSH_SECONDS = 5  # for open responses to reach their clients, once the router has ended
_POLL_SECONDS = 0.02
_LAST_SECONDS = 1.0  # for the router to end after the API has, because its end may be the reason
_KILL_SECONDS = 5.0  # for a process to end by itself, beyond its time limit


class CannotServe(LightKVError):
    """The service cannot use something that it needs from this machine. Nothing was started."""


@dataclass(frozen=True)
class Site:
    """The address and the directory that a service uses. `leftovers`: paths to remove when it has ended."""

    listener: socket.socket
    url: str
    is_local: bool  # whether only this machine can reach it
    directory: Path
    leftovers: list[str]

    @property
    def router_socket(self) -> str:
        """The path of the socket on which the router listens."""
        return str(self.directory / _ROUTER_SOCKET)


def serve(engine: EngineConfig, service: ServiceConfig, notes: Console) -> int:
    """Runs a service until a signal (SIGTERM, Ctrl-C) stops it or it fails. Returns the exit code.

    A line with the URL goes to standard output, progress to `notes`. The first signal lets running requests
    finish within the shutdown timeout, a second one aborts them; the code is 0 in both cases. This function
    has to be called in the main thread, which receives the signals.

    Raises CannotServe, InvalidConfig, MissingExtra, and the errors of `model_files.resolve`, before any process
    is started.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, until processes run
    try:
        check_keys(service)
        _check_certificate(service)
        template = _read_template(service)
        if service.otlp_endpoint is not None:
            packages = "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"
            require_packages("--otlp-endpoint", "otel", *packages)
        with _take_site(service) as site:
            with progress(notes, f"looking for {engine.model}") as report:
                directory = resolve(engine.model, report, engine.revision)
            service = replace(service, served_model_name=service.served_model_name or (engine.model,))
            engine = replace(engine, model=str(directory), revision=None)  # of which that is the copy
            running = _Service(engine, service, site, notes, template)
            return asyncio.run(running.run())
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)


# --------------------------------------------------------------------------------
# Before anything is loaded


def check_keys(service: ServiceConfig) -> None:
    """Raises CannotServe for a file of keys that cannot be read, and InvalidConfig for one that has none, or
    where there has to be a key."""
    if service.cache_namespace == "key" and not (service.api_key or service.api_key_file):
        raise InvalidConfig(
            "--cache-namespace is 'key', and there is no --api-key; give API keys, or another namespace"
        )
    for file in filter(None, (service.api_key_file, service.metrics_key_file)):
        try:
            read_keys(Path(file))
        except OSError as error:
            raise CannotServe(f"the file of keys {file} cannot be read ({error}); give another") from error


def _read_template(service: ServiceConfig) -> str | None:
    """Returns the text of --chat-template, if it is given. Raises CannotServe."""
    if service.chat_template is None:
        return None
    try:
        return Path(service.chat_template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CannotServe(f"--chat-template {service.chat_template} cannot be read ({error})") from error


def _check_certificate(service: ServiceConfig) -> None:
    if service.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # With an empty password, a key that needs one is refused; otherwise OpenSSL would ask for it.
        context.load_cert_chain(service.ssl_certfile, service.ssl_keyfile, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = " and ".join(filter(None, (service.ssl_certfile, service.ssl_keyfile)))
        raise CannotServe(
            f"the certificate in {files} cannot be used ({error}); give PEM files, the key without a password"
        ) from error


@contextmanager
def _take_site(service: ServiceConfig) -> Iterator[Site]:
    """Takes the address and the directory for the block, and removes what is left of them at its end."""
    with ExitStack() as stack:
        listener = stack.enter_context(_bind(service))
        directory = _make_directory()
        leftovers = [*(str(directory / name) for name in (_ROUTER_SOCKET, RANKS_FILE)), str(directory)]
        if service.uds is not None:
            leftovers.append(os.path.abspath(service.uds))
        stack.callback(remove, leftovers)
        is_local = service.uds is not None or ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        yield Site(listener, _url(service, listener), is_local, directory, leftovers)


def _bind(service: ServiceConfig) -> socket.socket:
    """Returns a listening socket. It listens at once, because two sockets that are only bound may share a
    port."""
    try:
        if service.uds is not None:
            return _bind_unix(Path(service.uds))
        family, _, _, _, address = socket.getaddrinfo(
            service.host, service.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        is_ipv6 = family == socket.AF_INET6  # whose :: takes IPv4, too
        return socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=is_ipv6)
    except OSError as error:
        where = f"{service.host} port {service.port}" if service.uds is None else service.uds
        reason = str(error.strerror or error).partition(" (while")[0]  # which names the address again
        raise CannotServe(
            f"cannot listen on {where} ({reason}); stop the process that does, or give "
            "another --port, --host or --uds"
        ) from error


def _bind_unix(path: Path) -> socket.socket:
    """Returns a listening unix socket. A socket file on which no process listens is replaced. Raises OSError
    if a server listens there."""
    _check_length(path, "--uds")
    listener = socket.socket(socket.AF_UNIX)
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.stat().st_mode):
                with socket.socket(socket.AF_UNIX) as probe:
                    try:
                        probe.connect(str(path))
                    except ConnectionRefusedError:
                        path.unlink()
        previous = os.umask(0o177)  # only this user may connect, from the start
        try:
            listener.bind(str(path))
        finally:
            os.umask(previous)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _url(service: ServiceConfig, listener: socket.socket) -> str:
    if service.uds is not None:
        return f"unix:{os.path.abspath(service.uds)}"
    port = listener.getsockname()[1]
    host = f"[{service.host}]" if ":" in service.host else service.host
    return f"{'http' if service.ssl_certfile is None else 'https'}://{host}:{port}"


def _make_directory() -> Path:
    """Makes a temporary directory, which only this user may enter. Raises CannotServe, InvalidConfig."""
    try:
        _check_length(Path(tempfile.gettempdir(), "lightkv-abcdefgh", _ROUTER_SOCKET).absolute(), "TMPDIR")
        return Path(tempfile.mkdtemp(prefix="lightkv-")).absolute()
    except OSError as error:
        raise CannotServe(
            f"no directory for sockets can be made ({error}); set TMPDIR to one that can be written"
        ) from error


def _check_length(path: Path, flag: str) -> None:
    num_bytes = len(os.fsencode(path))
    if num_bytes > _MAX_PATH_BYTES:
        raise InvalidConfig(
            f"{path} is {num_bytes} bytes long, and a socket's path may have at most {_MAX_PATH_BYTES}; give a "
            f"shorter {flag}"
        )


# --------------------------------------------------------------------------------
# The processes


@dataclass
class _Service:
    """The router and the API process, from their start to their end. `template`: a chat template to use."""

    engine: EngineConfig
    service: ServiceConfig
    site: Site
    notes: Console
    template: str | None
    router: Process | None = None
    is_stopping: bool = False

    async def run(self) -> int:
        """Starts both processes, waits until one ends, and ends the other. Returns the exit code."""
        loop = asyncio.get_running_loop()
        with signals_held_back():
            for number in SIGNALS:
                loop.add_signal_handler(number, self._stop)
            router = self.router = await self._start_router()
        router_ended = asyncio.create_task(router.wait())
        api: Process | None = None
        reporting: asyncio.Task[None] | None = None
        try:
            stream = await self._reach(router)
            if stream is not None:
                with signals_held_back():
                    api = await self._start_api()
                api_ended = asyncio.create_task(api.wait())
                reporting = asyncio.create_task(self._report(stream, api))
                await asyncio.wait((router_ended, api_ended), return_when=asyncio.FIRST_COMPLETED)
                # The API may end first, because the router closes its stream before it exits.
                await asyncio.wait(
                    (router_ended,), timeout=_KILL_SECONDS if self.is_stopping else _LAST_SECONDS
                )
                if not router_ended.done():
                    say(self.notes, f"the API process {how_ended(api_ended.result())}")
                    return 1
            if code := await router_ended:
                say(self.notes, f"the router process {how_ended(code)}")
            return int(code != 0)
        finally:
            if reporting is not None:
                await asyncio.wait((reporting,), timeout=1.0)  # for the router's last status
                reporting.cancel()
            await _end(router)
            if api is not None:
                await _end(api)

    def _stop(self) -> None:
        """Handles a signal. At the first, the router drains, while the API answers 503; at the second, it
        aborts."""
        router = self.router
        if router is None or router.returncode is not None:
            return
        assert router.stdin is not None
        router.stdin.write(ABORT if self.is_stopping else DRAIN)
        seconds = 0.0 if self.is_stopping else self.service.shutdown_timeout
        again = "aborting the running requests"
        first = f"stopping: running requests have {seconds:g} s to finish (the same signal again aborts them)"
        say(self.notes, again if self.is_stopping else first)
        self.is_stopping = True
        asyncio.get_running_loop().call_later(seconds + ABORT_SECONDS + _KILL_SECONDS, _kill, router)

    async def _start_router(self) -> Process:
        """Starts the router. Its standard input stays open, so that it ends when this process does."""
        settings = RouterSettings(
            config=self.engine,
            socket=self.site.router_socket,
            max_queued_requests=self.service.max_queued_requests,
            shutdown_timeout=self.service.shutdown_timeout,
            step_timeout=self.service.step_timeout,
            leftovers=self.site.leftovers,
        )
        return await _spawn("service.router_process", settings, stdout=DEVNULL)

    async def _start_api(self) -> Process:
        listener = self.site.listener
        settings = ServeSettings(
            api=api_settings(self.engine, self.service, self.site.is_local),
            model_directory=self.engine.model,
            chat_template=self.template,
            router_socket=self.site.router_socket,
            listen_fd=listener.fileno(),
            shutdown_timeout=_FLUSH_SECONDS,
        )
        api = await _spawn("api.process", settings, PIPE, (listener.fileno(),))
        listener.close()  # the API has it alone now, so that its end refuses new connections
        assert api.stdin is not None
        api.stdin.close()
        return api

    async def _reach(self, router: Process) -> FrameStream[ToApi] | None:
        """Returns a stream to the router once it listens, or None if it ends before that."""
        while router.returncode is None:
            try:
                reader, writer = await asyncio.open_unix_connection(self.site.router_socket)
                return FrameStream(reader, writer, ToApi)
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(_POLL_SECONDS)
        return None

    async def _report(self, stream: FrameStream[ToApi], api: Process) -> None:
        """Shows the router's status: progress until it is ready, then the URL, then every change."""
        changes = _changes(stream)
        with progress(self.notes, "starting the router") as report:
            async for status in changes:
                if status.state == "ready":
                    break
                report(status.detail)
            else:
                return
            assert api.stdout is not None
            if not await api.stdout.readline():
                return
        has_keys = self.service.api_key or self.service.api_key_file
        if not has_keys and not self.site.is_local:
            say(self.notes, "no --api-key: every machine that reaches this address can use the service")
        names = ", ".join(self.service.served_model_name)
        print(f"lightkv serves {names} at {self.site.url}", flush=True)
        async for status in changes:
            say(self.notes, status.detail)


async def _changes(stream: FrameStream[ToApi]) -> AsyncIterator[Status]:
    """Yields the router's status whenever its state or detail changes, except to draining, until the stream
    ends."""
    last = None
    while (message := await stream.receive()) is not None:
        if isinstance(message, Status) and message.state != "draining":
            if (message.state, message.detail) != last:
                yield message
            last = (message.state, message.detail)


async def _spawn(
    module: str, settings: msgspec.Struct, stdout: int, descriptors: tuple[int, ...] = ()
) -> Process:
    """Starts one of router/'s processes, which inherits descriptors. Its settings go to standard input,
    because all users can read a command line. The caller holds back signals meanwhile."""
    process = await asyncio.create_subprocess_exec(
        *command(module),
        stdin=PIPE,
        stdout=stdout,
        pass_fds=descriptors,
        start_new_session=True,  # Ctrl-C in a terminal is not sent to it
        env={name: value for name, value in os.environ.items() if name not in _SECRETS},
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(settings) + b"\n")
    return process


async def _end(process: Process) -> None:
    """Waits until a process has ended, and kills it if it takes too long. The router ends with its standard
    input, the API with the router."""
    assert process.stdin is not None
    process.stdin.close()
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _FLUSH_SECONDS + _KILL_SECONDS)
    _kill(process)
    await process.wait()


def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()
