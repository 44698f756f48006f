"""The limits of API keys over HTTP, with a fake router: what is refused, what is given back, and who waits."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightkv.router.api.http import body as http_body
from lightkv.router.service.messages import Refused
from tests.support.fake_router import CHAT, COMPLETIONS, HELLO, ApiUnderTest, idle, service, wait_until

KEYS = """
free free
narrow rpm-key rpm=2
few tpm-key tpm=100
counts count-key rpm=4
faults fault-key rpm=2
single one-key max_parallel_requests=1
"""


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ApiUnderTest, Path]]:
    folder = tmp_path_factory.mktemp("keys")
    file = folder / "keys"
    file.write_text(KEYS)
    with service(folder, api_key_file=str(file)).running() as made:
        yield made, file


@pytest.fixture
def api(limited: tuple[ApiUnderTest, Path]) -> ApiUnderTest:
    return idle(limited[0])


def send(
    api: ApiUnderTest, key: str, body: dict[str, Any], path: str = COMPLETIONS
) -> tuple[int, dict[str, Any], str | None]:
    """Returns the status, the body and Retry-After of an answer."""
    status, headers, content = api.send("POST", path, body, {"Authorization": f"Bearer {key}"})
    return status, json.loads(content), headers["Retry-After"]


def test_requests_beyond_the_limit_are_refused_before_their_text_is_tokenised(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"prompt": "Once", "max_tokens": 1}
    assert send(api, "rpm-key", asked | {"n": 3})[0] == 400  # never
    assert [send(api, "rpm-key", asked | {"n": 2})[0]] == [200]
    monkeypatch.setattr(api.tokenizer, "encode", None)
    for path, body in (
        (COMPLETIONS, asked),
        (CHAT, HELLO | {"max_tokens": 1}),
        ("/v1/responses", {"input": "Hi"}),
    ):
        status, content, wait = send(api, "rpm-key", body, path)
        assert (status, wait) == (429, "30")
        error = content["error"]
        assert (error["type"], error["param"], error["code"]) == (
            "rate_limit_error",
            "rpm",
            "rate_limit_exceeded",
        )
        assert "rpm=2" in error["message"]
    status, content, wait = send(api, "rpm-key", HELLO | {"max_tokens": 1}, "/v1/messages")
    assert (status, content["error"]["type"], wait) == (429, "rate_limit_error", "30")
    monkeypatch.undo()
    assert send(api, "free", asked)[0] == 200


def test_counting_tokens_takes_one_of_the_minutes_requests(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        ("/v1/messages/count_tokens", HELLO),
        ("/tokenize", {"prompt": "Hi"}),
        ("/tokenize", HELLO),
        ("/detokenize", {"tokens": [5]}),
    ]
    assert [send(api, "count-key", body, path)[0] for path, body in asked] == [200] * 4
    monkeypatch.setattr(api.tokenizer, "encode", None)
    monkeypatch.setattr(api.tokenizer, "render_chat", None)
    for path, body in asked:
        status, content, wait = send(api, "count-key", body, path)
        assert (status, content["error"]["type"], wait) == (429, "rate_limit_error", "15")
    monkeypatch.undo()
    assert send(api, "count-key", {"prompt": "Once", "max_tokens": 1})[0] == 429
    assert send(api, "free", {"prompt": "Hi"}, "/tokenize")[0] == 200


def test_only_what_the_service_has_no_room_for_does_not_count(api: ApiUnderTest) -> None:
    asked = {"prompt": "Once", "max_tokens": 1}
    api.router.refuse = lambda submit: Refused(submit.request_id, "queue_full", "no")
    assert [send(api, "fault-key", asked)[0] for _ in range(3)] == [429, 429, 429]
    assert send(api, "fault-key", HELLO | {"max_tokens": 1}, "/v1/messages")[0] == 529
    api.router.refuse = lambda submit: None
    too_long = {"prompt": [5] * 2000, "max_tokens": 1}
    assert [send(api, "fault-key", too_long)[0] for _ in range(3)] == [400, 400, 429]


def test_tokens_that_a_request_did_not_use_are_given_back(api: ApiUnderTest) -> None:
    prompt = list(range(1, 31))
    asked = {"prompt": prompt, "max_tokens": 60}
    api.router.script = [*api.router.script[:3], min(api.tokenizer.eos_ids)]
    assert send(api, "tpm-key", {"prompt": prompt * 4, "max_tokens": 1})[0] == 400  # no minute has so many
    assert send(api, "tpm-key", asked)[0] == 200  # 34 used of 90
    api.router.refuse = lambda submit: Refused(submit.request_id, "unavailable", "no")
    for _ in range(3):
        assert send(api, "tpm-key", asked | {"max_tokens": 30})[0] == 503
    api.router.refuse = lambda submit: None
    assert send(api, "tpm-key", {"prompt": prompt, "max_tokens": 30, "min_p": 7})[0] == 400
    assert send(api, "tpm-key", asked | {"max_tokens": 30})[0] == 200
    status, content, _ = send(api, "tpm-key", asked | {"max_tokens": 30})
    assert (status, content["error"]["param"]) == (429, "tpm")


def test_a_request_at_once_ends_with_its_client_or_its_stream(api: ApiUnderTest) -> None:
    api.router.hold = True
    connection = api.connect()
    headers = {"Content-Type": "application/json", "x-api-key": "one-key"}
    asked = {"prompt": "Once", "max_tokens": 3, "stream": True}
    connection.request("POST", COMPLETIONS, json.dumps(asked), headers)
    wait_until(lambda: api.router.num_running == 1)
    status, content, wait = send(api, "one-key", asked)
    assert (status, content["error"]["param"], wait) == (429, "max_parallel_requests", "1")
    api.router.hold = False
    assert send(api, "free", asked | {"stream": False})[0] == 200
    connection.close()
    wait_until(lambda: send(api, "one-key", asked | {"stream": False})[0] == 200)
    assert send(api, "one-key", asked | {"stream": False})[0] == 200
    assert send(api, "one-key", asked | {"n": 2})[0] == 400


def test_a_key_at_its_limit_delays_no_other(api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of its requests is read, parsed, tokenised or sent to the router, however many they are."""
    api.router.hold = True
    bodies: list[int] = []
    monkeypatch.setattr(
        http_body, "parse", lambda text, *rest: (bodies.append(len(text)), json.loads(text))[1]
    )
    asked = {"prompt": "Once", "max_tokens": 3, "stream": True}
    connections = [api.connect() for _ in range(300)]
    for number, connection in enumerate(connections):
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("Authorization", "Bearer one-key")
        connection.putheader("Content-Type", "application/json")
        if number:  # of these the body never arrives
            connection.putheader("Content-Length", "190000")
            connection.endheaders(b"{")
        else:
            connection.putheader("Content-Length", str(len(json.dumps(asked))))
            connection.endheaders(json.dumps(asked).encode())
            wait_until(lambda: api.router.num_running == 1)
    api.router.hold = False
    long = " " * 100_000
    assert send(api, "free", {"prompt": "Twice", "max_tokens": 1, "user": long})[0] == 200
    assert len(api.router.submits) == len(bodies) == 2
    assert max(bodies) > 100_000
    for connection in connections[1:]:
        assert connection.getresponse().status == 429
    assert send(api, "one-key", {"prompt": "Hi"}, "/tokenize")[0] == 200  # which is no answer
    for connection in connections:
        connection.close()


def test_the_limits_of_a_running_service_change_with_the_file(
    limited: tuple[ApiUnderTest, Path], api: ApiUnderTest
) -> None:
    limited[1].write_text(KEYS.replace("single one-key max_parallel_requests=1", "single one-key rpm=1"))
    asked = {"prompt": "Once", "max_tokens": 1}
    wait_until(lambda: send(api, "one-key", asked | {"n": 2})[1]["error"]["param"] == "rpm")


def test_thousands_of_keys_are_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("".join(f"team-{i} key-{i} rpm=1\n" for i in range(20_000)))
    with service(tmp_path, api_key_file=str(tmp_path / "keys")).running() as api:
        for i in (0, 19_999):
            statuses = [send(api, f"key-{i}", {"prompt": "a", "max_tokens": 1})[0] for _ in range(2)]
            assert statuses == [200, 429]
