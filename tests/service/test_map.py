"""The map of a service: the worker's counts and the steps around it. `test_launch.py` asks a whole service."""

import asyncio
import random
from array import array
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from bench.common.random_model import random_model
from lightkv.edits import decode, encode
from lightkv.holdings import Holdings
from lightkv.ledger import TokenLedger
from lightkv.memory_map import CACHED, OWN, SHARED, MemoryMap
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import PoolMap, StepResult
from lightkv.router.model import runner as model_runner
from lightkv.router.model.build import build_runner
from lightkv.router.service.messages import Abort, AskMap, Mapped, WorkerError
from lightkv.router.service.worker_client import WorkerFailed
from tests.support.router_service import FakeWorker, Service
from tests.support.run_step import run_step

TINY = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
)  # fmt: skip


def labels_of(pool: PoolMap) -> MemoryMap:
    return MemoryMap(np.array(pool.cells, dtype=np.int32))


# --------------------------------------------------------------------------------
# The worker's counts


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    random_model(TINY, torch.device("cpu"), torch.float32).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return EngineConfig(
        str(directory), device="cpu", dtype="float32", max_total_tokens=150, max_num_seqs=4, prefill_chunk=16
    )


def run(config: EngineConfig, maps: list[tuple[PoolMap, tuple[int, int, int]]] | None) -> list[StepResult]:
    """Returns the result of every step. Appends to `maps` a map after each step, with the ledger's counts."""
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
        results.append(run_step(runner, plan))
        scheduler.complete(results[-1])
        if maps is not None:
            found = runner.map(encode(ledger.drain()), ledger.holdings())
            maps.append((found, (ledger.num_free, ledger.num_cached, ledger.num_held)))
    return results


def test_a_map_agrees_with_the_ledger_and_changes_no_step(config: EngineConfig) -> None:
    maps: list[tuple[PoolMap, tuple[int, int, int]]] = []
    assert run(config, maps) == run(config, None)
    shared = 0
    for pool, (num_free, num_cached, num_held) in maps:
        assert (pool.num_free, pool.num_cached) == (num_free, num_cached)
        assert pool.num_shared + pool.num_own == num_held
        assert (pool.capacity, pool.slots_per_cell, len(pool.cells)) == (150, 1, 150)
        assert labels_of(pool).counts == pool.counts
        assert set(pool.cells) <= {*range(3), *range(OWN + 1, OWN + 5)}
        shared += pool.num_shared
    assert shared  # the first twenty tokens of all prompts
    assert maps[-1][0].num_own == 0
    assert maps[-1][0].num_cached > 0


def test_cells_of_a_large_pool_are_a_sample_and_counts_are_complete(
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
# The router, which makes maps between steps for all clients that asked


class MappingWorker(FakeWorker):
    """A worker of integers which knows what its slots are used for."""

    num_maps = 0
    error: WorkerError | None = None

    async def map(self, edits: bytes, holdings: Holdings) -> PoolMap:
        self._require_alive()
        memory = self.model.memory
        memory.apply(decode(edits))
        self.num_maps += 1
        if self.error is not None:
            raise WorkerFailed(self.error)
        labels = np.full(len(memory.free) + 200, -1, dtype=np.int32)
        labels[list(memory.free)] = 0
        for name, slots in memory.segments.items():
            holders = [row.row for row in holdings.rows if name in row.segments]
            labels[slots] = CACHED if not holders else SHARED if len(holders) > 1 else OWN + holders[0]
        for row, _, start, end, *_ in holdings.rows:
            labels[[memory.rows[row][position] for position in range(start, end)]] = OWN + row
        cells = labels[1:201].tolist()
        assert -1 not in cells  # every slot has a label
        counts = MemoryMap(labels[1:201]).counts._asdict()
        return PoolMap(**counts, slots_per_cell=1, cells=cells, num_bytes=804)


class MappingService(Service):
    def make_worker(self) -> FakeWorker:
        self.workers.append(MappingWorker(self.pause))
        return self.workers[-1]


async def maps_of(client: Any, count: int) -> list[Mapped]:
    """Returns the next `count` maps. Other messages are noted as usual."""
    found: list[Mapped] = []
    while len(found) < count:
        answer = await client.take()
        if isinstance(answer, Mapped):
            found.append(answer)
    return found


@pytest.mark.parametrize("depth", [1, 2])
async def test_maps_are_made_between_steps_while_requests_run(tmp_path: Path, depth: int) -> None:
    served = MappingService(tmp_path / "router", depth, pause=0.001)
    client, other = await served.connect(), await served.connect()
    client.stream.send(AskMap())
    (empty,) = await maps_of(client, 1)  # while the router is idle
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
    assert max(pool.num_shared for pool in pools) == 7  # the prompt, less the token that each one computes
    assert max(len({cell for cell in pool.cells if cell >= OWN}) for pool in pools) == 3
    served.router.drain()
    assert await served.exit_code == 0
    assert served.workers[0].num_checks == 1  # the memory was recounted at the end


async def test_a_map_names_the_requests_that_hold_slots(tmp_path: Path) -> None:
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
            assert now <= {"a", "c", ""}  # a step in flight may still use the row of an ended request
        await client.until_ended("a", "c")
        client.stream.send(AskMap())
        (answer,) = await maps_of(client, 1)
        assert answer.pool is not None
        assert answer.pool.owners == []
        served.router.drain()
        assert await served.exit_code == 0

    await asyncio.wait_for(scenario(), 20)


@pytest.mark.parametrize("fatal", [False, True])
async def test_a_failed_map_is_answered_with_the_error(tmp_path: Path, fatal: bool) -> None:
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
        assert len(served.workers) == 1 + fatal  # a worker that has lost its device is replaced
        worker.error = None
        await client.submit("after", [1, 2, 3])
        assert (await client.until_ended("after"))["after"].finish_reason == "length"
        served.router.drain()
        assert await served.exit_code == 0

    await asyncio.wait_for(scenario(), 20)
