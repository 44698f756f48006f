"""The commands `lightkv serve`, `chat` and `top`: their options, and the two clients over a fake router."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import typer
from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape
from typer.testing import CliRunner

from lightkv.memory_map import Owner
from lightkv.router.cli.app import app
from lightkv.router.cli.http_client import ServiceClient, ServiceRefused, ServiceUnreachable, Usage
from lightkv.router.cli.monitor import LoadReport, bar, frame
from lightkv.router.config import EngineConfig, ServiceConfig, bounds, declared
from lightkv.router.service import launch
from lightkv.router.service.access.key_usage import KeyUsage
from lightkv.router.service.messages import Load, Mapped
from lightkv.router.service.router_client import MAP_SECONDS
from tests.support.fake_router import MODEL, POOL, TEXT, ApiUnderTest, idle, ids_of, service, wait_until
from tests.support.served import API_KEY


def run(
    *args: str, stdin: str | bytes | None = None, env: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Returns the command's exit code, standard output and standard error."""
    result = CliRunner().invoke(app, list(args), input=stdin, prog_name="lightkv", env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiUnderTest]:
    with service(
        tmp_path_factory.mktemp("api"), api_key=(API_KEY,), report_cached_tokens=True
    ).running() as under_test:
        yield under_test


@pytest.fixture
def api(shared: ApiUnderTest) -> ApiUnderTest:
    """A service with an API key, which answers TEXT repeatedly."""
    return idle(shared)


@pytest.fixture
def url(api: ApiUnderTest) -> str:
    return f"http://127.0.0.1:{api.port}"


def chat(url: str, *args: str, stdin: str) -> tuple[int, str, str]:
    return run("chat", "--url", url, "--api-key", API_KEY, "--max-tokens", "5", *args, stdin=stdin)


def prompt_text(api: ApiUnderTest, request_idx: int) -> str:
    """Returns the prompt that reached the router, as text in the chat template."""
    return api.tokenizer.decode(ids_of(api.router.submits[request_idx]), skip_special_tokens=False)


# --------------------------------------------------------------------------------
# serve


def test_every_setting_is_an_option_of_serve() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = {option.name: option for option in commands["serve"].params}
    for settings in (EngineConfig, ServiceConfig):
        for field in fields(settings):
            option = options[field.name]
            assert "--" + field.name.replace("_", "-") in option.opts
            assert option.default == (None if field.default == () else field.default)  # () takes several
            limits = declared(settings)[field.name].meta
            text = field.metadata["help"] + (f" [{bounds(limits)}]" if limits else "")
            assert option.help == escape(text)


@pytest.mark.parametrize("command", ["serve", "chat", "top"])
def test_help_has_examples(command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"lightkv {command}" in out.split("Examples")[1]


def test_help_keeps_what_looks_like_markup() -> None:
    words = " ".join(re.sub(r"[│╭╮╰╯─]", " ", run("serve", "--help")[1]).split())
    assert "Needs the packages of lightkv[otel]." in words


def test_serve_starts_a_service_with_the_given_options(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[EngineConfig, ServiceConfig]] = []

    def serve(engine: EngineConfig, settings: ServiceConfig, notes: Console) -> int:
        started.append((engine, settings))
        return 3

    monkeypatch.setattr(launch, "serve", serve)
    assert run("serve", "./m", "--port", "9", "--dtype", "float16")[0] == 3
    assert run("serve", "--model", "./n", env={"LIGHTKV_API_KEY": "k"})[0] == 3
    keys = ["--api-key", "one", "--api-key", "two"]
    assert run("serve", *keys, "--report-cached-tokens", env={"LIGHTKV_API_KEY": "k"})[0] == 3
    assert run("serve", env={"LIGHTKV_API_KEY": "k", "LIGHTKV_METRICS_KEY": "m"})[0] == 3
    assert started == [
        (EngineConfig("./m", dtype="float16"), ServiceConfig(port=9)),
        (EngineConfig("./n"), ServiceConfig(api_key=("k",))),
        (EngineConfig(), ServiceConfig(api_key=("one", "two"), report_cached_tokens=True)),
        (EngineConfig(), ServiceConfig(api_key=("k",), metrics_key=("m",))),
    ]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--port", "65536"], "--port is 65536"),
        (["--max-queued-requests", "0"], "--max-queued-requests is 0"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout is nan"),
        (["--ssl-keyfile", "k.pem"], "without --ssl-certfile"),
        (["--gpu-memory-utilization", "0.9"], "it is --mem-fraction here"),
        (["--tp", "2"], "it is --tensor-parallel here"),
        (["--max-num-batched-tokens=9"], "it is --prefill-chunk here"),
        (["--enable-prefix-caching"], "prefixes are cached to the token"),
        (["--no-such-option"], "No such option: --no-such-option"),
        (["./one", "--model", "./another"], "leave one of them out"),
        (["./nowhere", "--port", "0"], "model './nowhere' was not found"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_settings_are_exit_code_2(args: list[str], words: str) -> None:
    code, out, err = run("serve", *args)
    assert (code, out) == (2, "")
    assert words in " ".join(re.sub(r"[│╭╮╰╯─]", " ", err).split())
    assert "Traceback" not in err


# --------------------------------------------------------------------------------
# chat


def test_a_piped_chat_answers_each_line_and_keeps_the_conversation(api: ApiUnderTest, url: str) -> None:
    api.router.num_cached = 3
    code, out, err = chat(url, "--system", "Be brief.", "--temperature", "0", stdin="Hello\n\n  Again  \n")
    assert (code, out) == (0, f"{TEXT}\n{TEXT}\n")
    first, second = (prompt_text(api, idx) for idx in range(2))
    assert "Be brief." in first
    assert first.count("<|im_start|>user") == 1
    assert first in second
    assert f"{TEXT}" in second
    assert "user\nAgain<|im_end|>" in second
    assert api.router.submits[0].params.temperature == 0
    lines = err.splitlines()
    num_prompt = len(api.router.submits[0].prompt_ids) // 4
    assert lines[0].startswith(f"{num_prompt} prompt tokens (3 cached), 5 new in ")
    assert len(lines) == 2


def test_reset_forgets_and_exit_ends(api: ApiUnderTest, url: str) -> None:
    _, out, err = chat(url, "--system", "Be brief.", stdin="One\n/reset\nTwo\n/exit\nThree\n")
    assert out == f"{TEXT}\n{TEXT}\n"
    assert "forgotten" in err
    assert "One" not in prompt_text(api, 1)
    assert "Be brief." in prompt_text(api, 1)
    assert len(api.router.submits) == 2


def test_an_error_ends_a_piped_chat(api: ApiUnderTest, url: str) -> None:
    code, out, err = chat(url, stdin="long " * 2000)
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert line.startswith("lightkv: the service answers 400: ")


@pytest.mark.parametrize(("reason", "status"), [("error", 500), ("lost", 503)])
def test_an_answer_that_breaks_off_is_an_error_on_a_line_of_its_own(
    api: ApiUnderTest, url: str, reason: str, status: int
) -> None:
    api.router.fail_after, api.router.fail_reason = 2, reason
    code, out, err = chat(url, stdin="Hello\n")
    assert (code, out) == (1, " one two\n")
    assert err.startswith(f"lightkv: the service answers {status}: ")


def test_without_a_service_or_with_a_wrong_key_or_address() -> None:
    code, _, err = run("chat", "--url", "http://127.0.0.1:9", stdin="Hello\n")
    assert code == 1
    assert "Connection refused" in err
    assert "lightkv serve starts one" in err
    for wrong in ("127.0.0.1:8000", "ftp://host", "http://", "unix:", "http://host:port"):
        code, _, err = run("top", "--once", "--url", wrong)
        assert code == 2, wrong
        assert "--url is" in err


def test_the_key_comes_from_the_environment_too(url: str) -> None:
    assert run("top", "--once", "--interval", "0.1", "--url", url, env={"LIGHTKV_API_KEY": API_KEY})[0] == 0
    code, _, err = run("top", "--once", "--url", url, env={"LIGHTKV_API_KEY": "wrong"})
    assert code == 1
    assert "the service answers 401" in err


class Terminal:
    """A command in its own terminal."""

    def __init__(self, *args: str) -> None:
        pid, self._fd = pty.fork()
        if pid == 0:
            os.environ.update(TERM="xterm", COLUMNS="100", LINES="40")
            os.execv(sys.executable, [sys.executable, "-m", "lightkv.router.cli", *args])
        self._pid = pid
        self._shown = ""  # the output after the last awaited text

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, text: str) -> None:
        """Reads until `text` appears after the last awaited text."""
        end = time.monotonic() + 60
        while text not in self._shown:
            assert select.select([self._fd], [], [], max(end - time.monotonic(), 0.0))[0], self._shown
            self._shown += os.read(self._fd, 4096).decode(errors="replace")
        self._shown = self._shown.split(text, 1)[1]

    def wait(self) -> int:
        while True:  # read the rest, because the command would block on a full terminal
            try:
                if not os.read(self._fd, 4096):
                    break
            except OSError:  # the other end is closed
                break
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def test_a_chat_in_a_terminal(api: ApiUnderTest, url: str) -> None:
    terminal = Terminal("chat", "--url", url, "--api-key", API_KEY, "--max-tokens", "400")
    terminal.until("> ")
    api.router.delay = 0.02
    terminal.type("Count\n")
    terminal.until("three")
    terminal.type("\x03")  # Ctrl-C ends the answer, also in the service
    terminal.until("interrupted")
    terminal.until("> ")
    wait_until(lambda: api.router.num_running == 0)
    api.router.delay = 0.0
    api.router.fail_after = 1
    terminal.type("Fail\n")
    terminal.until("out of luck")
    api.router.fail_after = None
    terminal.type("Again\n")
    terminal.until("tokens/s")
    terminal.until("> ")
    asked = prompt_text(api, 2)
    assert "Count" in asked  # with the part of the answer that had arrived
    assert "one two three" in asked
    assert "Fail" not in asked
    terminal.type("\x04")  # Ctrl-D
    assert terminal.wait() == 0


# --------------------------------------------------------------------------------
# The client


def test_a_chat_yields_text_and_then_token_counts(url: str) -> None:
    client = ServiceClient(f"{url}/v1/", API_KEY)  # the form that OpenAI's clients need
    pieces = list(client.chat([{"role": "user", "content": "Hi"}], {"max_tokens": 5}))
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == TEXT
    assert [piece.num_new for piece in pieces if isinstance(piece, Usage)] == [5]


def test_the_clients_exceptions(api: ApiUnderTest, url: str) -> None:
    with pytest.raises(ServiceRefused) as raised:
        ServiceClient(url).get("/load")
    assert raised.value.status == 401
    with pytest.raises(ServiceRefused, match="answers 404: the model 'other' does not exist"):
        list(ServiceClient(url, API_KEY).chat([{"role": "user", "content": "Hi"}], {"model": "other"}))
    with pytest.raises(ServiceUnreachable, match="No such file"):
        ServiceClient("unix:/no/such/socket").get("/load")


# --------------------------------------------------------------------------------
# top


def shown(renderable: Any) -> str:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def test_a_frame_has_the_counts_and_the_rates() -> None:
    before = LoadReport(num_steps=100, generated_tokens=1000, prompt_tokens=50, router_seconds=1.0)
    report = LoadReport(
        capacity=1000, free=500, held=300, cached=200, forecast_peak=700, guaranteed_peak=620, reached_peak=650,
        num_running=3, num_waiting=12, num_guaranteed=2, waits_for="slots", num_steps=140,
        prompt_tokens=2050, hit_tokens=1025, generated_tokens=1100, router_seconds=1.02, num_ledger_checks=139,
        num_worker_starts=2, num_preemptions=1, recomputed_tokens=1037, num_sessions=4, session_tokens=150,
        session_evicted_tokens=6, session_over_share_tokens=1500,
        state="ready", detail="ready",
        by_key={"alice": KeyUsage(3, 2000, 1000, 90, 1, 0)} | {f"k{i}": KeyUsage(held=i) for i in range(1, 11)},
    )  # fmt: skip
    text = shown(frame("http://host", report, before, 2.0))
    for words in (
        "lightkv at http://host",
        "300 held, 200 cached, 500 free of 1,000 tokens",
        "700 tokens forecast, 620 guaranteed, 650 reached so far",
        "3 running (2 guaranteed, 1 provisional), 12 waiting",
        "waiting for  slots that are expected to be free",
        "50.0 generated/s, 1,000.0 of prompts/s",
        "1,025 of 2,050 prompt tokens hit (50%)",
        "20.0/s, 0.50 ms of the router's own time each",
        "139 comparisons of the device's free count with the ledger's",
        "1 times, 1,037 tokens computed again",
        "4 protect 150 tokens; so far 6 evicted, 1,500 over their share",
        "2 worker starts",
        "key k10      10 tokens held; 0 requests",
        "█ held  ▒ cached  ░ free  | forecast peak",
    ):
        assert words in text
    assert "alice" not in text  # ten keys hold tokens
    assert "state        ready \n" in re.sub(" +\n", " \n", text)


def test_a_frame_names_the_model_the_latencies_and_the_requests(api: ApiUnderTest, url: str) -> None:
    api.router.mapped = Mapped(replace(POOL, owners=[Owner(3, 600, "req-of-it")]))
    list(ServiceClient(url, API_KEY).chat([{"role": "user", "content": "Hi"}], {"max_tokens": 5}))
    time.sleep(1.5 * MAP_SECONDS)  # a younger map is sent again
    code, out, _ = run("top", "--once", "--interval", "0.1", "--url", url, "--api-key", API_KEY)
    assert code == 0
    assert re.search(rf"model +{MODEL}\n", re.sub(" +\n", "\n", out))
    for name in ("first token", "per token"):
        assert re.search(rf"{name} +p50 [\d.]+ m?s, p99 [\d.]+ m?s \(of \d+ since the start\)", out), out
    assert re.search(r"answers +ended so far: .*\d+ length", out)
    assert re.search(r"600 +req-of-it", out)


def test_a_frame_after_a_restart_has_no_negative_rates() -> None:
    before = LoadReport(num_steps=100, generated_tokens=1000, router_seconds=1.0)
    text = shown(frame("u", LoadReport(state="starting", detail="loading"), before, 1.0))
    assert "0.0 generated/s" in text
    assert "starting: loading" in text


@pytest.mark.parametrize(
    ("load", "drawn"),
    [
        (Load(), "." * 60),
        (Load(capacity=600, held=300, cached=150, free=150), "#" * 30 + "=" * 15 + "." * 15),
        (Load(capacity=600, held=1, cached=1, free=598), "#=" + "." * 58),
        (Load(capacity=600, held=600), "#" * 60),
        (Load(capacity=600, held=599, cached=1), "#" * 60),
        (Load(capacity=600, held=60, forecast_peak=300, free=540), "#" * 6 + "." * 24 + "|" + "." * 29),
        (Load(capacity=600, held=60, forecast_peak=600, free=540), "#" * 6 + "." * 53 + "|"),
    ],
    ids=["starting", "parts", "single-tokens", "full", "rounded", "forecast", "forecast-full"],
)
def test_the_bar(load: Load, drawn: str) -> None:
    assert bar(load, "#=.").plain == drawn


def test_top_prints_frames_without_a_terminal(api: ApiUnderTest, url: str) -> None:
    command = [sys.executable, "-m", "lightkv.router.cli", "top", "--url", url, "--interval", "0.1"]
    environment = os.environ | {"LIGHTKV_API_KEY": API_KEY}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        titles = 0
        for line in process.stdout:
            titles += line.startswith(f"lightkv at {url}")
            if titles == 2:
                break
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(10) == 0


def test_top_stays_in_place_in_a_terminal(url: str) -> None:
    terminal = Terminal("top", "--url", url, "--api-key", API_KEY, "--interval", "0.1")
    terminal.until("worker starts")
    terminal.until("\x1b[1A")  # the cursor moves up
    terminal.type("\x03")
    assert terminal.wait() == 0
