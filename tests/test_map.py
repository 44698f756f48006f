"""The map of a running service: what the worker counts, how it reaches the terminal, and that steps go on."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from fake_router import CAPACITY, POOL, ApiUnderTest, error_of, idle, service, wait_until
from served import API_KEY, Served, save_tiny_model
from test_router import FakeWorker, Service
from transformers import LlamaConfig
from typer.testing import CliRunner

from lightkv.edits import decode, encode
from lightkv.ledger import TokenLedger
from lightkv.memory_map import CACHED, FREE, OWN, SHARED, MemoryMap
from lightkv.router import EngineConfig, SamplingParams, model_runner
from lightkv.router.build import build_runner
from lightkv.router.cli import app
from lightkv.router.messages import Owners, PoolMap, StepResult, WorkerError
from lightkv.router.request import Request
from lightkv.router.router_client import MAP_SECONDS
from lightkv.router.scheduler import Scheduler
from lightkv.router.service_cli import drawing, room
from lightkv.router.service_messages import Abort, AskMap, Mapped, OwnedMap, RowOwner
from lightkv.router.weights import random_model
from lightkv.router.worker_client import WorkerFailed

TINY = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
)  # fmt: skip


def labels_of(pool: PoolMap) -> MemoryMap:
    return MemoryMap(np.array(pool.cells, dtype=np.int32))


# --------------------------------------------------------------------------------
# The worker: what it counts


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    random_model(TINY, torch.device("cpu"), torch.float32).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return EngineConfig(
        str(directory), device="cpu", dtype="float32", max_total_tokens=150, max_num_seqs=4, prefill_chunk=16
    )


def owners_of(ledger: TokenLedger) -> Owners:
    """As the router says them, from each sequence's path."""
    held: dict[int, list[int]] = {}
    for sequence in ledger.sequences:
        for segment in sequence.path():
            held.setdefault(segment.id, []).append(sequence.row)
    labels = {name: OWN + rows[0] if len(rows) == 1 else SHARED for name, rows in held.items()}
    return Owners(labels, [(one.row, one.shared, one.length) for one in ledger.sequences])


def run(config: EngineConfig, maps: list[tuple[PoolMap, tuple[int, int, int]]] | None) -> list[StepResult]:
    """Every step's result; `maps` gets a map after each, with what the ledger counts then."""
    runner, info = build_runner(config, lambda line: None)
    ledger = TokenLedger(info.capacity, info.limits.max_num_seqs, info.limits.max_model_len)
    scheduler = Scheduler(ledger, info.limits)
    rng = random.Random(0)
    for i in range(9):
        ids = [*range(5, 25), *(rng.randrange(64) for _ in range(rng.randint(1, 12)))]
        params = SamplingParams(temperature=0.8, max_tokens=rng.randint(2, 9))
        scheduler.add(Request(str(i), array("i", ids).tobytes(), params, seed=i))
    results = []
    while (plan := scheduler.plan()) is not None:
        results.append(runner.execute(plan))
        scheduler.consume(results[-1])
        if maps is not None:
            owners = owners_of(ledger)
            found = runner.map(encode(ledger.drain()), owners)
            maps.append((found, (ledger.num_free, ledger.num_cached, ledger.num_held)))
    return results


def test_a_map_counts_as_the_ledger_and_changes_no_step(config: EngineConfig) -> None:
    maps: list[tuple[PoolMap, tuple[int, int, int]]] = []
    assert run(config, maps) == run(config, None)
    shared = 0
    for pool, (num_free, num_cached, num_held) in maps:
        assert (pool.num_free, pool.num_cached) == (num_free, num_cached)
        assert pool.num_shared + pool.num_own == num_held
        assert (pool.capacity, pool.slots_per_cell, len(pool.cells)) == (150, 1, 150)
        drawn = labels_of(pool).counts
        assert drawn == tuple(getattr(pool, name) for name in drawn._fields)
        assert set(pool.cells) <= {*range(3), *range(OWN + 1, OWN + 5)}
        shared += pool.num_shared
    assert shared  # the twenty tokens that all begin with
    assert maps[-1][0].num_own == 0
    assert maps[-1][0].num_cached > 0


def test_a_large_pool_is_sampled_and_counted_whole(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[tuple[PoolMap, tuple[int, int, int]]] = []
    run(config, whole)
    monkeypatch.setattr(model_runner, "MAX_CELLS", 40)
    sampled: list[tuple[PoolMap, tuple[int, int, int]]] = []
    run(config, sampled)
    for (full, _), (part, _) in zip(whole, sampled, strict=True):
        assert part == msgspec.structs.replace(full, slots_per_cell=4, cells=full.cells[::4])
        assert len(part.cells) == 38


# --------------------------------------------------------------------------------
# The router: between steps, for all who asked


class MappingWorker(FakeWorker):
    """A worker of integers that can tell its slots."""

    num_maps = 0
    error: WorkerError | None = None

    async def map(self, edits: bytes, owners: Owners) -> PoolMap:
        self._require_alive()
        memory = self.model.memory
        memory.apply(decode(edits))
        self.num_maps += 1
        if self.error is not None:
            raise WorkerFailed(self.error)
        labels = np.full(len(memory.free) + 200, -1, dtype=np.int32)
        labels[list(memory.free)] = 0
        for name, slots in memory.segments.items():
            labels[slots] = owners.segments.get(name, CACHED)
        for row, start, end in owners.private:
            labels[[memory.rows[row][position] for position in range(start, end)]] = OWN + row
        cells = labels[1:201].tolist()
        assert -1 not in cells  # every slot has its use
        return PoolMap(*MemoryMap(labels[1:201]).counts, 1, cells)


class MappingService(Service):
    def make_worker(self) -> FakeWorker:
        self.workers.append(MappingWorker(self.pause))
        return self.workers[-1]


async def maps_of(client: Any, count: int) -> list[Mapped]:
    """The next answers; what else comes is noted as ever."""
    found: list[Mapped] = []
    while len(found) < count:
        answer = await client.take()
        if isinstance(answer, Mapped):
            found.append(answer)
    return found


@pytest.mark.parametrize("depth", [1, 2])
def test_maps_are_taken_between_steps_while_requests_run(tmp_path: Path, depth: int) -> None:
    async def scenario() -> None:
        served = MappingService(tmp_path / "router", depth, pause=0.001)
        client, other = await served.connect(), await served.connect()
        client.stream.send(AskMap())
        (empty,) = await maps_of(client, 1)  # while it is idle
        assert empty.pool is not None
        assert (empty.pool.num_free, empty.pool.longest_free_run) == (200, 200)
        for name in ("a", "b", "c"):
            await client.submit(name, [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=40)
        pools = []
        for _ in range(12):
            client.stream.send(AskMap())
            other.stream.send(AskMap())
            mine, theirs = await maps_of(client, 1), await maps_of(other, 1)
            pools += [answer.pool for answer in (*mine, *theirs) if answer.pool is not None]
            await asyncio.sleep(0.002)
        ended = await client.until_ended("a", "b", "c")
        assert {event.finish_reason for event in ended.values()} == {"length"}
        assert len(pools) == 24
        for pool in pools:
            assert pool.num_free + pool.num_cached + pool.num_shared + pool.num_own == 200
        assert max(pool.num_shared for pool in pools) == 7  # the prompt, less the token that each computes
        assert max(len({cell for cell in pool.cells if cell >= OWN}) for pool in pools) == 3
        assert served.workers[0].num_checks  # its books were recounted at the end
        served.router.drain()
        assert await served.exit_code == 0

    asyncio.run(scenario())


def test_a_map_says_which_request_holds_what(tmp_path: Path) -> None:
    async def scenario() -> None:
        served = MappingService(tmp_path / "router", 1, pause=0.001)
        client = await served.connect()
        for name in ("a", "b", "c"):
            await client.submit(name, [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=60)
        names: set[str] = set()
        for _ in range(8):
            client.stream.send(AskMap())
            ((pool, _),) = [(answer.pool, answer.error) for answer in await maps_of(client, 1)]
            assert pool is not None
            own = {row: pool.cells.count(OWN + row) for row in range(1, 5)}
            assert {one.row: one.num_tokens for one in pool.owners} == {r: n for r, n in own.items() if n}
            counts = [one.num_tokens for one in pool.owners]
            assert counts == sorted(counts, reverse=True)
            assert len({one.request_id for one in pool.owners}) == len(pool.owners)
            names |= {one.request_id for one in pool.owners}
            await asyncio.sleep(0.002)
        assert names == {"a", "b", "c"}
        client.stream.send(Abort("b"))
        while True:
            client.stream.send(AskMap())
            (answer,) = await maps_of(client, 1)
            assert answer.pool is not None
            if (now := {one.request_id for one in answer.pool.owners}) <= {"a", "c"}:
                break
            assert now <= {"a", "c", ""}  # a step may still have it
        await client.until_ended("a", "c")
        client.stream.send(AskMap())
        (answer,) = await maps_of(client, 1)
        assert answer.pool is not None
        assert answer.pool.owners == []
        served.router.drain()
        assert await served.exit_code == 0

    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 20)

    asyncio.run(bounded())


@pytest.mark.parametrize("fatal", [False, True])
def test_a_map_that_fails_is_answered(tmp_path: Path, fatal: bool) -> None:
    async def scenario() -> None:
        served = MappingService(tmp_path / "router", 1)
        client = await served.connect()
        worker = served.workers[0]
        assert isinstance(worker, MappingWorker)
        worker.error = WorkerError("OutOfMemoryError", "no room", fatal)
        client.stream.send(AskMap())
        (answer,) = await maps_of(client, 1)
        assert answer.pool is None
        assert "no room" in answer.error
        await client.until(lambda status: status.state == "ready")
        assert len(served.workers) == 1 + fatal  # one that has lost its device is replaced
        worker.error = None
        await client.submit("after", [1, 2, 3])
        assert (await client.until_ended("after"))["after"].finish_reason == "length"
        served.router.drain()
        assert await served.exit_code == 0

    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 20)

    asyncio.run(bounded())


# --------------------------------------------------------------------------------
# The API and the terminal, over a router of tests


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiUnderTest]:
    with service(tmp_path_factory.mktemp("api"), api_key=API_KEY).running() as under_test:
        yield under_test


@pytest.fixture
def api(shared: ApiUnderTest) -> ApiUnderTest:
    under_test = idle(shared)
    under_test.call(lambda: setattr(under_test.client, "_map", None))  # none is remembered
    return under_test


def get(api: ApiUnderTest, key: str = API_KEY) -> tuple[int, Any, bytes]:
    return api.send("GET", "/map", headers={"Authorization": f"Bearer {key}"})


def lightkv(api: ApiUnderTest, *args: str) -> tuple[int, str, str]:
    """The command's exit code, standard output and standard error."""
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


def test_who_asks_often_is_given_the_same_map(api: ApiUnderTest) -> None:
    for _ in range(5):
        assert get(api)[0] == 200
    assert api.router.num_map_asks == 1
    wait_until(lambda: get(api)[0] == 200 and api.router.num_map_asks == 2, seconds=MAP_SECONDS + 5)


def test_no_map_is_an_error_that_says_why(api: ApiUnderTest) -> None:
    api.router.mapped = Mapped(None, "starting: loading")
    status, headers, content = get(api)
    assert (status, int(headers["Retry-After"]) > 0) == (503, True)
    assert "starting: loading" in error_of(content)["message"]
    api.call(lambda: api.router.report("draining"))
    wait_until(lambda: api.client.status.state == "draining")
    api.call(lambda: setattr(api.client, "_map", None))
    assert get(api)[0] == 503
    assert api.router.num_map_asks == 1  # the router is not asked when it is known to take nothing


def test_a_router_that_goes_ends_the_wait(tmp_path: Path) -> None:
    with service(tmp_path).running() as under_test:
        under_test.router.mapped = None
        connection = under_test.connect()
        connection.request("GET", "/map")
        wait_until(lambda: under_test.router.num_map_asks == 1)
        under_test.call(under_test.router.die)
        response = connection.getresponse()
        assert response.status == 503
        assert "router is gone" in error_of(response.read())["message"]
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
    holders = [RowOwner(row, 700 - row, f"{row:032x}") for row in range(1, 13)]
    api.router.mapped = Mapped(OwnedMap(**msgspec.structs.asdict(POOL), owners=holders))
    code, out, _ = lightkv(api)
    assert code == 0
    lines = out.splitlines()
    assert lines[-12].split() == ["mark", "row", "its", "own", "request"]
    assert lines[-11].split() == ["1", "1", "699", f"{1:032x}"]
    assert lines[-1] == "… and 2 more"
    found = json.loads(get(api)[2])["owners"]
    assert found[0] == {"row": 1, "num_tokens": 699, "request_id": f"{1:032x}"}
    assert len(found) == 12


def test_the_command_gives_json(api: ApiUnderTest) -> None:
    code, out, _ = lightkv(api, "--json")
    assert code == 0
    assert json.loads(out) == json.loads(get(api)[2])
    code, _, err = lightkv(api, "--json", "--watch")
    assert code == 2
    assert "leave one of them out" in " ".join(err.split())


def test_the_command_without_a_map_fails(api: ApiUnderTest) -> None:
    api.router.mapped = Mapped(None, "starting: loading")
    code, out, err = lightkv(api)
    assert (code, out) == (1, "")
    assert err.startswith("lightkv: the service answers 503: starting: loading")


def test_watching_draws_again_and_outlasts_an_error(api: ApiUnderTest) -> None:
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


def test_help_has_examples_and_loads_neither_torch_nor_the_server() -> None:
    program = """
import sys
from lightkv.router.cli import app
try:
    app(["map", "--help"])
except SystemExit:
    pass
heavy = {"torch", "transformers", "fastapi", "uvicorn", "rpyc"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "lightkv map --watch" in done.stdout.split("Examples")[1]


def pool_of(labels: list[int], slots_per_cell: int = 1) -> OwnedMap:
    drawn = MemoryMap(np.array(labels))
    holders = [RowOwner(one.row, one.num_tokens, f"request-{one.row}") for one in drawn.owners]
    return OwnedMap(*drawn.counts, slots_per_cell, labels[::slots_per_cell], holders)


def test_a_drawing_has_the_lines_that_it_may() -> None:
    labels = [2, 2, 1, 1, 0, 0, OWN + 1, OWN + 12, 0, 0]
    assert drawing(pool_of(labels), 5, 4).splitlines()[:3] == ["██░░·", "·1c··", "a mark is one slot, of 10"]
    assert drawing(pool_of(labels), 5, 1).splitlines()[:2] == ["█░·1·", "a mark is 2 slots, of 10"]
    assert drawing(pool_of(labels, 2), 5, 4).splitlines()[:2] == ["█░·1·", "a mark is 2 slots, of 10"]
    assert drawing(pool_of(labels, 2), 5, 4).splitlines()[2].startswith("· free 4   ░ cached 2   █ shared 2 ")


def many_owners(count: int) -> list[int]:
    """Labels by which row 1 holds one slot, row 2 two, and so on."""
    return [OWN + row for row in range(1, count + 1) for _ in range(row)]


def test_owners_stand_below_the_drawing_the_biggest_first() -> None:
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


def test_as_many_owners_are_listed_as_fit() -> None:
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
    assert drawn.owners == [(3, 2, ""), (1, 1, "")]
    assert MemoryMap(np.zeros(4, np.int32)).counts == (4, 4, 0, 0, 0, 4)
    assert MemoryMap(np.ones(4, np.int32)).owners == []


def test_a_pool_of_one_sort_is_drawn() -> None:
    assert (
        drawing(pool_of([0] * 4), 4, 1).splitlines()[-1] == "longest free run 4; 0% of the free are not in it"
    )
    assert (
        drawing(pool_of([1] * 4), 4, 1).splitlines()[-1] == "longest free run 0; 0% of the free are not in it"
    )


# --------------------------------------------------------------------------------
# The whole service


def test_the_map_of_a_service_that_answers(tmp_path: Path) -> None:
    served = Served(save_tiny_model(tmp_path / "tiny"), tmp_path / "log", api_key=API_KEY)
    try:
        served.wait_ready()
        status, empty, _ = served.request("/map")
        assert (status, empty["num_free"], empty["slots_per_cell"]) == (200, 8192, 1)
        with served.stream(4000) as events:
            found: dict[str, Any] = {}

            def maps_its_tokens() -> bool:
                found.update(served.request("/map")[1])
                return found["num_own"] > 8

            wait_until(maps_its_tokens)
            rows = {cell for cell in found["cells"] if cell >= OWN}
            assert len(rows) == 1
            assert found["cells"].count(rows.pop()) == found["num_own"]
            num_own = found["num_own"]
            wait_until(lambda: served.request("/map")[1]["num_own"] > num_own)  # it goes on
            assert "choices" in next(events)
        load = served.at_rest()
        wait_until(lambda: served.request("/map")[1]["num_own"] == 0)
        pool = served.request("/map")[1]
        assert (pool["num_free"], pool["num_cached"]) == (load["free"], load["cached"])
        assert "Traceback" not in served.log.read_text()
    finally:
        served.close()
