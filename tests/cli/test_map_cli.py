"""The map of a service's pool, over HTTP and drawn in the terminal."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from lightkv.memory_map import CACHED, FREE, OWN, SHARED, MemoryMap, Owner
from lightkv.router.cli.app import app
from lightkv.router.cli.monitor import drawing, room
from lightkv.router.engine.step import PoolMap
from lightkv.router.service import router_client
from lightkv.router.service.messages import Mapped
from tests.support.fake_router import CAPACITY, POOL, ApiUnderTest, error_of, idle, service, wait_until
from tests.support.served import API_KEY


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiUnderTest]:
    with service(tmp_path_factory.mktemp("api"), api_key=(API_KEY,)).running() as under_test:
        yield under_test


@pytest.fixture
def api(shared: ApiUnderTest) -> ApiUnderTest:
    under_test = idle(shared)
    under_test.call(lambda: setattr(under_test.client, "_map", None))  # forget the last map
    return under_test


def get(api: ApiUnderTest, key: str = API_KEY) -> tuple[int, Any, bytes]:
    return api.send("GET", "/map", headers={"Authorization": f"Bearer {key}"})


def lightkv(api: ApiUnderTest, *args: str) -> tuple[int, str, str]:
    """Returns the command's exit code, standard output and standard error."""
    url = f"http://127.0.0.1:{api.port}"
    command = ["map", "--url", url, "--api-key", API_KEY, *args]
    result = CliRunner().invoke(app, command, prog_name="lightkv", env={"COLUMNS": "90"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_route_answers_with_the_routers_map(api: ApiUnderTest) -> None:
    status, _, content = get(api)
    assert status == 200
    assert msgspec.json.decode(content, type=PoolMap) == POOL
    assert get(api, "wrong")[0] == 401


def test_frequent_calls_return_the_same_map(api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_client, "MAP_SECONDS", 1000.0)
    for _ in range(5):
        assert get(api)[0] == 200
    assert api.router.num_map_asks == 1
    monkeypatch.setattr(router_client, "MAP_SECONDS", 0.0)
    assert get(api)[0] == 200
    assert api.router.num_map_asks == 2


def test_an_error_says_why_there_is_no_map(api: ApiUnderTest) -> None:
    api.router.mapped = Mapped(None, "starting: loading")
    status, headers, content = get(api)
    assert (status, int(headers["Retry-After"]) > 0) == (503, True)
    assert "starting: loading" in error_of(content)["message"]
    api.call(lambda: api.router.report("draining"))
    wait_until(lambda: api.client.status.state == "draining")
    api.call(lambda: setattr(api.client, "_map", None))
    assert get(api)[0] == 503
    assert api.router.num_map_asks == 1  # a router that is known to be draining is not asked


def test_the_end_of_the_router_ends_the_wait(tmp_path: Path) -> None:
    with service(tmp_path).running() as under_test:
        under_test.router.mapped = None
        connection = under_test.connect()
        connection.request("GET", "/map")
        wait_until(lambda: under_test.router.num_map_asks == 1)
        under_test.call(under_test.router.die)
        response = connection.getresponse()
        assert response.status == 503
        assert "router has ended" in error_of(response.read())["message"]
        connection.close()


def test_the_command_draws_the_pool(api: ApiUnderTest) -> None:
    code, out, err = lightkv(api)
    assert (code, err) == (0, "")
    *rows, mark, counts, run_line = out.splitlines()
    marks = "".join(rows)
    assert marks == "█" * 100 + "1" * 150 + "░" * 125 + "·" * 625
    assert [len(row) for row in rows] == [90] * 11 + [10]
    assert mark == f"a mark is 4 slots, of {CAPACITY:,}"
    assert counts == "· free 2,500   ░ cached 500   █ shared 400   0-Z one sequence's own 600"
    assert run_line == "longest free run 2,400; 4% of the free are not in it"


def test_the_command_lists_the_owners(api: ApiUnderTest) -> None:
    owners = [Owner(row, 700 - row, f"{row:032x}") for row in range(1, 13)]
    api.router.mapped = Mapped(msgspec.structs.replace(POOL, owners=owners))
    code, out, _ = lightkv(api)
    assert code == 0
    lines = out.splitlines()
    assert lines[-12].split() == ["mark", "row", "its", "own", "request"]
    assert lines[-11].split() == ["1", "1", "699", f"{1:032x}"]
    assert lines[-1] == "… and 2 more"
    found = json.loads(get(api)[2])["owners"]
    assert found[0] == {"row": 1, "num_tokens": 699, "request_id": f"{1:032x}"}
    assert len(found) == 12


def test_the_command_prints_json(api: ApiUnderTest) -> None:
    code, out, _ = lightkv(api, "--json")
    assert code == 0
    assert json.loads(out) == json.loads(get(api)[2])
    code, _, err = lightkv(api, "--json", "--watch")
    assert code == 2
    assert "leave one of them out" in " ".join(re.sub(r"[│╭╮╰╯─]", " ", err).split())


def test_the_command_without_a_map_fails(api: ApiUnderTest) -> None:
    api.router.mapped = Mapped(None, "starting: loading")
    code, out, err = lightkv(api)
    assert (code, out) == (1, "")
    assert err.startswith("lightkv: the service answers 503: starting: loading")


def test_watching_redraws_and_continues_after_an_error(api: ApiUnderTest) -> None:
    url = f"http://127.0.0.1:{api.port}"
    command = [
        sys.executable,
        "-m",
        "lightkv.router.cli",
        "map",
        "--url",
        url,
        "--watch",
        "--interval",
        "0.3",
    ]
    environment = os.environ | {"LIGHTKV_API_KEY": API_KEY, "PYTHONIOENCODING": "ascii", "COLUMNS": "60"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None

        def until(text: str) -> str:
            assert process.stdout is not None
            return next(line for line in process.stdout if text in line)

        until("longest free run")
        assert until("# shared").startswith(". free 2,500   = cached 500")
        api.router.mapped = Mapped(None, "no luck")
        until("the service answers 503: no luck")
        api.router.mapped = Mapped(POOL)
        until("longest free run")
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(10) == 0


def test_help_has_examples() -> None:
    found = CliRunner().invoke(app, ["map", "--help"], prog_name="lightkv")
    assert "lightkv map --watch" in found.stdout.split("Examples")[1]


def pool_of(labels: list[int], slots_per_cell: int = 1) -> PoolMap:
    drawn = MemoryMap(np.array(labels))
    return PoolMap(
        **drawn.counts._asdict(),
        slots_per_cell=slots_per_cell,
        cells=labels[::slots_per_cell],
        num_bytes=4 * (len(labels) + 1),
        owners=[Owner(one.row, one.num_tokens, f"request-{one.row}") for one in drawn.owners],
    )


def test_a_drawing_has_at_most_the_given_lines() -> None:
    labels = [2, 2, 1, 1, 0, 0, OWN + 1, OWN + 12, 0, 0]
    assert drawing(pool_of(labels), 5, 4).splitlines()[:3] == ["██░░·", "·1c··", "a mark is one slot, of 10"]
    assert drawing(pool_of(labels), 5, 1).splitlines()[:2] == ["█░·1·", "a mark is 2 slots, of 10"]
    assert drawing(pool_of(labels, 2), 5, 4).splitlines()[:2] == ["█░·1·", "a mark is 2 slots, of 10"]
    assert drawing(pool_of(labels, 2), 5, 4).splitlines()[2].startswith("· free 4   ░ cached 2   █ shared 2 ")


def many_owners(count: int) -> list[int]:
    """Returns labels by which row 1 holds one slot, row 2 two, and so on."""
    return [OWN + row for row in range(1, count + 1) for _ in range(row)]


def test_owners_are_listed_below_the_drawing_the_largest_first() -> None:
    labels = [SHARED, OWN + 1, OWN + 12, 0, OWN + 12, CACHED, OWN + 70, 0]
    shown = drawing(pool_of(labels), 8, 4).splitlines()
    assert shown[0] == "█1c·c░8·"
    assert shown[4:] == [
        "mark   row     its own   request",
        "   c    12           2   request-12",
        "   1     1           1   request-1",
        "   8    70           1   request-70",
    ]
    assert MemoryMap(np.array(labels)).draw(8).splitlines()[4:] == [
        "mark   row     its own",
        "   c    12           2",
        "   1     1           1",
        "   8    70           1",
    ]
    assert len(drawing(pool_of([FREE, SHARED, CACHED]), 8, 4).splitlines()) == 4


def test_the_number_of_listed_owners_depends_on_the_room() -> None:
    labels = many_owners(22)
    for text in (MemoryMap(np.array(labels)).draw(), drawing(pool_of(labels), 80, 16)):
        *_, tenth, rest = text.splitlines()
        assert tenth.split()[:3] == ["d", "13", "13"]
        assert rest == "… and 12 more"
    for num_lines in range(5, 60):
        shown = drawing(pool_of(labels), 4, *room(num_lines, 22)).splitlines()
        assert len(shown) <= num_lines
        listed = [line for line in shown if "request-" in line]
        assert len(listed) == min(10, max(num_lines // 3 - 2, 0))
        assert ("… and" in shown[-1]) == bool(listed)
    assert room(24, 0) == (21, 0)
    assert room(24, 3) == (17, 3)
    assert drawing(pool_of(many_owners(3)), 4, *room(24, 3)).splitlines()[-1].split()[-1] == "request-1"


def test_a_map_counts_every_label_once() -> None:
    labels = np.array(
        [FREE, FREE, SHARED, OWN + 3, FREE, CACHED, OWN + 3, OWN + 1, FREE, FREE, FREE], np.int32
    )
    drawn = MemoryMap(labels)
    assert drawn.counts == (11, 6, 1, 1, 3, 3)
    assert drawn.owners == [Owner(3, 2), Owner(1, 1)]
    assert MemoryMap(np.zeros(4, np.int32)).counts == (4, 4, 0, 0, 0, 4)
    assert MemoryMap(np.ones(4, np.int32)).owners == []


def test_a_pool_of_one_label_is_drawn() -> None:
    assert (
        drawing(pool_of([0] * 4), 4, 1).splitlines()[-1] == "longest free run 4; 0% of the free are not in it"
    )
    assert (
        drawing(pool_of([1] * 4), 4, 1).splitlines()[-1] == "longest free run 0; 0% of the free are not in it"
    )
