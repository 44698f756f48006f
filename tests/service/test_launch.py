"""The service as processes: how it runs, and what keeps it from starting. `test_launch_end.py` ends it."""

import io
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightkv.memory_map import OWN
from lightkv.router.config import EngineConfig, InvalidConfig, ServiceConfig
from lightkv.router.model_files import ModelNotFound
from lightkv.router.service.child_process import command
from lightkv.router.service.launch import CannotServe, serve
from tests.support.served import API_KEY, COMPLETIONS, Served, SharedService, wait_until


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedService]:
    """A service with an API key and K/V in 8 bits."""

    def begin() -> Served:
        directory = tmp_path_factory.mktemp("shared")
        settings = ["--served-model-name", "tiny", "--kv-dtype", "int8", "--kv-skip-layers", "1"]
        settings += ["--shutdown-timeout", "60"]
        (directory / "s").mkdir()
        env = {"TMPDIR": str(directory / "s")}
        return Served(model, directory / "log", *settings, api_key=API_KEY, env=env)

    with closing(SharedService(begin)) as service:
        yield service


@pytest.fixture
def shared(service: SharedService) -> Served:
    return service.running()


# --------------------------------------------------------------------------------
# The running service


def test_a_request_is_answered_under_the_served_model_name(shared: Served) -> None:
    prompt = "The sun is a star, and the moon is not."
    assert shared.complete(prompt, 8) == shared.complete(prompt, 8)
    models = shared.request("/v1/models")[1]["data"]
    assert [model["id"] for model in models] == ["tiny"]
    wait_until(lambda: shared.request("/load")[1]["hit_tokens"] > 0)


def test_the_service_says_how_its_pool_holds_values(shared: Served) -> None:
    assert shared.complete()
    load = shared.at_rest()
    assert (load["kv_dtype"], load["capacity"]) == ("int8", 8192)
    assert load["num_ledger_checks"] > 0
    assert shared.request("/v1/models")[1]["data"][0]["kv_dtype"] == "int8"
    connection = shared.connect()
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {API_KEY}"})
    # Two layers of two heads, of 8 + 8 dims: one with two scales a head, the other in float32.
    assert 'bytes_per_token="176",cache_dtype="int8"' in connection.getresponse().read().decode()
    connection.close()
    assert "tokens in int8, layer 1 in float32" in shared.log.read_text()


def test_the_key_guards_the_service_and_no_process_shows_it(shared: Served) -> None:
    assert shared.request(COMPLETIONS, {"prompt": "a"}, headers={})[0] == 401
    assert shared.request("/load", headers={"Authorization": "Bearer wrong"})[0] == 401
    assert shared.request("/health", headers={})[0] == 200
    processes = shared.processes()
    assert set(processes) == {"cli", "router_process", "api", "worker"}
    for name, pid in processes.items():
        assert API_KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert (API_KEY.encode() in Path(f"/proc/{pid}/environ").read_bytes()) == (name == "cli")


def test_the_worker_alone_has_torch(shared: Served) -> None:
    loaded = {
        name: "libtorch" in Path(f"/proc/{pid}/maps").read_text() for name, pid in shared.processes().items()
    }
    assert loaded == {"cli": False, "router_process": False, "api": False, "worker": True}


def test_the_map_of_a_running_service(shared: Served) -> None:
    shared.at_rest()
    status, empty, _ = shared.request("/map")
    assert (status, empty["capacity"], empty["num_own"], empty["slots_per_cell"]) == (200, 8192, 0, 1)
    with shared.stream(4000) as events:
        found: dict[str, Any] = {}

        def maps_its_tokens() -> bool:
            found.update(shared.request("/map")[1])
            return found["num_own"] > 8

        wait_until(maps_its_tokens)
        rows = {cell for cell in found["cells"] if cell >= OWN}
        assert len(rows) == 1
        assert found["cells"].count(rows.pop()) == found["num_own"]
        num_own = found["num_own"]
        wait_until(lambda: shared.request("/map")[1]["num_own"] > num_own)  # the request continues
        assert "choices" in next(events)
    load = shared.at_rest()
    wait_until(lambda: shared.request("/map")[1]["num_own"] == 0)
    pool = shared.request("/map")[1]
    assert (pool["num_free"], pool["num_cached"]) == (load["free"], load["cached"])
    assert "Traceback" not in shared.log.read_text()


@pytest.mark.slow  # tests/engine/test_new_rows.py has the plans of such answers
def test_many_answers_with_penalties_to_a_long_cached_prompt(shared: Served) -> None:
    num_starts = shared.at_rest()["num_worker_starts"]
    shared.check_many_answers_to_a_long_prompt()
    assert shared.at_rest()["num_worker_starts"] == num_starts


def test_a_killed_worker_is_replaced(shared: Served) -> None:
    old, num_starts = shared.processes()["worker"], shared.at_rest()["num_worker_starts"]
    text = shared.complete()
    with shared.stream(4000) as events:
        os.kill(old, signal.SIGKILL)
        last = list(events)[-1]
    assert last["error"]["code"] == 503
    wait_until(lambda: shared.request("/health")[0] == 503)
    status, body, headers = shared.request(COMPLETIONS, {"prompt": "a"})
    assert status == 503
    assert body["error"]["type"] == "service_unavailable_error"
    assert int(headers["Retry-After"]) > 0
    wait_until(lambda: shared.request("/health")[0] == 200)
    assert shared.complete() == text
    assert shared.processes()["worker"] != old
    assert "SIGKILL" in shared.log.read_text()
    assert shared.at_rest()["num_worker_starts"] > num_starts


def test_the_launcher_loads_neither_torch_nor_a_web_server() -> None:
    heavy = {"torch", "transformers", "fastapi", "starlette", "uvicorn", "pydantic"}
    program = f"import sys, lightkv.router.service.launch; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_no_file_of_the_working_directory_is_imported_unless_this_process_imports_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m` puts the working directory first on the path, and so would run code of a foreign
    directory."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit(77)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    safe = subprocess.run(command("api.process"), input=b"{", capture_output=True, timeout=60)
    assert safe.returncode == 1
    assert b"msgspec.DecodeError" in safe.stderr
    monkeypatch.syspath_prepend(str(tmp_path))
    assert subprocess.run(command("api.process"), input=b"{", timeout=60).returncode == 77


def test_only_the_launcher_handles_signals(shared: Served) -> None:
    processes = shared.processes()
    with shared.stream(120) as events:
        for name in ("worker", "router_process", "api"):
            os.kill(processes[name], signal.SIGTERM)
            os.kill(processes[name], signal.SIGINT)
        assert list(events)[-1] == "[DONE]"
    assert shared.request("/ready")[0] == 200
    assert shared.complete()
    assert shared.processes() == processes


def test_sigterm_lets_requests_finish_and_admits_no_more(shared: Served) -> None:
    sockets = shared.log.parent / "s"
    (own,) = sockets.glob("lightkv-*")
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert stat.S_IMODE((own / "router.sock").stat().st_mode) == 0o600
    with shared.stream(150) as events:
        shared.process.terminate()
        wait_until(lambda: shared.request("/ready")[0] == 503)
        status, _, headers = shared.request(COMPLETIONS, {"prompt": "a"})
        assert (status, "Retry-After" in headers) == (503, True)
        received = list(events)
    assert received[-1] == "[DONE]"
    assert received[-2]["choices"][0]["finish_reason"] == "length"
    assert shared.wait() == 0, shared.log.read_text()
    assert list(sockets.iterdir()) == []


# --------------------------------------------------------------------------------
# Failures at the start


def refused(service: ServiceConfig, model: str = "./no-such-model") -> str:
    """Returns why the service does not start. The reason is found before the model, which does not exist."""
    with pytest.raises((CannotServe, InvalidConfig)) as raised:
        serve(EngineConfig(model), service, Console(file=io.StringIO()))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        text = refused(ServiceConfig(port=port))
    assert f"cannot listen on 127.0.0.1 port {port} (Address already in use)" in text


def test_an_address_of_another_machine() -> None:
    assert "cannot listen on 192.0.2.1 port 0" in refused(ServiceConfig(host="192.0.2.1", port=0))
    assert "cannot listen on no.such.host.invalid" in refused(ServiceConfig(host="no.such.host.invalid"))


def test_a_socket_in_use_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "public.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        assert "Address already in use" in refused(ServiceConfig(uds=str(path)))
        assert path.is_socket()
    path.unlink()
    path.write_text("no socket")
    assert "Address already in use" in refused(ServiceConfig(uds=str(path)))
    assert path.read_text() == "no socket"


def test_a_socket_without_a_listener_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "public.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
    with pytest.raises(ModelNotFound):
        serve(EngineConfig("./no-such-model"), ServiceConfig(uds=str(path)), Console(file=io.StringIO()))
    assert not path.exists()


def test_a_directory_that_cannot_be_made_or_is_too_deep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(file))
    assert "set TMPDIR to one that can be written" in refused(ServiceConfig(port=0))
    deep = tmp_path / ("d" * 120)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert "at most 107" in refused(ServiceConfig(port=0))
    assert "at most 107" in refused(ServiceConfig(uds=str(deep)))


@pytest.mark.parametrize("content", [None, b"", b"no certificate", b"\xff\x00"])
def test_a_certificate_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "cert.pem"
    if content is not None:
        path.write_bytes(content)
    text = refused(ServiceConfig(port=0, ssl_certfile=str(path)))
    assert text.startswith(f"the certificate in {path} cannot be used (")


def test_a_failed_start_is_one_line_and_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        argv = [sys.executable, "-m", "lightkv.router.cli", "serve", "--port", port]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"lightkv: cannot listen on 127.0.0.1 port {port}")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": 65536}, "--port is 65536"),
        ({"port": -1}, "--port is -1"),
        ({"max_queued_requests": 0}, "--max-queued-requests is 0"),
        ({"shutdown_timeout": -1.0}, "--shutdown-timeout is -1"),
        ({"shutdown_timeout": float("nan")}, "--shutdown-timeout is nan"),
        ({"api_key": ("k", "")}, "--api-key is empty"),
        ({"api_key": (" key",)}, "--api-key"),
        ({"api_key_file": ""}, "--api-key-file is empty"),
        ({"cache_namespace": "tenant"}, "--cache-namespace is 'tenant'; give one of key, header"),
        ({"ssl_keyfile": "key.pem"}, "without --ssl-certfile"),
        ({"uds": ""}, "--uds is empty"),
        ({"host": ""}, "--host is empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_settings_out_of_bounds(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        ServiceConfig(**settings)
