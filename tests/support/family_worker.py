"""A worker of a router in tests that runs a tiny model of a family with layer groups, in the same process.

Plans, results and recounts pass through the bytes of the wire, and through the methods of a worker process.
"""

import asyncio
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from lightkv.router.config import EngineConfig
from lightkv.router.engine.step import ExpectedMemory, RunnerInfo, StepPlan, StepResult
from lightkv.router.model.runner import ModelRunner
from lightkv.router.service.messages import Done, WorkerError, WorkerStart
from lightkv.router.service.worker import Worker
from lightkv.router.service.worker_client import WorkerFailed
from tests.support.router_service import FakeWorker
from tests.support.windowed_models import FAMILIES

_encode = msgspec.msgpack.encode


def save_family(directory: Path, family: str) -> Path:
    """Saves the family's tiny model, with a tokenizer of which only the file exists."""
    FAMILIES[family].model().save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


class FamilyWorker(FakeWorker):
    """Runs the model in `directory` with a pool of `num_tokens` tokens, in chunks of 16."""

    def __init__(self, directory: Path, num_tokens: int, pause: float = 0.0) -> None:
        super().__init__(pause)
        self._config = EngineConfig(
            str(directory),
            device="cpu",
            dtype="float32",
            kv_dtype="auto",
            prefill_chunk=16,
            max_total_tokens=num_tokens,
            max_num_seqs=6,
        )
        self._worker = Worker(io.StringIO())

    @property
    def runner(self) -> ModelRunner:
        """Of the model, once it is loaded."""
        assert self._worker._runner is not None
        return self._worker._runner

    async def start(self, config: EngineConfig, report: Callable[[str], None]) -> RunnerInfo:
        done = self._worker.exposed_start(_encode(WorkerStart(self._config)))
        return _result(done, RunnerInfo)  # type: ignore[no-any-return]

    async def step(self, plan: StepPlan) -> StepResult | None:
        await asyncio.sleep(self.pause)
        self._require_alive()
        return _step(self._worker.exposed_step(_encode(plan)))

    async def flush(self) -> StepResult | None:
        await asyncio.sleep(self.pause)
        self._require_alive()
        return _step(self._worker.exposed_flush())

    async def check(self, edits: bytes, expected: ExpectedMemory) -> None:
        _result(self._worker.exposed_check(_encode((edits, expected))), bytes)
        self.num_checks += 1


def _step(answer: bytes) -> StepResult | None:
    return _result(answer, StepResult | None)  # type: ignore[no-any-return]


def _result(answer: bytes, kind: Any) -> Any:
    found = msgspec.msgpack.decode(answer, type=Done[kind] | WorkerError)
    if isinstance(found, WorkerError):
        raise WorkerFailed(found)
    return found.result
