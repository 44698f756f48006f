"""`--cacert` of the commands that ask a service, before a server with a certificate of its own."""

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightkv.router.cli.app import app

# For 127.0.0.1, made for these tests: openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes
# -days 36500 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1,DNS:localhost
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBmjCCAUGgAwIBAgIUIteFKyHxBKYxKVibPETLmilaG5AwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyODE4MDAyNVoYDzIxMjYxMTA0
MTgwMDI1WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAQlZu8lKSHsT+8j6DSQeQ0SqaSNtijNn0K124CUYvl4GfCC+KVN5JGL
457hTYL0mr3FKwF5AoqyQOpeQlchklR0o28wbTAdBgNVHQ4EFgQU/8c58kW46465
6qmxVp1xWBSjKh0wHwYDVR0jBBgwFoAU/8c58kW464656qmxVp1xWBSjKh0wGgYD
VR0RBBMwEYcEfwAAAYIJbG9jYWxob3N0MA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZI
zj0EAwIDRwAwRAIgEWH/pcipmVQ9MLq8BiIbNMOflNqTvXWC82f41yaNDVwCIFXi
tjwA+AoytW8MEsrplgdP5kT1kKHq+wLMMxLKWfUp
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgdYNuWBXy/q+eMbiw
3B7r7U8DMUQNMT4/aL6aL/AndemhRANCAAQlZu8lKSHsT+8j6DSQeQ0SqaSNtijN
n0K124CUYvl4GfCC+KVN5JGL457hTYL0mr3FKwF5AoqyQOpeQlchklR0
-----END PRIVATE KEY-----
"""


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"free": 1}')

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "both.pem").write_text(CERTIFICATE + KEY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "both.pem")
    server = HTTPServer(("127.0.0.1", 0), Answer)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_certificate_of_the_file_is_trusted_and_no_other(port: int, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text(CERTIFICATE)
    (tmp_path / "none.pem").write_text("none")
    asks = ["map", "--json", "--url", f"https://127.0.0.1:{port}"]

    def run(*args: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, [*asks, *args], prog_name="lightkv")
        return result.exit_code, result.output

    assert run("--cacert", str(tmp_path / "ca.pem")) == (0, '{"free": 1}\n')
    code, output = run()
    assert code == 1
    assert "certificate verify failed" in output
    for name in ("none.pem", "nowhere.pem"):
        code, output = run("--cacert", str(tmp_path / name))
        assert code == 2
        assert "give a PEM file" in output


@pytest.mark.parametrize("command", ["top", "map", "chat"])
def test_the_commands_that_ask_a_service_take_the_option(command: str) -> None:
    assert "--cacert" in CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
