"""The options for operators: the configuration file, the settings' checks, shell completion."""

import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lightkv.errors import MissingExtra, require_packages
from lightkv.router.cli.app import app
from lightkv.router.cli.config_file import read_config_file
from lightkv.router.config import EngineConfig, InvalidConfig, ServiceConfig
from lightkv.router.service import launch
from lightkv.router.service.api_settings import api_settings, shown


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServiceConfig]]:
    """Collects the settings of services in place of starting them."""
    found: list[tuple[EngineConfig, ServiceConfig]] = []

    def serve(engine: EngineConfig, service: ServiceConfig, notes: object) -> int:
        found.append((engine, service))
        return 0

    monkeypatch.setattr(launch, "serve", serve)
    monkeypatch.delenv("LIGHTKV_API_KEY", raising=False)
    return found


def run(*args: str) -> tuple[int, str]:
    """Returns the command's exit code and what it printed."""
    result = CliRunner().invoke(app, list(args), prog_name="lightkv")
    return result.exit_code, result.output


def write(directory: Path, text: str) -> str:
    file = directory / "service.toml"
    file.write_text(text)
    return str(file)


def test_the_file_sets_options_and_the_command_line_wins(
    tmp_path: Path, started: list[tuple[EngineConfig, ServiceConfig]]
) -> None:
    file = write(
        tmp_path,
        'model = "a"\nmax-num-seqs = 7\nport = 9000\nmem_fraction = 1\ncuda-graphs = false\n'
        "log-requests = true\n"
        'api-key = ["one", "two"]\nallowed-origins = "https://a.example"\napi-key-file = "keys"\n',
    )
    code, output = run("serve", "--port", "9001", "--config", file)
    assert code == 0, output
    engine, service = started[0]
    assert (engine.model, engine.max_num_seqs, engine.mem_fraction, engine.cuda_graphs) == (
        "a",
        7,
        1.0,
        False,
    )
    assert (service.port, service.log_requests, service.api_key) == (9001, True, ("one", "two"))
    assert (service.allowed_origins, service.api_key_file) == (("https://a.example",), "keys")
    assert run("serve", "b", "--config", file, "--cuda-graphs")[0] == 0
    assert (started[1][0].model, started[1][0].cuda_graphs) == ("b", True)
    code, output = run("serve", "b", "--model", "c")
    assert code == 2
    assert "leave one of them out" in output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq = 3", "the nearest is 'max-num-seqs'"),
        ("config = 'a'", "no option"),
        ("gpu-memory-utilization = 0.9", "it is --mem-fraction here"),
        ("enforce_eager = true", "in a file cuda-graphs = false"),
        ("quantization = 'fp8'", "--kv-dtype stores K and V in fewer bits"),
        ("port = 'x'", "give a whole number"),
        ("port = true", "give a whole number"),
        ("port = 1.5", "give a whole number"),
        ("log-requests = 1", "give true or false"),
        ("ttft-target = 'a'", "give seconds above 0"),
        ("host = 3", "give a text in quotes"),
        ("api-key = [3]", "api-key is [3]; give texts"),
        ("[engine]\nport = 1", "'engine', which is no option"),
        ("port = 1\nport = 2", "cannot be read"),
        ("max-num-seqs = 1\nmax_num_seqs = 2", "--max-num-seqs twice"),
        ("port = 99999", "port is 99999; give a whole number from 0"),
    ],
)
def test_a_wrong_file_is_refused(
    tmp_path: Path, started: list[tuple[EngineConfig, ServiceConfig]], text: str, message: str
) -> None:
    code, output = run("serve", "--config", write(tmp_path, text))
    assert code == 2
    assert message in " ".join(output.split())
    assert not started


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_config_file(tmp_path / "none")


def test_every_option_can_stand_in_the_file(tmp_path: Path) -> None:
    written: dict[str, Any] = {"tuple": ("x",), "int": 3, "float": 0.5, "bool": True, "str": "x"}
    lines, wanted = [], {}
    for name, kind in (get_type_hints(EngineConfig) | get_type_hints(ServiceConfig)).items():
        value = next(value for word, value in written.items() if word in str(kind))
        wanted[name] = value
        text = json.dumps(value)  # which TOML reads, too
        lines.append(f"{name.replace('_', '-')} = {text}")
    assert read_config_file(Path(write(tmp_path, "\n".join(lines)))) == wanted


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("allowed_origins", ("example.org",), "give scheme and host"),
        ("metrics_key", ("k",), "without API keys"),
        ("metrics_key_file", "keys", "without API keys"),
        ("allowed_origins", ("https://example.org/",), "give scheme and host"),
        ("default_max_tokens", 0, "at least 1"),
        ("otlp_endpoint", "localhost:4318", "give a URL"),
        ("chat_template", "", "is empty"),
        ("root_path", "llm/", "give a path such as /llm"),
        ("log_level", "loud", "one of debug, info"),
        ("timeout_keep_alive", 0, "from 1 to 3600"),
    ],
)
def test_wrong_settings_are_refused(setting: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        ServiceConfig(**{setting: value})


def test_settings_are_shown_without_secrets() -> None:
    address = "https://user:secret@host:4318/v1/traces?token=secret"
    service = ServiceConfig(api_key=("secret", "secret2"), metrics_key=("secret3",), otlp_endpoint=address)
    found = shown(EngineConfig(), service)
    assert "secret" not in str(found)
    assert (found["api_key"], found["metrics_key"]) == (2, 1)
    assert found["otlp_endpoint"] == "https://host:4318/v1/traces"
    assert api_settings(EngineConfig(), service, True).api_key == service.api_key


@pytest.mark.parametrize("extra", ["otel", "events", "report"])
def test_an_option_names_the_package_that_it_needs(extra: str) -> None:
    remedy = rf'--some-option needs the package no_such\.package.*pip install "\.\[{extra}\]" in a checkout'
    with pytest.raises(MissingExtra, match=remedy):
        require_packages("--some-option", extra, "msgspec", "no_such.package")
    require_packages("--some-option", extra, "msgspec")


def test_spans_need_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightkv.errors.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"--otlp-endpoint needs the package opentelemetry\.sdk"):
        launch.serve(EngineConfig(), ServiceConfig(otlp_endpoint="http://localhost:4318"), Console())


def test_a_template_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(launch.CannotServe, match="--chat-template"):
        launch._read_template(ServiceConfig(chat_template=str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("words", "position", "found"),
    [("lightkv ser", 1, "serve"), ("lightkv serve --config none.toml --log-r", 4, "--log-requests")],
)
def test_a_shell_completes_commands_and_options(words: str, position: int, found: str) -> None:
    env = {"_LIGHTKV_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(position)}
    result = CliRunner().invoke(app, [], prog_name="lightkv", env=env)
    assert (result.exit_code, result.stdout.split()) == (0, [found])
    code, output = run("--help")
    assert (code, "--install-completion" in output) == (0, True)
