"""The API process: it reads its settings, serves the application of `app.py`, and ends when its router does."""

import asyncio
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import uvicorn
import uvloop
from starlette.types import ASGIApp, Message

from lightkv.errors import LightKVError
from lightkv.router.api.http.guard import WARM_UP
from lightkv.router.api.http.server import make_server
from lightkv.router.service.access.key_file import ApiKeys
from lightkv.router.service.api_settings import ServeSettings
from lightkv.router.service.child_process import freeze_objects, ignore_signals, map_large_blocks
from lightkv.router.service.log_stream import write_in_background
from lightkv.router.service.router_client import RouterClient
from lightkv.router.text.tokenizer import Tokenizer, UnreadableTokenizer

from .app import create_app

NUM_TEXT_THREADS = 2
_NO_MODEL = "\0"
MODEL_CHECK_SECONDS = 20.0  # for the worker to refuse the model, with a better reason than the tokenizer's


async def serve(settings: ServeSettings) -> None:
    """Serves until the router has ended and open responses are finished.

    Prints "ready" to standard output once the server listens and takes requests. Raises RouterUnreachable,
    UnreadableTokenizer, and OSError for a certificate that cannot be read.
    """
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_TEXT_THREADS, "text"))
    keys = ApiKeys(settings.api.api_key, settings.api.api_key_file)
    if keys.any_limits:
        print("lightkv api: the limits of API keys count from this start on", file=sys.stderr, flush=True)
    client = await RouterClient.connect(Path(settings.router_socket))
    router_ended = asyncio.create_task(client.closed())
    try:
        tokenizer = Tokenizer(Path(settings.model_directory), settings.chat_template)
    except UnreadableTokenizer:
        # If the model cannot run at all, the worker refuses it and gives a better reason.
        became_ready = asyncio.create_task(client.became_ready.wait())
        waiting = [became_ready, router_ended]
        await asyncio.wait(waiting, timeout=MODEL_CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        became_ready.cancel()
        if router_ended.done():
            return
        raise
    tracer = None
    if settings.api.otlp_endpoint is not None:
        from lightkv.router.api.operators.tracing import SpanTracer

        tracer = SpanTracer.to_collector(settings.api.otlp_endpoint, settings.api.served_model_name[0])
    app = create_app(client, tokenizer, settings.api, keys, [tracer.record] if tracer is not None else [])
    tokenizer.prepare()  # the worker takes longer to load the model
    await warm_up(app, keys.first)
    server = make_server(app, settings)
    freeze_objects()
    serving = asyncio.create_task(server.serve([socket.socket(fileno=settings.listen_fd)]))
    announcing = asyncio.create_task(_announce_ready(server, client))
    await asyncio.wait([serving, router_ended], return_when=asyncio.FIRST_COMPLETED)
    announcing.cancel()
    server.should_exit = True  # open responses end first, the incomplete ones with an error
    await serving
    await app.state.grammars.close()
    await client.close()
    if tracer is not None:
        tracer.close()


async def warm_up(app: ASGIApp, api_key: str | None) -> None:
    """Sends the application a request of each kind, for a model that does not exist. After it, the first real
    request takes about as long as any other."""
    key = [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []

    async def send(message: Message) -> None:
        pass

    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    for path, content in (("completions", {"prompt": [1]}), ("chat/completions", chat)):
        body = msgspec.json.encode({"model": _NO_MODEL, "stream": True, **content})
        parts = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive(parts: Iterator[Message] = parts) -> Message:
            return next(parts, {"type": "http.disconnect"})

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": f"/v1/{path}",
            "query_string": b"",
            "extensions": {WARM_UP: {}},
            "headers": [(b"content-type", b"application/json"), *key],
        }
        await app(scope, receive, send)


async def _announce_ready(server: uvicorn.Server, client: RouterClient) -> None:
    """Prints "ready" once requests can be sent. The launcher waits for this line, because it may hear from the
    router earlier than this process does."""
    while not server.started:
        await asyncio.sleep(0.01)
    await client.became_ready.wait()
    print("ready", flush=True)


def main() -> int:
    """Runs `python -m lightkv.router.api.process`, with `ServeSettings` as JSON on standard input.

    Settings come over standard input so that the API keys do not appear in the list of processes. Signals are
    left to the launcher. Returns 1, because this process ends only after its router has ended, or if it could
    not start.
    """
    ignore_signals()
    write_in_background()
    map_large_blocks()
    sys.set_int_max_str_digits(640)  # the least that Python allows: parsing longer numbers takes long
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=ServeSettings)
    try:
        uvloop.run(serve(settings))
    except (LightKVError, OSError) as error:
        print(f"lightkv api: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
