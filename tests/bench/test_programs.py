"""Every benchmark runs small: it prints a table, and its last line is the JSON that it also writes."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from bench.common.published_shapes import Width
from bench.memory import ledger
from bench.serving import lifelike_simulated
from bench.serving.lifelike import figures
from bench.serving.workload import Lengths
from bench.trace import state_split, step_time
from lightkv.router.config import EngineConfig
from lightkv.router.engine.step_time import StepTime, Work
from lightkv.router.model_files import resolve
from tests.support.azure_traces import write_azure_traces
from tests.support.scripted_service import Script, ScriptedService, scripted_service
from tests.support.served import save_tiny_model

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "bench").rglob("*.py")
    if "\ndef main(" in (text := path.read_text()) and ("parse_args" in text or "parse_with_serve(" in text)
)
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
FORMATS = ("int8", "int4")


class Bench:
    """Runs programs in this process. `folder`: for their files. `model`: a checkpoint of a tiny model."""

    def __init__(self, folder: Path, model: Path, patch: pytest.MonkeyPatch, output: Any) -> None:
        self.folder, self.model, self.patch = folder, model, patch
        self._output = output

    def run(self, name: str, *options: object) -> Any:
        """Returns the results of the program `name` with these options."""
        main, out = import_module(name).main, self.folder / "out.json"
        self.patch.setattr(sys, "argv", [name, *map(str, options), "--out", str(out)])
        main()
        printed = self._output.readouterr().out.splitlines()
        results = json.loads(out.read_text())["results"]
        assert json.loads(printed[-1])["results"] == json.loads(json.dumps(results))
        assert any("  " in line.strip() for line in printed[:-1]), "there is no table"
        return results

    def set(self, name: str, **values: object) -> None:
        """Replaces names of a module for this test."""
        for key, value in values.items():
            self.patch.setattr(f"{name}.{key}", value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny_model(tmp_path_factory.mktemp("bench") / "tiny")
    (directory / "chat_template.jinja").write_text(
        CHAT + "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return directory


@pytest.fixture
def bench(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Bench:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return Bench(tmp_path, model, monkeypatch, capsys)


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedService]:
    """A service whose device answers at once."""
    directory = Path(resolve(EngineConfig.model, report=lambda line: None))
    with scripted_service(Script(decode_ms=0.5, row_ms=0.0, prompt_ms=0.5), directory) as service:
        yield service


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_describes_its_options(name: str, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.patch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        import_module(name).main()
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


ON_A_GPU = ("kernels.attention", "kernels.attention_features", "kernels.attention_fp8_prefill",
            "kernels.attention_quantised", "kernels.paged_attention", "kernels.tune", "memory.allocator",
            "features.stream_step", "trace.step_time")  # fmt: skip


@pytest.mark.parametrize("name", ON_A_GPU)
def test_without_a_gpu_there_are_no_figures(name: str, bench: Bench) -> None:
    bench.patch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"needs a CUDA device|no GPU"):
        bench.run(f"bench.{name}")
    assert not (bench.folder / "out.json").exists()


# Memory


def test_ledger(bench: Bench) -> None:
    small = ledger.Load("small", 60, turn=16, turns=2, stems=24, siblings=6)
    bench.set("bench.memory.ledger", LOADS=(small,))
    sizes = ("--cached", 3000, "--running", 6, "--requests", 20, "--steps", 10)
    found = bench.run("bench.memory.ledger", *sizes)["loads"]["small"]
    assert {"open", "extend", "publish", "close", "evict", "fork", "truncate"} <= found["verbs"].keys()


def test_prefix_pages(bench: Bench) -> None:
    results = bench.run(
        "bench.memory.prefix_pages", "--model", bench.model, "--chats", 12, "--at-once", 4, "--running", 3
    )
    for pool in results["pools"].values():
        found = [own["found"] for own in pool["allocations"].values()]
        assert found == sorted(found, reverse=True)
        assert 0 < found[-1] < found[0]


def test_branches(bench: Bench) -> None:
    parents = [[0, 0, 1, 2], [3, 3, 0, 0], [1, 1, 1, 1]]
    bench.set("bench.memory.branches", POOL=2048, searches=lambda *arguments: [(7, parents)])
    sizes = ("--prompts", 3, "--beams", 4, "--samples", 1, 3, "--guesses", 4)
    for by in bench.run("bench.memory.branches", *sizes)["branches"].values():
        assert by["token"]["copied"] == by["token"]["more"] == 0 < by["paged:16"]["more"]


def test_hybrid_blocks(bench: Bench) -> None:
    bench.set("bench.memory.hybrid_blocks", LENGTHS=(1100,), STEPS=40, TURNS=3, ANSWERED=(20, 40))
    options = ("--shapes", "gpt-oss-20b", "--conversations", 16)
    found = bench.run("bench.memory.hybrid_blocks", *options)["shapes"]["gpt-oss-20b"]
    row = 2 * 8 * 64 * 2 * 12  # bytes of a token in a group of 12 layers; there are two groups
    short = {side: own["prefill_bytes"] for side, own in found["held"]["12"].items()}
    assert short == {"lightkv": 24 * row} | {f"blocks of {n}": 2 * n * row for n in (16, 64, 528)}
    for room in found["turns"]["computed_ratio"].values():
        assert 1 <= room["lightkv"] < room["blocks of 16"] < room["blocks of 64"] < room["blocks of 528"]


# Features


@pytest.fixture
def features(bench: Bench) -> Callable[..., Any]:
    bench.set("bench.features.generate", read_bandwidth=lambda: 1e9)
    bench.set("bench.features.speculation", read_bandwidth=lambda: 1e9)
    return lambda name, *options: bench.run(f"bench.features.{name}", "--model", bench.model, *options)


def test_generate(features: Callable[..., Any], bench: Bench) -> None:
    prompts = [[100 + row, *range(200, 210 + row)] for row in range(3)]
    bench.set("bench.features.generate", cases=lambda vocab_size: {"few": prompts})
    assert features("generate", "--new-tokens", 6, "--rounds", 2)["few"]["same_text"] >= 0.9


def test_speculation(features: Callable[..., Any]) -> None:
    for found in features("speculation", "--new-tokens", 8, "--rounds", 2).values():
        assert found["passes"] + found["accepted"] == found["new_tokens"] == 8


@pytest.mark.slow
def test_embedding(features: Callable[..., Any]) -> None:
    assert features("embedding", "--new-tokens", 4, "--rounds", 2)


@pytest.mark.slow
def test_streaming(features: Callable[..., Any]) -> None:
    sizes = ("--tokens", 320, "--window", 32, "--stride", 8, "--block", 80, "--control", 2, "--generate", 30)
    held = features("streaming", *sizes)["generation"]
    assert held["least_held"] == held["most_held"] == 32  # a ring, which is allocated once


@pytest.mark.slow
def test_quality(features: Callable[..., Any]) -> None:
    sizes = ("--tokens", 200, "--needles", 2, "--prompts", 2, "--new-tokens", 6, "--made-tokens", 48)
    formats = features("quality", "--formats", *FORMATS, *sizes, "--chunk", 40)["formats"]
    assert formats["int8"]["divergence"] < formats["int4"]["divergence"]


def test_published_shapes(bench: Bench) -> None:
    shapes = {"tiny": Width(64, 16, 16, 2, 1, 8, tied=True).of(LlamaConfig)}
    bench.set("bench.features.published_shapes", PUBLISHED=shapes, BATCHES=(1, 2), LONG_PROMPT=64, PROMPT=16)
    found = bench.run("bench.features.published_shapes", "--device", "cpu")["results"]["tiny"]
    assert list(found["decode_ms"]) == ["1", "2"]


@pytest.mark.slow
def test_grammar_and_constrained_step(bench: Bench) -> None:
    assert bench.run("bench.features.grammar")
    sizes = ("--streams", 2, "--tokens", 12, "--rounds", 1)
    batches = bench.run("bench.features.constrained_step", *sizes)["batches"]
    assert [own["constrained"] for own in batches] == [0, 1, 2]


# Serving


def test_next_turn(bench: Bench) -> None:
    tiny = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                       num_attention_heads=2, head_dim=16)  # fmt: skip
    bench.set("bench.serving.next_turn", SHAPES={"llama-3-8b": tiny})
    sizes = ("--prefix", 40, 90, "--turn", 3, 7, "--repeats", 2)
    found = bench.run("bench.serving.next_turn", *sizes)["milliseconds"]
    assert list(found) == ["3 after 40", "7 after 40", "3 after 90", "7 after 90"]


def test_router_step(bench: Bench) -> None:
    sizes = ("--running", 60, "--queued", 100, "--prompt", 8, "--steps", 120)
    assert len(bench.run("bench.serving.router_step", *sizes)["loads"]) == 12


def test_first_seconds(bench: Bench, scripted: ScriptedService) -> None:
    sizes = ("--clients", 2, "--prompt", 16, "--output", 8, "--seconds", 1.5, "--steady", 1)
    found = bench.run(
        "bench.serving.first_seconds", "--url", scripted.url, "--model", "scripted", *sizes,
        "--vocab-size", 1000,
    )  # fmt: skip
    assert found["first"]["tokens_per_second"] > 0


def test_lifelike_and_its_plot(bench: Bench, scripted: ScriptedService) -> None:
    write_azure_traces(bench.folder)
    bench.set("bench.serving.lifelike", SETTLE_SECONDS=0.0, WARM_UP_REQUESTS=4)
    bench.set("bench.serving.lifelike_cells", CLOSED_LENGTHS=Lengths(16, 4), CLOSED_WAVES=1)
    cells = ("poisson-0.6", "32-clients")
    options = ("--url", scripted.url, "--traces", bench.folder, "--vocab-size", 1000, "--max-length", 8192)
    load = ("--saturation", 60, "--seconds", 0.5, "--drain", 20, "--cells", *cells)
    found = bench.run("bench.serving.lifelike", *options, *load)["cells"]
    assert list(found) == list(cells)
    assert all(own["completed"] == own["sent"] for own in found.values())
    drawn = bench.folder / "p.svg"
    bench.patch.setattr(sys, "argv", ["plot", str(bench.folder / "out.json"), str(drawn)])
    import_module("bench.serving.lifelike_plot").main()
    assert drawn.read_text().count("<svg") == 1


def test_lifelike_simulated(bench: Bench) -> None:
    """What is measured is a simulation, too, of steps that take twice as long."""
    write_azure_traces(bench.folder)
    bench.set("bench.serving.lifelike_cells", CLOSED_LENGTHS=Lengths(16, 4), CLOSED_WAVES=1)
    slow = StepTime(base=0.020, per_decode=0.0, per_kv=0.0, prefill=0.0, per_prompt=0.0, per_pair=0.0)
    sizes = {"capacity": 9000, "max_num_seqs": 40, "vocab_size": 32_000, "max_length": 8192}
    settings = SimpleNamespace(prefill_chunk=4096, itl_target=None, **sizes)
    server = lifelike_simulated.SimulatedServer(lifelike_simulated.describe(slow, settings), 0.008)
    source = lifelike_simulated.Source.read(bench.folder, 32_000, 16_384, 0)
    cells = {"32-clients": figures(lifelike_simulated.play_closed(server, source, "32-clients"), 1.0)}
    load = {"saturation": 2.0, "seconds": 30.0, "seed": 0}
    measured = bench.folder / "measured.json"
    found = {"measurements": [{"engine": "lightkv", "cells": cells, "load": load}]}
    measured.write_text(json.dumps({"results": found}))
    options = (measured, "--traces", bench.folder, "--step-time", "base=0.010")
    results = bench.run("bench.serving.lifelike_simulated", *options)
    ratios = results["cells"]["32-clients"]["over_measured"]
    assert ratios == pytest.approx(dict.fromkeys(ratios, 0.5))


@pytest.mark.slow
def test_load(bench: Bench) -> None:
    engine = ("--model", bench.model, "--device", "cpu", "--max-total-tokens", 4096)
    sizes = ("--concurrency", 3, "--requests", 6, "--prompt", 60, "--output", 24, "--rounds", 1)
    load = bench.run("bench.serving.load", *engine, *sizes, "--in-process")["loads"]["3 clients"]
    assert (load["requests"], load["output_tokens"]) == (6, 144)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["", "gemma3", "gpt-oss", "Qwen3_5ForCausalLM"])
def test_soak(bench: Bench, family: str) -> None:
    model = save_tiny_model(bench.folder / "tiny", family=family)
    bench.patch.setenv("OMP_NUM_THREADS", "1")  # more wait for one another where the machine is busy
    lengths = ("--minutes", 0.4, "--rest-every", 0.2, "--prompts", 8)
    sizes = ("--clients", 32, "--max-total-tokens", 320)
    results = bench.run("bench.serving.soak", "--model", model, *lengths, *sizes)
    assert results["load"]["num_preemptions"] > 0
    assert sum(results["requests"].values()) > 20


@pytest.mark.slow
def test_worker_loss(bench: Bench) -> None:
    sizes = ("--streams", 4, "--rounds", 1, "--step-timeout", 3, "--max-total-tokens", 40000)
    found = bench.run("bench.serving.worker_loss", "--model", bench.model, *sizes)["losses"]
    assert found["SIGSTOP"][0]["noticed"] > 3 > found["SIGKILL"][0]["noticed"]


@pytest.mark.slow
def test_structured_load(bench: Bench) -> None:
    """Its figures are those of a busy machine, so a gap or a memory that is judged too large is let pass."""
    sizes = ("--streams", 2, "--clients", 2, "--seconds", 6, "--rounds", 2, "--warm-up", 0.5, "--rest", 0.5)
    with suppress(SystemExit):  # its reasons are in the results
        bench.run("bench.serving.structured_load", "--model", bench.model, *sizes, "--tokens", 8)
    results = json.loads((bench.folder / "out.json").read_text())["results"]
    assert all(line.startswith("the longest gap") or " grew by " in line for line in results["failures"])
    assert all(results["loads"][name]["statuses"]["200"] > 0 for name in ("ordinary", "grammars"))


# Traces


def test_admission_rules(bench: Bench) -> None:
    options = ("--cells", bench.folder / "cells.jsonl", "--requests", 40, "--capacity", 9000, "--loads", 1.3)
    (found,) = bench.run("bench.trace.admission_rules", *options, "--workloads", "sessions",
                         "--policies", "quantile", "--processes", 1)  # fmt: skip
    assert 0 < found["policies"]["quantile"]["in_time"] <= 1


@pytest.mark.slow
def test_unstated(bench: Bench) -> None:
    sizes = ("--trace", "chat", "--requests", 60, "--capacity", 8000, "--max-new", 2000)
    found = bench.run("bench.trace.unstated", *sizes, "--loads", 1.3)
    assert all(own["num_finished"] == 60 for own in found["unstated"]["1.3"].values())


def test_state_split(bench: Bench) -> None:
    """Three turns of each of four conversations, and sessions of six turns."""
    turns = [
        {"timestamp": 9000 * turn + chat, "input_length": 1000 * turn, "output_length": 30,
         "hash_ids": [0, *range(10 * chat, 10 * chat + -(-1000 * turn // 512) - 1)]}
        for turn in (1, 2, 3) for chat in (1, 2, 3, 4)
    ]  # fmt: skip
    trace = bench.folder / "turns.jsonl"
    trace.write_text("".join(json.dumps(one) + "\n" for one in turns))
    model = state_split.Model(token=10**6, state=10**9, weights=30 * 10**9)
    bench.set("bench.trace.state_split", MODELS={"small": model}, SAMPLE=1, TURNS=6)
    found = bench.run("bench.trace.state_split", "--mooncake", trace, "--waiting", 3)["models"]["small"]
    # The first block is found by all but one, and each turn's whole blocks by the next one.
    assert found["hits mooncake"]["all bytes twice"] == (7 * 512 + 4 * 1536) / 24_000
    assert 0.5 < found["hits agents 70 %"]["one budget"] <= found["hits agents 70 %"]["all bytes twice"]
    assert (
        found["admitted chat"].keys()
        == found["admitted mooncake"].keys()
        == {"default", "one budget", "all bytes twice"}
    )


@pytest.mark.slow
def test_simulate(bench: Bench) -> None:
    bench.set("bench.trace.simulate", FILES={"azure-conv": "", "sharegpt": ""}, LOADS=(1.3,),
              POLICY_WORKLOADS=("prefill-heavy", "chat"), GOODPUT_TRACES=("sharegpt",))  # fmt: skip
    results = bench.run("bench.trace.simulate", "--requests", 12, "--policy-requests", 12)
    assert results["policies"]["chat"]["reserved"]["num_finished"] == 12


def test_step_time_is_fitted_again(bench: Bench) -> None:
    model = StepTime(7e-3, 2e-5, 4e-8, 3e-2, 2.4e-5, 1.3e-9)
    work = [Work(n, 300 * n * n, 100 * (n % 3) * n, 5000 * (n % 3) * n) for n in range(1, 40)]
    points = [step_time.Point(own, model.seconds(own)) for own in work]
    before = StepTime(1.0, 0, 0, 0, 0, 0, source={"device": "a device", "steps": 1})
    document = {"benchmark": "step_time", "device": "a device", "results": step_time.report(points, before)}
    stored, parameters = bench.folder / "stored.json", bench.folder / "parameters.json"
    stored.write_text(json.dumps(document))
    bench.run("bench.trace.step_time", "--refit", stored, "--parameters", parameters)
    assert StepTime.read(parameters).per_decode == pytest.approx(2e-5)


def test_trace_replay(bench: Bench) -> None:
    sizes = ("--capacity", 600, "--max-num-seqs", 6, "--prefill-chunk", 32, "--max-prompt", 60)
    answers = ("--max-output", 20, "--max-new", 24, "--requests", 6, "--fit-requests", 12)
    found = bench.run("bench.trace.trace_replay", "chat", "--device", "cpu", "--model", bench.model, *sizes,
                      *answers, "--allocation", "paged:16", "--load", 1)  # fmt: skip
    own = found["loads"]["1"]["allocations"]["paged:16"]
    assert own["measured"]["output_tokens"] == own["simulated"]["fitted"]["figures"]["output_tokens"]
