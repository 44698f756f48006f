"""The memory of a model whose layers have states: how it is divided between K/V and states, and what start,
`lightkv info` and map report of it. A small Llama, whose shape gets states beside its K/V, stands for it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lightkv.edits import encode
from lightkv.errors import OutOfMemory
from lightkv.integrations.model.probe import ModelShape, probe
from lightkv.ledger import TokenLedger
from lightkv.memory import kv_pool
from lightkv.memory.kv_spec import StateTensor
from lightkv.router import EngineConfig
from lightkv.router.cli.app import app
from lightkv.router.cli.monitor import drawing
from lightkv.router.config import InvalidConfig
from lightkv.router.engine.step import StateMap
from lightkv.router.model import build, info
from lightkv.router.model import sizes as sizes_module
from lightkv.router.model.build import assemble, build_runner
from lightkv.router.model.info import model_info
from lightkv.router.model.sizes import EngineSizes, state_ratio
from lightkv.token_ids import int32_bytes
from tests.support.hybrid_models import save_hybrid
from tests.support.served import save_tiny_model
from tests.support.tiny_models import tiny_llama

CPU = torch.device("cpu")
STATES = (
    (StateTensor("state", (2, 8, 8), torch.float32), StateTensor("inputs", (3, 20), torch.float16)),
) * 2
STATE_BYTES = 2 * (2 * 8 * 8 * 4 + 3 * 20 * 2)


def with_states(shape: ModelShape) -> ModelShape:
    return replace(shape, spec=replace(shape.spec, states=STATES))


def sizes_of(**settings: object) -> tuple[EngineSizes, ModelShape]:
    model = tiny_llama(CPU, context=160)
    config = EngineConfig(device="cpu", max_num_seqs=4, prefill_chunk=40, **settings)  # type: ignore[arg-type]
    return EngineSizes(config, CPU, model.config.get_text_config()), with_states(probe(model))


@pytest.mark.parametrize("ratio", [None, 0.001, 0.1, 0.9, 7.0])
def test_tokens_and_states_take_no_more_than_there_is(
    ratio: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, shape = sizes_of(mamba_full_memory_ratio=ratio)
    spec = shape.spec
    for budget in range(20_000, 60_000, 997):
        free = 4 * (budget + sizes.step_bytes(shape))
        for module in (kv_pool, sizes_module):
            monkeypatch.setattr(module, "free_bytes", lambda device, free=free: free)
        plan = sizes.memory(shape)
        of_states, of_tokens = plan.state_bytes(spec), plan.pool.num_bytes
        assert of_states == (plan.num_states + 1) * STATE_BYTES
        assert budget - spec.bytes_per_slot < of_tokens + of_states <= budget
        if ratio is not None:
            assert of_states <= max(ratio * (budget - of_states), 2 * STATE_BYTES)
            share = ratio / (1 + ratio)
            assert of_states > share * (budget - spec.bytes_per_slot) - STATE_BYTES - 1


def test_the_states_of_given_tokens_are_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, shape = sizes_of(max_total_tokens=100, mamba_full_memory_ratio=0.5)
    plan = sizes.memory(shape)
    assert plan.pool.num_tokens == 100
    assert plan.num_states + 1 == 101 * shape.spec.bytes_per_token // 2 // STATE_BYTES
    free = plan.pool.num_bytes + plan.state_bytes(shape.spec)
    for less in (0, 1):
        for module in (kv_pool, sizes_module):
            monkeypatch.setattr(module, "free_bytes", lambda device, free=free - less: free)
        if not less:
            assert sizes.memory(shape) == plan
            continue
        with pytest.raises(OutOfMemory, match=f"{plan.num_states + 1} states .* raise the memory fraction"):
            sizes.memory(shape)


def test_four_requests_have_states_where_half_of_the_memory_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (None, 2):
        sizes, shape = sizes_of(max_total_tokens=given)
        assert sizes.memory(shape).num_states >= 4
        for num in (2, 3, 4, 5, 6):
            free = 4 * (2 * num * STATE_BYTES + sizes.step_bytes(shape))
            for module in (kv_pool, sizes_module):
                monkeypatch.setattr(module, "free_bytes", lambda device, free=free: free)
            assert sizes.memory(shape).num_states == max(min(num, 5) - 1, 1)
    sizes, shape = sizes_of(max_total_tokens=2, mamba_full_memory_ratio=0.001)
    assert sizes.memory(shape).num_states == 1


def test_layers_whose_keys_stay_are_those_of_the_model() -> None:
    for skipped, is_quantised in (("", True), ("5", True), ("3,5", False)):
        sizes, shape = sizes_of(kv_dtype="int8", kv_skip_layers=skipped)
        numbered = replace(shape, numbers=(3, 5))
        assert sizes.with_format(numbered).spec.format_of(0).is_quantised is is_quantised
    with pytest.raises(InvalidConfig, match=r"layers \[0, 4\] have no K/V; give some of 3, 5, which have"):
        sizes_of(kv_dtype="int8", kv_skip_layers="0,4,5")[0].with_format(numbered)


def test_info_of_a_hybrid_is_that_of_its_runner(tmp_path: Path) -> None:
    saved = save_hybrid(tmp_path / "model")
    for settings in ({}, {"kv_dtype": "int8"}, {"kv_dtype": "int8", "kv_skip_layers": "3"}):
        config = EngineConfig(str(saved), device="cpu", **settings)  # type: ignore[arg-type]
        told = model_info(config, saved)
        _, found = build_runner(config, lambda line: None)
        for name in ("bytes_per_state", "num_states", "bytes_per_token", "pool_bytes"):
            assert told[name] == getattr(found, name)
    with pytest.raises(
        InvalidConfig, match=r"--kv-dtype fp8-static: layers of the model keep states, .* int8"
    ):
        build_runner(replace(config, kv_dtype="fp8-static", kv_skip_layers=""), lambda line: None)


def test_a_pool_without_room_for_a_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, shape = sizes_of()
    free = 4 * (2 * STATE_BYTES + shape.spec.bytes_per_slot + sizes.step_bytes(shape))
    monkeypatch.setattr(kv_pool, "free_bytes", lambda device: free)
    with pytest.raises(OutOfMemory, match="K/V pool of 1 tokens"):
        sizes.memory(shape)


def test_by_default_prefixes_and_running_requests_have_states_in_a_quarter_of_the_memory() -> None:
    # At 65,536 bytes a token, 8,192 tokens are 512 MiB.
    assert state_ratio(2**40, 2**16, 2**27, 256) == 2**27 / 2**29
    assert state_ratio(2**33, 2**16, 2**22, 256) == pytest.approx(256 * 2**22 / (2**33 - 256 * 2**22))
    for num_bytes, size in ((2**33, 2**24), (2**20, 2**24), (2**40, 2**28)):
        assert state_ratio(num_bytes, 2**16, size, 256) == 1 / 3


def test_the_start_reports_both_and_the_map_counts_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "probe", lambda model: with_states(probe(model)))
    config = EngineConfig(device="cpu", max_num_seqs=4, max_total_tokens=1000, mamba_full_memory_ratio=1.0)
    lines: list[str] = []
    runner, found = assemble(tiny_llama(CPU, context=160), config, lines.append)
    num_slots = 1001 * found.bytes_per_token // STATE_BYTES
    assert (found.capacity, found.num_states) == (1000, num_slots - 1)
    assert found.bytes_per_state == STATE_BYTES
    assert f"states: {num_slots - 1:,} in {num_slots * STATE_BYTES / 2**20:,.1f} MiB" in lines
    ledger = TokenLedger(1000, 4, 160, num_states=num_slots - 1)
    for cached in (True, False):
        sequence = ledger.open(int32_bytes([cached, 5, 6]), keep_at=(2,))
        ledger.extend([sequence], [2])
        if cached:
            ledger.close(sequence)
    drawn = runner.map(encode(ledger.drain()), ledger.holdings())
    assert drawn.num_bytes == found.pool_bytes
    assert drawn.states == StateMap(num_slots - 3, 1, 1, num_slots * STATE_BYTES)
    assert f"states: 1 own, 1 snapshots, {num_slots - 3} free" in drawing(drawn, 80, 4)


def test_info_has_bytes_and_counts_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, found = save_tiny_model(tmp_path / "model"), info._shape
    monkeypatch.setattr(info, "_shape", lambda model: with_states(found(model)))
    told = model_info(EngineConfig(str(saved), device="cpu", max_total_tokens=800), saved)
    assert told["bytes_per_state"] == STATE_BYTES
    assert told["state_bytes"] == (told["num_states"] + 1) * STATE_BYTES > STATE_BYTES
    options = ["--model", str(saved), "--device", "cpu", "--max-total-tokens", "800"]
    out = CliRunner().invoke(app, ["info", *options]).output
    assert f"states        {told['num_states']:,} in " in out
    out = CliRunner().invoke(app, ["info", *options, "--mamba-full-memory-ratio", "2"]).output
    assert f"states        {2 * 801 * told['bytes_per_token'] // STATE_BYTES - 1:,} in " in out
