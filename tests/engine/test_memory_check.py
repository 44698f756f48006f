"""An engine's recount, whose expectations travel to the worker, finds what is wrong in its memory."""

from array import array
from collections.abc import Callable

import msgspec
import pytest
import torch

from lightkv.edits import encode
from lightkv.errors import CheckFailed
from lightkv.memory.kv_memory import KVMemory
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.engine.step import ExpectedMemory
from lightkv.router.model.build import assemble
from tests.support.tiny_models import tiny_llama


def make() -> tuple[LocalEngine, KVMemory]:
    """Returns an engine in the middle of two requests that share a prefix, and its memory."""
    config = EngineConfig(device="cpu", max_num_seqs=4, max_total_tokens=300, prefill_chunk=16)
    runner, info = assemble(tiny_llama(torch.device("cpu")), config, lambda line: None)
    engine = LocalEngine(make_scheduler(info), runner)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for i in range(2):
        engine.add(Request(str(i), array("i", [*range(1, 13), 20 + i]).tobytes(), params, seed=i))
        for _ in range(4):
            engine.step()
    engine.settle()
    engine.check()
    return engine, runner._parts.memory


def swap_entries(memory: KVMemory) -> None:
    rows = memory.table.req_to_token[1:3]
    rows[:, [0, 1]] = rows[:, [1, 0]]


PLANTED: dict[str, Callable[[KVMemory], object]] = {
    "table": swap_entries,
    "segment": lambda memory: memory.segments.of_class[0].popitem(),
    "dropped": lambda memory: memory._dropped.update({1: (torch.arange(3), 1)}),
    "allocator": lambda memory: memory.allocator.mem_state[-1:].zero_(),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_of_the_memory_is_found(fault: str) -> None:
    engine, memory = make()
    PLANTED[fault](memory)
    with pytest.raises(CheckFailed):
        engine.check()


def test_what_a_worker_is_told_arrives_as_it_was() -> None:
    engine, _ = make()
    message = encode([]), engine.sync_memory()[1]
    assert any(row.segments for row in message[1].holdings.rows)
    coded = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.Decoder(tuple[bytes, ExpectedMemory]).decode(coded) == message
