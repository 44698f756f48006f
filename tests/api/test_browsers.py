"""Web pages that a user of the service opens: names that are rebound to its address, and forms."""

import json
import socket
from collections.abc import Iterator

import pytest

from lightkv.router.config import EngineConfig, InvalidConfig, ServiceConfig
from lightkv.router.service.access.allowed_hosts import HostRule, host_rule
from lightkv.router.service.api_settings import api_settings
from lightkv.router.service.messages import CacheReset
from tests.support.fake_router import CHAT, HELLO, ApiUnderTest, error_of, service

RESET = "/reset_prefix_cache"
LOCAL = HostRule(("127.0.0.1",))
ALWAYS = [
    "",
    "127.0.0.1:8000",
    "localhost",
    "LocalHost:80",
    "localhost.",
    "a.localhost",
    "[::1]:80",
    "10.0.0.5",
]
FOREIGN = ["pages.example", "pages.example:80", "localhost.pages.example", "127.0.0.1.pages.example"]
FOREIGN += ["x:y", "::1:x", "[x", "[x]:y", "[::1]x"]
PRIVATE = ["lightkv", "lightkv:8000", "gpu1.local", "host.docker.internal", "a.home.arpa"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiUnderTest]:
    with service(tmp_path_factory.mktemp("api"), hosts=LOCAL).running() as under_test:
        yield under_test


# Hosts


@pytest.mark.parametrize("host", ALWAYS)
def test_addresses_and_localhost_are_always_allowed(host: str) -> None:
    assert LOCAL.allows(host)


@pytest.mark.parametrize("host", [*FOREIGN, *PRIVATE])
def test_on_this_machine_no_other_name_is_allowed(host: str) -> None:
    rule = host_rule(ServiceConfig(), is_local=True)
    assert rule is not None
    assert not rule.allows(host)


def test_beyond_this_machine_private_names_are_allowed_and_public_ones_are_not() -> None:
    rule = host_rule(ServiceConfig(host="0.0.0.0"), is_local=False)
    assert rule is not None
    assert all(map(rule.allows, [*ALWAYS, *PRIVATE, socket.gethostname()]))
    assert not any(map(rule.allows, FOREIGN))


def test_the_name_to_listen_on_is_allowed() -> None:
    rule = host_rule(ServiceConfig(host="Gpu1.Example.org"), is_local=True)
    assert rule is not None
    assert rule.allows("gpu1.example.org:8000")


def test_given_names_replace_the_private_ones() -> None:
    given = ServiceConfig(
        host="0.0.0.0", allowed_hosts=("llm.Example.org", "*.pages.example"), api_key=("k",)
    )
    rule = host_rule(given, is_local=False)
    assert rule is not None
    assert all(map(rule.allows, [*ALWAYS, "LLM.example.org:443", "a.pages.example", "a.b.pages.example"]))
    assert not any(map(rule.allows, ["pages.example", "xpages.example", "example.org", *PRIVATE]))


@pytest.mark.parametrize(
    "settings",
    [
        ServiceConfig(allowed_hosts=("*",)),
        ServiceConfig(api_key=("k",)),
        ServiceConfig(api_key_file="keys"),
        ServiceConfig(uds="socket"),
    ],
)
def test_every_name_is_allowed_where_a_page_cannot_ask(settings: ServiceConfig) -> None:
    assert host_rule(settings, is_local=True) is None


@pytest.mark.parametrize("name", ["", "http://a.example", "a.example:8000", "a/b", "*.", "a*", "[::1]"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfig, match="--allowed-hosts"):
        ServiceConfig(allowed_hosts=(name,))


def test_a_rebound_name_reaches_nothing_but_health(api: ApiUnderTest) -> None:
    rebound = {"Host": "pages.example:8000"}
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/map"),
        ("POST", RESET),
        ("GET", "/docs"),
        ("GET", "/no"),
    ):
        status, _, content = api.send(method, path, headers=rebound)
        assert (status, error_of(content)["type"]) == (403, "permission_error"), path
        assert "pages.example:8000" in error_of(content)["message"]
        assert "--allowed-hosts" in error_of(content)["message"]
    assert api.send("POST", CHAT, HELLO, rebound)[0] == 403
    assert not api.router.submits
    assert api.send("GET", "/health", headers=rebound)[0] == 200
    assert api.send("POST", CHAT, HELLO | {"max_tokens": 1}, {"Host": "localhost:9"})[0] == 200
    document = json.loads(api.send("GET", "/openapi.json")[2])["paths"]
    assert "403" in document["/v1/models"]["get"]["responses"]
    assert "403" not in document["/health"]["get"]["responses"]


# Forms


def post(api: ApiUnderTest, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = api.connect()
    connection.request("POST", path, b"{}", headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


@pytest.mark.parametrize("path", [RESET, "/v1/sessions/s/release", CHAT, "/no"])
@pytest.mark.parametrize(
    "kind",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain; application/json",
    ],
)
def test_a_form_is_refused(api: ApiUnderTest, path: str, kind: str | None) -> None:
    api.router.cache_reset = CacheReset(7)
    status, content = post(api, path, {} if kind is None else {"Content-Type": kind})
    assert status == 400
    assert (kind or "no Content-Type") in error_of(content)["message"]
    assert "send application/json" in error_of(content)["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json"},
        {"Content-Type": "application/json; charset=utf-8"},
        {"X-Requested-With": "curl"},
        {"Authorization": "Bearer any"},
        {"Content-Type": "text/plain", "X-Requested-With": "curl"},
    ],
)
def test_what_no_form_can_send_is_taken(api: ApiUnderTest, headers: dict[str, str]) -> None:
    status, content = post(api, RESET, headers)
    assert (status, json.loads(content)) == (200, {"num_evicted_tokens": 500})


def test_the_rule_is_one_of_the_apis_settings() -> None:
    settings = api_settings(EngineConfig(), ServiceConfig(allowed_hosts=("a.example",)), is_local=True)
    assert settings.hosts == HostRule(("a.example", "127.0.0.1"))
