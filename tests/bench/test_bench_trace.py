"""Traces in real time, small: by token and by pages on one runner, beside the simulator and transformers."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.serving.continuous_batching import WAYS, batching_config
from bench.serving.stats import Targets
from bench.serving.workload import Replayed
from bench.trace import trace_machine, trace_replay, transformers_trace
from bench.trace.trace_machine import Machine
from lightkv.errors import LedgerMismatch
from lightkv.router import EngineConfig
from lightkv.router.engine.step_time import StepTime
from lightkv.router.model.build import assemble
from lightkv.router.simulate.trace_files import FileTrace, TraceRequest, UnreadableTrace
from tests.support.combinations import each_value
from tests.support.served import save_tiny_model
from tests.support.tiny_files import tiny_config
from tests.support.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("bench") / "tiny")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the benchmark with these options, and returns its results."""

    def run_main(*options: object) -> Any:
        out = tmp_path / "out.json"
        arguments = [
            "chat",
            "--device",
            "cpu",
            "--requests",
            "12",
            "--fit-requests",
            "24",
            "--out",
            out,
            *options,
        ]
        monkeypatch.setattr(sys, "argv", ["bench", *map(str, arguments)])
        trace_replay.main()
        return json.loads(out.read_text())["results"]

    return run_main


SIZES = (
    "--capacity", 600, "--max-num-seqs", 6, "--prefill-chunk", 32, "--max-prompt", 60, "--max-output", 20,
    "--max-new", 24,
)  # fmt: skip


@pytest.mark.slow
def test_every_allocation_answers_the_same_requests(run: Callable[..., Any], model: Path) -> None:
    results = run("--model", model, *SIZES, "--load", 0.7, 2, "--transformers", "--way-seconds", 60)
    asked = {own["measured"]["output_tokens"] for load in results["loads"].values()
             for own in load["allocations"].values()}  # fmt: skip
    assert len(asked) == 1
    assert results["loads"].keys() == {"0.7", "2"}
    for load in results["loads"].values():
        assert load["rate"] > 0
        assert load["allocations"].keys() == {"token", "paged:16", "paged:256"}
        for name, own in load["allocations"].items():
            measured, simulated = own["measured"], own["simulated"]["fitted"]
            assert measured["num_finished"] == simulated["figures"]["num_finished"] == 12
            assert measured["output_tokens"] == simulated["figures"]["output_tokens"]
            assert (measured["memory_padding_share"] > 0) == (name != "token")
            ratio = measured["output_rate"] * simulated["ratio"]["output_rate"]
            assert ratio == pytest.approx(simulated["figures"]["output_rate"])
    peer = results["transformers"]
    assert (peer["num_finished"], peer["num_cut"], peer["output_tokens"]) == (12, 0, asked.pop())
    assert 0 < peer["ttft_p50"] <= peer["ttft_p99"]


@pytest.mark.slow
def test_the_8b_shape(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (trace_replay, transformers_trace):
        monkeypatch.setattr(module, "LLAMA_3_8B", tiny_config())
    step_time = "base=0.01,per_prompt=0.0001"
    results = run("--llama-3-8b", "--layers", 2, *SIZES, "--allocation", "token", "--load", 1,
                  "--step-time", step_time)  # fmt: skip
    own = results["loads"]["1"]["allocations"]["token"]
    assert own["simulated"].keys() == {"fitted", "given"}
    asked = {"model": None, "layers": 2, "device": "cpu", "way": "sdpa-128"}
    assert transformers_trace.load(asked).config._attn_implementation == "sdpa"
    assert not batching_config(WAYS["sdpa-128"], 7).auto_switch_to_flash  # nor later


def test_what_was_measured_is_simulated_again(
    run: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--model", model, *SIZES, "--allocation", "paged:16", "--load", 1, "--step-time", "base=0.01")
    before = run(*options)
    out = tmp_path / "again.json"

    def again(*more: str) -> Any:
        arguments = ["chat", "--again", str(tmp_path / "out.json"), "--out", str(out), *more]
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        trace_replay.main()
        return json.loads(out.read_text())["results"]

    assert again() == before  # the same model
    after = again("--step-time", "base=0.02")
    old, new = (results["loads"]["1"]["allocations"]["paged:16"] for results in (before, after))
    assert new["measured"] == old["measured"]
    assert new["simulated"]["fitted"] == old["simulated"]["fitted"]
    given = [own["simulated"]["given"]["figures"] for own in (old, new)]
    assert given[1]["seconds"] > given[0]["seconds"]
    assert given[1]["output_tokens"] == old["measured"]["output_tokens"]
    assert after["step_times"]["given"]["base"] == 0.02
    assert after["settings"]["step_time"] == "base=0.02"
    (tmp_path / "model.json").write_text(json.dumps(after["step_times"]["given"]))
    again("--step-time", str(tmp_path / "model.json"))
    assert str(tmp_path) not in out.read_text()  # a file is called by its name

    bare = tmp_path / "bare.json"  # as a replay without a model of the step's time leaves it
    stored = json.loads(out.read_text())
    del stored["results"]["step_times"]["given"]
    bare.write_text(json.dumps(stored))
    for arguments, match in (
        (["chat", "--again", str(bare)], "give a --step-time"),
        (["decode-heavy", "--again", str(out)], "decode-heavy is not what was replayed; give chat"),
        (["chat", "--again", str(tmp_path)], "no result of a benchmark"),
    ):
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        with pytest.raises(SystemExit, match=match):
            trace_replay.main()


@pytest.mark.slow
def test_no_replay_is_begun_when_the_time_is_up(run: Callable[..., Any], model: Path) -> None:
    results = run("--model", model, *SIZES, "--seconds", 0.001)
    assert [load["allocations"] for load in results["loads"].values()] == [{}, {}]
    assert "given" not in results["step_times"]


@pytest.fixture
def machine() -> Machine:
    config = EngineConfig(
        device="cpu", max_num_seqs=8, max_model_len=200, max_total_tokens=390, prefill_chunk=32
    )
    runner, info = assemble(tiny_llama(torch.device("cpu"), vocabulary=1000), config, lambda line: None)
    return Machine(runner, info, max_new=40, targets=Targets(10.0, 0.1))


def a_trace(num: int = 16) -> Replayed:
    """Answers of 21 to 36 tokens."""
    return Replayed("a trace", [TraceRequest(None, 10 + 7 * i % 40, 21 + i % 16) for i in range(num)])


@each_value(allocation=["paged:16", "paged:64", "token"], admission=["reserved", "quantile", "watermark"])
def test_the_device_counts_as_the_ledger_does(machine: Machine, allocation: str, admission: str) -> None:
    trace = a_trace().at_once()
    found = machine.replay(trace, allocation, admission, seed=0)  # raises where they part
    assert found["output_tokens"] == sum(request.output for request in trace)
    assert found["num_steps"] == len(machine.points)
    if admission == "watermark" and allocation == "token":
        assert found["num_preemptions"] > 0
    again = machine.replay(trace, "token", "reserved", seed=1)  # the memory is empty again
    assert again["hit_tokens"] == 0


@pytest.mark.slow
def test_the_device_counts_as_a_ledger_of_longest_answers_does(machine: Machine) -> None:
    trace = a_trace().at_once()
    found = machine.replay(trace, "contiguous", "sum", seed=0)  # raises where they part
    assert found["output_tokens"] == sum(request.output for request in trace)
    assert found["num_steps"] == len(machine.points)
    assert machine.replay(trace, "token", "reserved", seed=1)["hit_tokens"] == 0


def test_a_device_that_counts_otherwise_is_found_out(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_machine, "padding_of", lambda ledger: 0)
    with pytest.raises(LedgerMismatch):
        machine.replay(a_trace().at_once(), "paged:16", "reserved", seed=0)


def test_what_is_late_meets_no_target(machine: Machine) -> None:
    strict = Machine(machine._runner, machine.info, 40, Targets(1e-9, 0.1))
    found = strict.replay(a_trace().at_once(), "token", "reserved", seed=0)
    assert (found["goodput"], found["met_share"]) == (0.0, 0.0)
    assert machine.replay(a_trace().at_once(), "token", "reserved", seed=0)["num_finished"] == 16


# --------------------------------------------------------------------------------
# The requests


def test_a_traces_own_times_are_stretched_to_a_rate() -> None:
    trace = Replayed("t", [TraceRequest(at, 5, 3) for at in (10.0, 11.0, 14.0, 18.0)])
    assert [request.arrival for request in trace.at_rate(1.0, 0)] == [0.0, 0.5, 2.0, 4.0]
    assert [request.arrival for request in trace.at_rate(0.5, 0)] == [0.0, 1.0, 4.0, 8.0]
    drawn = [request.arrival for request in a_trace(200).at_rate(4.0, seed=1)]
    assert drawn == sorted(drawn)  # type: ignore[type-var]
    assert drawn[-1] == pytest.approx(50, rel=0.2)
    assert drawn == [request.arrival for request in a_trace(200).at_rate(4.0, seed=1)]


def test_what_does_not_fit_is_left_out_and_long_answers_are_cut() -> None:
    trace = Replayed("t", [TraceRequest(0.0, 90, 3), TraceRequest(1.0, 91, 3), TraceRequest(2.0, 1, 30)])
    assert [(own.prompt, own.output) for own in trace.fitting(100, 10)] == [(90, 3), (1, 10)]
    with pytest.raises(UnreadableTrace, match="no prompt leaves room for 10 of 5"):
        trace.fitting(5, 10)


def test_scaled_lengths_keep_their_times() -> None:
    trace = Replayed("t", [TraceRequest(0.5, 90, 40, (1,)), TraceRequest(1.0, 30, 20, (1,))])
    assert Replayed.of(trace).requests == trace.requests
    assert list(Replayed.of(trace, 30, 4)) == [TraceRequest(0.5, 30, 4), TraceRequest(1.0, 10, 2)]


def test_a_trace_comes_back_from_its_file(tmp_path: Path) -> None:
    trace = Replayed("t", [TraceRequest(0.0, 1100, 3, (7, 8, 9)), TraceRequest(1.25, 9, 4)])
    trace.write(tmp_path / "t.jsonl")
    assert list(FileTrace(tmp_path / "t.jsonl")) == trace.requests


def test_prompts_begin_alike_where_the_trace_says_so() -> None:
    trace = Replayed("t", [TraceRequest(0.0, 1100, 1, (7, 8, 9)), TraceRequest(0.0, 1030, 1, (7, 8, 5)),
                           TraceRequest(0.0, 600, 1, (7,)), TraceRequest(0.0, 40, 1)])  # fmt: skip
    first, second, third, last = trace.prompts(1000, seed=3)
    assert [len(ids) for ids in (first, second, third, last)] == [1100, 1030, 600, 40]
    assert np.array_equal(first[:1024], second[:1024])
    assert not np.array_equal(first[1024:1030], second[1024:])
    assert np.array_equal(first[:512], third[:512])
    assert first.dtype == np.int32
    again = trace.prompts(1000, seed=3)
    assert all(map(np.array_equal, again, (first, second, third, last)))


@pytest.mark.slow
def test_a_saturation_is_of_the_requests_again_and_again() -> None:
    config = trace_replay.SimulationConfig(capacity=400, max_new=40, max_num_seqs=4)
    slow, fast = (StepTime(base, 0, 0, 0, 0, 0) for base in (0.1, 0.01))
    rates = [trace_replay.saturation_of(a_trace(), config, own) for own in (slow, fast)]
    assert rates[1] == pytest.approx(10 * rates[0])
