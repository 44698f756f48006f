"""The OpenAPI document, compared with the answers of the running service.

schemathesis generates the requests, valid ones and ones that are wrong in one place.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_router import MODEL, ApiUnderTest, service
from tests.support.served import API_KEY, Served, save_tiny_model

KEYED = {"Authorization": f"Bearer {API_KEY}"}
# This check of schemathesis is left out. It expects every request that the types allow to be accepted, but only
# the descriptions say which fields go together and what fits the context.
UNCHECKED = "positive_data_acceptance"
PROBES = ("/health", "/ready")
# The statuses of each route, without 401, which all routes but those of probes have.
ALWAYS = {"200", "413", "500"}
STATUSES = {
    "/v1/completions": {"400", "404", "429", "503"},
    "/v1/chat/completions": {"400", "404", "429", "503"},
    "/v1/responses": {"400", "404", "429", "503"},
    "/v1/messages": {"400", "404", "429", "529"},
    "/v1/messages/count_tokens": {"400", "404", "429"},
    "/v1/sessions/{session_id}/release": {"400", "404"},
    "/v1/models": set(),
    "/v1/models/{model}": {"404"},
    "/tokenize": {"400", "404", "429"},
    "/detokenize": {"400", "404", "429"},
    "/health": {"503"},
    "/ready": {"503"},
    "/metrics": set(),
    "/load": set(),
    "/map": {"503"},
    "/version": set(),
    "/reset_prefix_cache": {"400", "503"},
    "/server_info": set(),
}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiUnderTest]:
    with service(tmp_path_factory.mktemp("api"), api_key=(API_KEY,)).running() as under_test:
        yield under_test


@pytest.fixture(scope="module")
def document(api: ApiUnderTest) -> dict[str, Any]:
    return json.loads(api.send("GET", "/openapi.json", headers=KEYED)[2])


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the only operation of each path."""
    found = {}
    for path, methods in document["paths"].items():
        (found[path],) = methods.values()
    return found


def fuzz(url: str, folder: Path, phases: list[str], *bounds: str) -> None:
    """Runs schemathesis on the API at `url`. These phases of it have to find no fault."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--no-color"]
    fixed = ["--seed", "1", "--generation-database", "none"]
    checks = ["--checks", "all", "--exclude-checks", UNCHECKED, "--continue-on-failure"]
    headers = ["-H", f"Authorization: {KEYED['Authorization']}"]
    done = subprocess.run(
        [*command, *bounds, *fixed, *checks, *headers],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for phase in phases:
        assert f"✅ {phase}" in done.stdout, done.stdout


def test_schemathesis_finds_no_fault(api: ApiUnderTest, tmp_path: Path) -> None:
    fuzz(f"http://127.0.0.1:{api.port}", tmp_path, ["Fuzzing"], "--phases", "fuzzing", "--max-examples", "3")
    assert api.router.submits  # some of them came to the router


@pytest.mark.slow
def test_schemathesis_finds_no_fault_in_a_whole_service(tmp_path: Path) -> None:
    """Its context is short: a chat's template takes 30 tokens, and answers without max_tokens, which may use
    all the rest, are most of the time that schemathesis waits."""
    model = save_tiny_model(tmp_path / "tiny")
    served = Served(model, tmp_path / "log", "--max-model-len", "36", api_key=API_KEY)
    try:
        fuzz(served.wait_ready().url, tmp_path, ["Coverage", "Fuzzing"], "--max-examples", "12")
        assert served.at_rest()["generated_tokens"] > 0  # some of them were answered
        assert "Traceback" not in served.log.read_text()
    finally:
        served.close()


def test_every_status_that_a_route_has_is_documented_and_no_other(document: dict[str, Any]) -> None:
    found = {path: set(operation["responses"]) for path, operation in operations(document).items()}
    guarded = {path: set() if path in PROBES else {"401"} for path in STATUSES}
    assert found == {path: ALWAYS | statuses | guarded[path] for path, statuses in STATUSES.items()}


def test_errors_are_documented_as_they_are_sent(document: dict[str, Any]) -> None:
    for path, operation in operations(document).items():
        for status, response in operation["responses"].items():
            if status == "200" or (status == "503" and path in PROBES):
                assert "content" not in response, (path, status)
                continue
            schema = response["content"]["application/json"]["schema"]
            name = "MessageErrorBody" if path.startswith("/v1/messages") else "ErrorBody"
            assert schema == {"$ref": f"#/components/schemas/{name}"}, (path, status)
            waits = status in ("429", "503", "529")
            assert ("Retry-After" in response.get("headers", {})) == waits, (path, status)
    assert "ValidationError" not in json.dumps(document)


def test_the_key_is_documented_for_the_routes_that_need_it(
    document: dict[str, Any], api: ApiUnderTest
) -> None:
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, operation in operations(document).items():
        needs_key = api.send("GET", path.replace("{model}", "x"))[0] == 401
        assert operation.get("security", []) == ([{"key": []}] if needs_key else []), path
        assert needs_key == (path not in PROBES)


def test_the_document_names_the_models(document: dict[str, Any], api: ApiUnderTest) -> None:
    (parameter,) = operations(document)["/v1/models/{model}"]["parameters"]
    assert parameter["schema"]["enum"] == [MODEL, "alias/of-it"]
