"""Tenants learn nothing about each other from the cache, unless the service is started to report it."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightkv.router.config import NAMESPACE_HEADER, SESSION_HEADER, InvalidConfig, ServiceConfig
from lightkv.router.service import launch
from tests.support.fake_router import CHAT, COMPLETIONS, HELLO, ApiUnderTest, error_of, service

PROMPT = {"prompt": "a", "max_tokens": 1}


def namespaces(api: ApiUnderTest, headers: list[dict[str, str]], **fields: Any) -> list[tuple[str, ...]]:
    """Returns the namespace for each of `headers`, which has to be the same for a completion and a chat."""
    found = []
    for header in headers:
        for path in (COMPLETIONS, CHAT):
            assert api.send("POST", path, HELLO | PROMPT | fields, header)[0] == 200
        completion, chat = api.router.submits[-2:]
        assert completion.namespace == chat.namespace
        found.append(completion.namespace)
    return found


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("reported", [False, True])
def test_cached_tokens_are_reported_only_if_the_service_is_started_so(
    tmp_path: Path, path: str, reported: bool
) -> None:
    with service(tmp_path, report_cached_tokens=reported).running() as api:
        api.router.num_cached = 3
        details = {"cached_tokens": 3} if reported else None
        asked = HELLO | PROMPT
        assert api.post(path, asked)["usage"]["prompt_tokens_details"] == details
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = api.stream(path, asked | {"stream_options": options})[:-1]
        assert all(chunk["usage"]["prompt_tokens_details"] == details for chunk in chunks)


def test_each_key_has_its_own_namespace(tmp_path: Path) -> None:
    keys = ("first-secret", "second-secret")
    with service(tmp_path, api_key=keys, cache_namespace="key").running() as api:
        assert api.send("POST", COMPLETIONS, PROMPT, bearer("third"))[0] == 401
        headers = [bearer(key) for key in (*keys, keys[0])]
        first, second, again = namespaces(api, headers)
        assert first == again != second
        assert not any("secret" in name for name in first + second)  # the router never gets an API key
        salted, other = namespaces(api, headers[:2], cache_salt="s")
        assert len({first, second, salted, other}) == 4


def test_each_value_of_the_header_has_its_own_namespace(tmp_path: Path) -> None:
    with service(tmp_path, cache_namespace="header").running() as api:
        one, two, again = namespaces(api, [{NAMESPACE_HEADER: name} for name in ("one", "two", "one")])
        assert one == again != two
        for headers in ({}, {NAMESPACE_HEADER: ""}):
            status, _, content = api.send("POST", COMPLETIONS, PROMPT, headers)
            assert status == 400
            assert NAMESPACE_HEADER in error_of(content)["message"]
        connection = api.connect()
        connection.putrequest("POST", COMPLETIONS)
        for name, value in ((NAMESPACE_HEADER, "one"), (NAMESPACE_HEADER, "two"), ("Content-Length", "15")):
            connection.putheader(name, value)
        connection.putheader("Content-Type", "application/json")
        connection.endheaders(b'{"prompt": "a"}')
        assert connection.getresponse().status == 400  # the proxy did not set both
        connection.close()
        assert api.send("POST", "/tokenize", {"prompt": "a"})[0] == 200  # needs no namespace
        paths = json.loads(api.send("GET", "/openapi.json")[2])["paths"]
        for path in (COMPLETIONS, CHAT):
            names = [parameter["name"] for parameter in paths[path]["post"]["parameters"]]
            assert names == [NAMESPACE_HEADER, SESSION_HEADER]
        assert "parameters" not in paths["/tokenize"]["post"]


def test_without_the_setting_keys_share_one_namespace(tmp_path: Path) -> None:
    with service(tmp_path, api_key=("a", "b")).running() as api:
        assert namespaces(api, [bearer("a"), bearer("b") | {NAMESPACE_HEADER: "x"}]) == [(), ()]


def test_a_file_of_keys_is_read_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("two\n\n  three \n")
    config = ServiceConfig(api_key_file=str(file), cache_namespace="key")
    launch.check_keys(config)
    file.write_text("\n")
    with pytest.raises(InvalidConfig, match="holds no key"):
        launch.check_keys(config)
    with pytest.raises(launch.CannotServe, match="cannot be read"):
        launch.check_keys(ServiceConfig(api_key_file=str(tmp_path / "none")))
    with pytest.raises(InvalidConfig, match="there is no --api-key"):
        launch.check_keys(ServiceConfig(cache_namespace="key"))
