"""Sessions over HTTP: how a request names one, who owns it, when it expires, and what the router is told."""

import asyncio
import json
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lightkv.router.api.answers.sessions import OpenSession, OpenSessions, SessionUse
from lightkv.router.config import NAMESPACE_HEADER, SESSION_HEADER, InvalidConfig, ServiceConfig
from lightkv.router.service.messages import Refused
from tests.support.fake_router import CHAT, COMPLETIONS, HELLO, ApiUnderTest, error_of, service

PROMPT = {"prompt": "a", "max_tokens": 1}
BODY = HELLO | PROMPT
PATHS = (COMPLETIONS, CHAT)
RELEASE = "/v1/sessions/{session_id}/release"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def named(
    api: ApiUnderTest, path: str = COMPLETIONS, headers: dict[str, str] | None = None, **fields: Any
) -> str:
    """Returns the name of the session that the router gets for a request, "" for none."""
    assert api.send("POST", path, BODY | fields, headers)[0] == 200
    return api.router.submits[-1].session or ""


def release(api: ApiUnderTest, session_id: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    status, _, content = api.send("POST", f"/v1/sessions/{session_id}/release", None, headers)
    return status, json.loads(content)


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_request_names_its_session_in_the_body_or_in_a_header(tmp_path: Path) -> None:
    with service(tmp_path).running() as api:
        for path in PATHS:
            first = named(api, path, session_id="chat 1")
            assert first.endswith("/chat 1")
            assert named(api, path, {SESSION_HEADER: "chat 1"}) == first
            assert named(api, path, {SESSION_HEADER.lower(): "chat 1"}) == first
            assert named(api, path, {SESSION_HEADER: "other"}, session_id="chat 1") == first
            assert named(api, path, session_id="chat 2") != first
            assert named(api, path) == named(api, path, {SESSION_HEADER: ""}, session_id="") == ""
        accented = "é".encode().decode("latin-1")  # the bytes of UTF-8, as a header carries them
        assert named(api, headers={SESSION_HEADER: accented}).endswith("/é")
        api.post(COMPLETIONS, PROMPT | {"prompt": ["a", "b"], "n": 2, "session_id": "many"})
        assert [submit.session for submit in api.router.submits[-4:]] == [named(api, session_id="many")] * 4


def test_wrong_sessions_are_refused_by_the_fields_name(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"session_id": "x" * 257}, "session_id"),
        ({"session_id": 7}, "session_id"),
        ({"session_id": "a", "session_ttl": 0}, "session_ttl"),
        ({"session_id": "a", "session_ttl": 86_401}, "session_ttl"),
        ({"session_id": "a", "session_ttl": "long"}, "session_ttl"),
        ({"session_ttl": 5}, "session_ttl"),
    ]
    with service(tmp_path).running() as api:
        for path, (fields, field) in product(PATHS, wrong):
            status, _, content = api.send("POST", path, BODY | fields)
            assert (status, error_of(content)["param"]) == (400, field), (path, fields)
        assert api.send("POST", COMPLETIONS, BODY, {SESSION_HEADER: "x" * 257})[0] == 400
        # Also where the body names the session, and where fewer characters have so many bytes.
        accented = ("é" * 129).encode().decode("latin-1")
        for given in ("x" * 257, accented):
            assert (
                api.send("POST", COMPLETIONS, BODY | {"session_id": "a"}, {SESSION_HEADER: given})[0] == 400
            )
        assert not api.router.submits


def test_release_ends_a_session_and_an_unknown_one_is_404(tmp_path: Path) -> None:
    with service(tmp_path).running() as api:
        name = named(api, session_id="a/b c")
        assert release(api, "a%2Fb%20c") == (200, {"id": "a/b c", "object": "session", "released": True})
        eventually(lambda: api.router.released == [name])
        for unknown in ("a%2Fb%20c", "b", "x" * 1000):
            status, content = release(api, unknown)
            assert (status, content["error"]["type"]) == (404, "not_found_error")
        assert named(api, session_id="a/b c") == name  # it can be opened again
        assert release(api, "a%2Fb%20c")[0] == 200


def test_a_session_belongs_to_the_key_that_opened_it(tmp_path: Path) -> None:
    with service(tmp_path, api_key=("one", "two")).running() as api:
        name = named(api, headers=bearer("one"), session_id="s")
        assert "one" not in name  # the router never gets an API key
        foreign, unknown = release(api, "s", bearer("two")), release(api, "t", bearer("two"))
        assert foreign[0] == unknown[0] == 404
        assert foreign[1]["error"]["message"] == unknown[1]["error"]["message"].replace("'t'", "'s'")
        assert release(api, "s")[0] == 401
        assert named(api, headers=bearer("two"), session_id="s") != name
        assert release(api, "s", bearer("two"))[0] == 200
        assert release(api, "s", bearer("one"))[0] == 200  # which the other's release did not end


def test_with_the_namespace_header_a_session_belongs_to_its_value(tmp_path: Path) -> None:
    one, two = {NAMESPACE_HEADER: "one"}, {NAMESPACE_HEADER: "two"}
    with service(tmp_path, cache_namespace="header").running() as api:
        assert named(api, headers=one, session_id="s") != named(api, headers=two, session_id="s")
        assert release(api, "s")[0] == 400
        operation = json.loads(api.send("GET", "/openapi.json")[2])["paths"][RELEASE]["post"]
        assert sorted(operation["responses"]) == ["200", "400", "404", "413", "500"]
        assert [one["name"] for one in operation["parameters"]] == [NAMESPACE_HEADER, "session_id"]
        assert release(api, "s", {NAMESPACE_HEADER: "three"})[0] == 404
        assert [release(api, "s", headers)[0] for headers in (one, two, one)] == [200, 200, 404]


def test_a_session_expires_after_its_time_to_live(tmp_path: Path) -> None:
    with service(tmp_path, session_ttl=0.2).running() as api:
        short, long = named(api, session_id="short"), named(api, session_id="long", session_ttl=1000)
        eventually(lambda: api.router.released == [short])
        assert release(api, "short")[0] == 404
        assert release(api, "long")[0] == 200
        eventually(lambda: api.router.released == [short, long])


def test_a_session_does_not_expire_while_a_request_of_it_runs(tmp_path: Path) -> None:
    with service(tmp_path, session_ttl=0.4).running() as api:
        api.router.delay = 0.15
        assert api.send("POST", COMPLETIONS, PROMPT | {"max_tokens": 4, "session_id": "s"})[0] == 200
        assert not api.router.released
        eventually(lambda: len(api.router.released) == 1)
        api.router.refuse = lambda submit: Refused(submit.request_id, "queue_full", "full")
        assert api.send("POST", COMPLETIONS, PROMPT | {"session_id": "s"})[0] == 429
        eventually(lambda: len(api.router.released) == 2)
        api.router.refuse = lambda submit: None
        api.stream(COMPLETIONS, PROMPT | {"session_id": "s"})
        eventually(lambda: len(api.router.released) == 3)


def test_a_refused_request_leaves_no_session_behind(tmp_path: Path) -> None:
    """Otherwise a stream of refused requests, each with an id of its own, would end the sessions of others."""
    with service(tmp_path).running() as api:
        kept = named(api, session_id="kept")
        api.router.refuse = lambda submit: Refused(submit.request_id, "queue_full", "full")
        for session_id in ("new", "kept"):
            assert api.send("POST", COMPLETIONS, PROMPT | {"session_id": session_id})[0] == 429
        eventually(lambda: bool(api.router.released))
        assert release(api, "new")[0] == 404
        assert release(api, "kept")[0] == 200  # an earlier request has left tokens
        eventually(lambda: len(api.router.released) == 2)
        assert api.router.released[1] == kept


def test_the_document_has_the_route_and_the_header(tmp_path: Path) -> None:
    with service(tmp_path, api_key=("k",)).running() as api:
        paths = json.loads(api.send("GET", "/openapi.json", None, bearer("k"))[2])["paths"]
    operation = paths[RELEASE]["post"]
    assert sorted(operation["responses"]) == ["200", "400", "401", "404", "413", "500"]
    assert [(one["name"], one["in"]) for one in operation["parameters"]] == [("session_id", "path")]
    for path in PATHS:
        assert SESSION_HEADER in [one["name"] for one in paths[path]["post"]["parameters"]]


@pytest.mark.parametrize("seconds", [0.0, -1.0, 86_401.0, float("nan")])
def test_the_default_time_to_live_has_bounds(seconds: float) -> None:
    with pytest.raises(InvalidConfig, match="--session-ttl"):
        ServiceConfig(session_ttl=seconds)


async def test_open_sessions_count_their_requests_and_are_bounded() -> None:
    ended: list[str] = []
    sessions = OpenSessions(ended.append, max_sessions=2)

    def begin(name: str, ttl: float) -> OpenSession:
        session = sessions.begin(SessionUse(name, ttl))
        sessions.accept(session)
        return session

    first, again = begin("a", 1000.0), begin("a", 0.01)
    assert first is again
    sessions.end(first)
    await asyncio.sleep(0.05)
    assert ended == []  # the other request still runs
    sessions.end(again)
    await asyncio.sleep(0.05)
    assert ended == ["a"]  # by the latest request's time to live
    # A session that was released and opened again is another one.
    old = begin("a", 0.01)
    assert sessions.release("a")
    new = begin("a", 0.01)
    sessions.end(old)
    await asyncio.sleep(0.05)
    assert ended == ["a", "a"]
    sessions.end(new)
    sessions.end(begin("b", 1000.0))
    sessions.end(sessions.begin(SessionUse("refused", 1000.0)))
    assert ended == ["a", "a", "refused"]
    sessions.end(begin("c", 1000.0))  # a third: "a" was used the longest ago
    assert ended == ["a", "a", "refused", "a"]
    assert [sessions.release(name) for name in "abc"] == [False, True, True]
