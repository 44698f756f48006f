"""Tests rows with a grammar on a GPU: with graphs and two steps in flight they sample as one step at a time."""

from array import array
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightkv.ledger import TokenLedger
from lightkv.router import EngineConfig
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.model.build import assemble
from lightkv.router.sampling_params import Grammar, SamplingParams
from tests.support.byte_model import save_byte_model
from tests.support.grammar_rows import END, compile_grammars, run, tokens
from tests.support.preempting import counted_by, expecting

pytestmark = pytest.mark.gpu


def make(directory: Path, depth: int, graphs: bool, pool: int = 2000) -> LocalEngine:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).cuda()
    config = EngineConfig(
        device="cuda", max_total_tokens=pool, max_num_seqs=8, prefill_chunk=32, cuda_graphs=graphs
    )
    runner, info = assemble(model, config, lambda line: None, directory=directory)
    ledger = TokenLedger(info.capacity, info.limits.max_num_seqs, info.limits.max_model_len)
    admission = counted_by(expecting(4) if pool < 2000 else None)
    return LocalEngine(Scheduler(ledger, info.limits, depth, admission=admission), runner)


def test_graphs_and_two_steps_in_flight_give_the_same_tokens(tmp_path: Path) -> None:
    """The batch is mixed: a third of the rows have no grammar, and some of the others have penalties."""
    directory, _ = save_byte_model(tmp_path)
    expected = tokens(run(make(directory, 1, graphs=False)))
    for depth, graphs in ((1, True), (2, False), (2, True)):
        assert tokens(run(make(directory, depth, graphs))) == expected


def test_a_resumed_row_goes_on_in_its_grammar(tmp_path: Path) -> None:
    directory, _ = save_byte_model(tmp_path)
    expected = tokens(run(make(directory, 1, graphs=True)))
    engine = make(directory, 2, graphs=True, pool=220)
    assert tokens(run(engine)) == expected
    assert engine.stats().num_preemptions >= 3


@pytest.mark.parametrize("shares", [False, True])
def test_the_first_rows_with_a_grammar_capture_nothing(tmp_path: Path, shares: bool) -> None:
    """Their graphs are captured at the start, so that no stream waits for them: those of every size of batches,
    and with shared prefixes those of the powers of two."""
    directory, _ = save_byte_model(tmp_path)
    for temperature in (0.0,) if shares else (0.0, 1.0):
        engine = make(directory, 2, graphs=True)
        told: list[str] = []
        engine.executor.announce(told.append)  # type: ignore[attr-defined]
        compile_grammars(engine, [Grammar("regex", "[a-f ]{20,40}")])
        for i in range(8):
            prompt = range(60, 100) if shares else range(60 + i, 80 + 2 * i)
            ids = array("i", prompt).tobytes()
            params = SamplingParams(max_tokens=24, temperature=temperature)
            engine.add(Request(str(i), ids, params, seed=i, stop_ids=frozenset({END}), grammar=1))
        while engine.has_work:
            assert all(event.finish_reason != "error" for event in engine.step())
        captured = [line for line in told if "with masks" in line]
        assert not captured
