"""A whole service for tests, with real processes and a model of two random layers with the default
tokenizer."""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.common.random_model import random_model
from lightkv.router.cli.http_client import UnixConnection
from lightkv.router.config import EngineConfig
from lightkv.router.model_files import resolve
from tests.support.hybrid_models import HYBRIDS, hybrid
from tests.support.tiny_architectures import random_weights, tiny
from tests.support.windowed_models import FAMILIES, own_answers

PROCESSES = {
    "lightkv.router.cli": "cli",
    "lightkv.router.service.router_process": "router_process",
    "lightkv.router.api.process": "api",
    "lightkv.router.service.worker": "worker",
    "lightkv.router.api.grammars.check_process": "check_process",
}
MARK = "LIGHTKV_TEST_SERVICE"  # set in the environment of a service's processes, to find them
API_KEY = "a-key-of-the-tests"
COMPLETIONS = "/v1/completions"
LONG_PROMPT = [(7 * i) % 9000 + 20 for i in range(8000)]


def save_tiny_model(directory: Path, hidden_size: int = 32, family: str = "") -> Path:
    """Saves a model of two random layers with the default model's tokenizer and a context of 8,192 tokens. Its
    heads have a quarter of `hidden_size` dims. `family`: of `windowed_models` or
    `hybrid_models`, whose layers it has instead."""
    source = resolve(EngineConfig.model, lambda line: None)
    directory.mkdir()
    torch.manual_seed(0)
    sizes = {
        "vocab_size": json.loads((source / "config.json").read_text())["vocab_size"],
        "max_position_embeddings": 8192,
    }
    if family in HYBRIDS:
        model = hybrid(family, **sizes)
    elif family:
        chosen = FAMILIES[family]
        model = random_weights(tiny(chosen.model_type, fields={**chosen.fields, **sizes}))
    else:
        config = LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            **sizes,
        )
        model = random_model(config, torch.device("cpu"), torch.float32)
    model.save_pretrained(directory)
    for file in source.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "chat_template")):
            shutil.copy(file, directory)
    return directory


def own_text(model: Path, prompt: str, max_tokens: int) -> str:
    """Returns what transformers generates greedily with a saved model, as `Served.complete` asks for it."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode(prompt).ids
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return str(tokenizer.decode(own_answers(own, [ids], max_tokens)[0]))


class Served:
    """Runs `lightkv serve` in its own process, and sends requests to it."""

    def __init__(
        self, model: Path, log: Path, *args: str, api_key: str = "", env: dict[str, str] | None = None
    ) -> None:
        self.log = log
        self.url = ""
        self._mark = uuid.uuid4().hex
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        command = [sys.executable, "-m", "lightkv.router.cli", "serve", str(model), "--port", "0"]
        kv_dtype = ("--kv-dtype", EngineConfig.kv_dtype)  # that of the tests' own --kv-dtype
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [*command, "--device", "cpu", "--max-total-tokens", "8192", *kv_dtype, *args],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,  # a signal to its group has the effect of Ctrl-C in a terminal
                env=os.environ
                | {MARK: self._mark, "OMP_NUM_THREADS": "1", "LIGHTKV_API_KEY": api_key}
                | (env or {}),
            )

    def wait_ready(self) -> "Served":
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("lightkv serves "), self.log.read_text()
        self.url = line.split()[-1]
        return self

    def processes(self) -> dict[str, int]:
        """Returns the running processes of this service, by the name of their module. A child that has not
        called exec yet has its parent's name; the parent, which is older, is returned."""
        return {name: pids[0] for name, pids in self.all_processes().items()}

    def all_processes(self) -> dict[str, list[int]]:
        """Returns the running processes of this service, by the name of their module, the oldest first."""
        found: dict[str, list[int]] = {}
        for directory in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
            with suppress(OSError):  # the process has ended, or belongs to another user
                if f"{MARK}={self._mark}".encode() in (directory / "environ").read_bytes().split(b"\0"):
                    argv = (directory / "cmdline").read_bytes().decode().split("\0")
                    name = next(word for word in argv if word.startswith("lightkv.router."))
                    found.setdefault(PROCESSES[name], []).append(int(directory.name))
        return found

    def connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        if parts.scheme == "unix":
            return UnixConnection(parts.path)
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)

    def request(
        self, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any], http.client.HTTPMessage]:
        """Returns the status, the JSON and the headers of an answer."""
        connection = self.connect()
        data = None if body is None else json.dumps(body)
        connection.request(
            "GET" if body is None else "POST", path, data, self._headers if headers is None else headers
        )
        response = connection.getresponse()
        content = json.loads(response.read())
        connection.close()
        return response.status, content, response.headers

    def complete(self, prompt: str = "Once", max_tokens: int = 4) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        status, content, _ = self.request(COMPLETIONS, body)
        assert status == 200, content
        return str(content["choices"][0]["text"])

    def ask(self, **fields: Any) -> list[str]:
        """Returns all texts of a greedy answer."""
        status, content, _ = self.request(COMPLETIONS, {"temperature": 0, "ignore_eos": True, **fields})
        assert status == 200, content
        return [choice["text"] for choice in content["choices"]]

    def check_many_answers_to_a_long_prompt(self) -> None:
        """The plan once carried the whole prompt for each answer with penalties, which is 32 kB here."""
        asked = {"prompt": LONG_PROMPT, "max_tokens": 3, "repetition_penalty": 1.1}
        self.ask(prompt=LONG_PROMPT, max_tokens=1)
        (alone,) = self.ask(**asked)
        for n in (8, 60):
            assert self.ask(**asked, n=n) == [alone] * n

    def at_rest(self) -> dict[str, Any]:
        """Returns the counts of /load once no request runs, when no token may be held."""
        load: dict[str, Any] = {}

        def rests() -> bool:
            load.update(self.request("/load")[1])
            return load["capacity"] > 0 and not (load["num_running"] or load["num_waiting"] or load["held"])

        wait_until(rests)
        assert load["free"] + load["cached"] == load["capacity"], load
        return load

    @contextmanager
    def stream(self, max_tokens: int) -> Iterator[Iterator[Any]]:
        """Starts an answer and yields its events, after the first of them has arrived."""
        body = {"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True}
        with self.events(COMPLETIONS, body) as events:
            assert "choices" in next(events)
            yield events

    @contextmanager
    def events(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[Any]]:
        """Sends a request for a stream and yields its events. The connection closes with the block."""
        connection = self.connect()
        connection.request("POST", path, json.dumps({**body, "stream": True}), self._headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        yield _events(response)
        connection.close()

    def signal(self, number: int) -> None:
        """Sends a signal to the launcher's process group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def signal_each(self, number: int) -> None:
        """Sends a signal to each process, as a service manager may. Some processes may have ended by then."""
        for pid in self.processes().values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self, seconds: float = 60.0) -> int:
        """Waits for the end of the service and of all its processes. Returns the exit code."""
        code = self.process.wait(seconds)
        wait_until(lambda: not self.processes(), 20.0)
        return code

    def close(self) -> None:
        """Kills the processes that a failed test has left."""
        for pid in self.processes().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


class SharedService:
    """A service that tests share, one after the other. `begin` starts it."""

    def __init__(self, begin: Callable[[], Served]) -> None:
        self._begin = begin
        self._started: list[Served] = []

    def running(self) -> Served:
        """Returns the service of the test before, or another one if that has ended."""
        if not self._started or self._started[-1].process.poll() is not None:
            self._started.append(self._begin())
            self._started[-1].wait_ready()
        return self._started[-1]

    def close(self) -> None:
        for served in self._started:
            served.close()


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    while line := response.readline():
        if data := line.decode().removeprefix("data: ").strip():
            yield data if data == "[DONE]" else json.loads(data)


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.02)


@contextmanager
def starting(model: Path, log: Path, sockets: Path) -> Iterator[Callable[..., Served]]:
    """Yields a function that starts services with the given arguments. They end with the block."""
    started: list[Served] = []

    def begin(*args: str) -> Served:
        started.append(Served(model, log, *args, env={"TMPDIR": str(sockets)}))
        return started[-1]

    try:
        yield begin
    finally:
        for served in started:
            served.close()


Start = Callable[..., Served]  # starts a service with its sockets in a directory of the test
