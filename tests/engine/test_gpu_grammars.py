"""Tests rows with a grammar on a GPU: with graphs and two steps in flight they sample as one step at a time."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightkv.ledger import TokenLedger
from lightkv.router import EngineConfig
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.model.build import assemble
from tests.support.byte_model import save_byte_model
from tests.support.capturing import capture_before_each_step
from tests.support.grammar_rows import run, tokens
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
    engine = LocalEngine(Scheduler(ledger, info.limits, depth, admission=admission), runner)
    capture_before_each_step(engine, runner.num_missing_graphs)  # so that some steps lack their graphs
    return engine


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
