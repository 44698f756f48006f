"""Checks that the Dockerfile copies what an installation needs, and that its commands are understood.

`make lint` checks its style with hadolint. The images are not built here.
"""

import http.server
import json
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from lightkv.router.cli.app import app

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
# Of nobody: a key and its certificate that were made for these tests alone.
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg+uTx3J/bey1fUCvR
UeSl4pKzl5dW1yGDxmWVkEfgNAmhRANCAAQkuBKbBwLvzyv3in8FMdN3Rjk08Zre
/RUaLyS7QAv5p2V6W6xT+6zwur1VRwxLxCsE4aSQeLq3zhyal+0UGHPp
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBhjCCASugAwIBAgIURhEAdVsoakhRT0a2JV0jJ/wBaI0wCgYIKoZIzj0EAwIw
FzEVMBMGA1UEAwwMbGlnaHRrdi10ZXN0MCAXDTI2MTEyODE4MTM0MloYDzIxMjYx
MTA0MTgxMzQyWjAXMRUwEwYDVQQDDAxsaWdodGt2LXRlc3QwWTATBgcqhkjOPQIB
BggqhkjOPQMBBwNCAAQkuBKbBwLvzyv3in8FMdN3Rjk08Zre/RUaLyS7QAv5p2V6
W6xT+6zwur1VRwxLxCsE4aSQeLq3zhyal+0UGHPpo1MwUTAdBgNVHQ4EFgQUk7KD
wcoKEWBLufzO7941aMs/+48wHwYDVR0jBBgwFoAUk7KDwcoKEWBLufzO7941aMs/
+48wDwYDVR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNJADBGAiEA/jHFmt2SrGuA
dZgGO/298Y3GkF7euq8gLbNEhavwLioCIQD1eiyyrVbPK9k2eqqFAJ+p2oo5amb/
k/5ToTsOD+Qwzw==
-----END CERTIFICATE-----
"""
LINES = re.sub(r"\\\n\s*", "", TEXT).splitlines()


def instructions(name: str) -> list[str]:
    return [line.removeprefix(f"{name} ") for line in LINES if line.startswith(f"{name} ")]


def copied() -> list[str]:
    return [source for line in instructions("COPY") for source in line.split()[:-1]]


def test_there_is_a_target_for_cpus_and_one_for_cuda() -> None:
    assert [line.split(" AS ")[1] for line in instructions("FROM")] == ["base", "cpu", "cuda"]
    installs = [line for line in instructions("RUN") if "pip install" in line]
    assert len(installs) == 2
    for line, extras in zip(installs, ("router", "router,hybrid,quantised"), strict=True):
        assert f'".[{extras}]" -c constraints.txt' in line
    assert ["whl/cpu" in line for line in installs] == [True, False]
    assert instructions("USER") == ["1000", "1000"]  # neither runs as root


def test_what_is_copied_is_sent_to_the_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    assert sorted(copied()) == sorted(line[1:] for line in ignored if line.startswith("!"))


def test_what_is_copied_makes_the_whole_package(tmp_path: Path) -> None:
    """setup.py finds the same packages and data in the copied files as in the checkout."""
    for source in copied():
        if (ROOT / source).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, tmp_path / source, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / source, tmp_path / source)
    program = (
        "import json, setuptools; found = []\n"
        "setuptools.setup = lambda packages, package_data: found.extend([sorted(packages), package_data])\n"
        "exec(open('setup.py').read()); print(json.dumps(found))"
    )
    run = [sys.executable, "-c", program]
    here, there = (
        json.loads(
            subprocess.run(run, cwd=place, capture_output=True, text=True, check=True, timeout=60).stdout
        )
        for place in (ROOT, tmp_path)
    )
    assert here == there
    assert len(here[0]) > 10
    for package, names in here[1].items():
        for name in names:
            assert (tmp_path / package.replace(".", "/") / name).is_file()


@pytest.mark.parametrize(
    "more", [[], ["/models/mine", "--max-total-tokens", "1000"]], ids=["default", "options"]
)
def test_the_entrypoint_is_understood(more: list[str]) -> None:
    (line,) = instructions("ENTRYPOINT")
    program, *args = json.loads(line)
    assert program == "lightkv"
    group: Any = get_command(app)
    name, command, rest = group.resolve_command(group.make_context("lightkv", [args[0]]), args + more)
    found = command.make_context(name, rest).params
    assert (found["host"], found["port"]) == ("0.0.0.0", 8000)
    assert instructions("EXPOSE") == ["8000"]


@pytest.mark.parametrize(
    ("tls", "status", "is_healthy"),
    [(False, 200, True), (False, 503, False), (True, 200, True), (True, 503, False)],
)
def test_the_health_check_asks_with_and_without_tls(
    tmp_path: Path, tls: bool, status: int, is_healthy: bool
) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls:
            (tmp_path / "pem").write_text(CERTIFICATE)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tmp_path / "pem")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        (check,) = instructions("HEALTHCHECK")
        program = json.loads(check.split("CMD ")[1].replace(":8000/", f":{server.server_port}/"))
        assert program[0] == "python"
        done = subprocess.run([sys.executable, *program[1:]], capture_output=True, timeout=60)
        server.shutdown()
    assert (done.returncode == 0) == is_healthy, done.stderr


def test_the_docs_build_the_targets_that_there_are() -> None:
    targets = {line.split(" AS ")[1] for line in instructions("FROM")}
    using = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    builds = [shlex.split(line) for line in using.splitlines() if line.startswith("docker build ")]
    assert builds
    for build in builds:
        assert build[build.index("--target") + 1] in targets
