"""What benchmarks say: figures, steps, replays, peers and plots, which can be wrong without anyone noticing."""

import argparse
import json
import random
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig

from bench.common import random_checkpoint
from bench.common.child import ChildFailed, ask
from bench.serving import figures as serving_figures
from bench.serving import load as serving
from bench.serving import peers, replay, router_step, served
from bench.serving import stats as serving_stats
from bench.serving.continuous_batching import Answered, Run
from bench.serving.load_client import Answer
from bench.serving.peers import Rounds, run_batches, run_transformers
from bench.serving.replay import Decoding, Level, NoReplay, replays
from bench.serving.stats import NotSteady, split_gaps, steady, step_rate_ms
from bench.serving.workload import Ask, Replayed
from lightkv.router import EngineConfig
from lightkv.router.model.build import assemble
from lightkv.router.model.loader import random_model
from lightkv.router.simulate.traces import TraceRequest
from lightkv.router.text.tokenizer import Tokenizer

# --------------------------------------------------------------------------------
# Figures


def test_percentiles_are_milliseconds() -> None:
    found = serving_stats.summary([i / 1000 for i in range(101)])
    assert found == pytest.approx({"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0})
    assert serving_stats.summary([]) is None


def test_throughput_is_of_the_whole_span() -> None:
    answers = [
        Answer(10.0, [11.0, 13.0], 14.0, num_prompt=6, num_output=4, text="ab"),
        Answer(12.0, [15.0], 20.0, num_prompt=4, num_output=1, text="c"),
    ]
    found = serving_stats.summarise(answers)
    assert found["seconds"] == 10.0
    assert found["requests_per_s"] == 0.2
    assert found["output_tokens_per_s"] == 0.5
    assert found["total_tokens_per_s"] == 1.5
    assert found["tokens_per_piece"] == pytest.approx(5 / 3)
    assert found["ttft_ms"]["p50"] == 2000.0
    assert found["between_pieces_ms"]["p50"] == 2000.0
    assert found["per_token_ms"]["mean"] == pytest.approx(2000 / 3)
    assert found["end_to_end_ms"]["mean"] == 6000.0
    assert (found["goodput_per_s"], found["met_share"]) == (0.1, 0.5)  # one is slow between its tokens
    assert serving_stats.summarise(answers, serving_stats.Targets(2.0, 0.7))["met_share"] == 0.5
    assert serving_stats.summarise(answers, serving_stats.Targets(3.0, 0.7))["met_share"] == 1.0


def options(*argv: str) -> argparse.Namespace:
    return serving.arguments(list(argv))


def test_the_engine_of_the_command_line_is_the_one_that_serves() -> None:
    typed = options(
        "--model", "m", "--dtype", "float32", "--max-num-seqs", "4", "--no-cuda-graphs", "--", "--uds"
    )
    config = serving.engine_config(typed)
    assert (config.model, config.dtype, config.max_num_seqs, config.cuda_graphs) == ("m", "float32", 4, False)
    given = serving.serve_arguments(config, typed.serve)
    assert given == ["m", "--dtype", "float32", "--max-num-seqs", "4", "--no-cuda-graphs", "--uds"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--rate", "0"],
        ["--prompt", "16:8"],
        ["--url", "http://127.0.0.1:1", "--in-process"],
        ["--transformers", "--trace", "x.csv"],
        ["--transformers", "no-such-way"],
        ["--replay", "--rate", "1"],
        ["--rounds", "0"],
        ["--arrivals", "trace", "--rate", "1"],
        ["--arrivals", "trace", "--trace", "x.csv"],
    ],
    ids=" ".join,
)
def test_options_that_make_no_sense_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(*argv)
    assert "error" in capsys.readouterr().err


def test_a_traces_requests_come_in_its_order_and_at_its_times(tmp_path: Path) -> None:
    trace = Replayed("t", [TraceRequest(at, 5 + i, 3) for i, at in enumerate((0.0, 1.0, 4.0, 6.0))])
    trace.write(tmp_path / "t.jsonl")
    typed = options("--arrivals", "trace", "--rate", "2", "--trace", str(tmp_path / "t.jsonl"))
    asks, arrivals = serving.requests_of(typed, serving.Traffic(2.0, True), 3, 1000, random.Random(0))
    assert [(len(ask.prompt_ids), ask.num_output) for ask in asks] == [(5, 3), (6, 3), (7, 3)]
    assert arrivals == pytest.approx([0.0, 0.375, 1.5])
    typed.arrivals = "poisson"
    asks, arrivals = serving.requests_of(typed, serving.Traffic(2.0, False), 3, 1000, random.Random(0))
    assert (len(asks), arrivals) == (3, None)


def test_gaps_beside_another_requests_prefill_are_told_apart() -> None:
    answers = [
        Answer(0.0, [1.0, 2.0, 3.0, 5.0, 6.0], 6.0, num_prompt=1, num_output=5, text=""),
        Answer(
            3.1, [5.001, 6.001], 6.1, num_prompt=1, num_output=2, text=""
        ),  # its prefill was in the long step
        Answer(1.8, [2.0, 2.5], 2.5, num_prompt=1, num_output=2, text=""),  # came late in a step of the first
    ]
    alone, beside = split_gaps(answers)
    assert beside == [2.0]
    assert sorted(alone) == [0.5, 1.0, 1.0, 1.0, 1.0]
    found = serving_stats.summarise(answers)
    assert found["between_pieces_beside_prefill_ms"]["p99"] == 2000.0
    assert found["between_pieces_alone_ms"]["p99"] == 1000.0
    assert found["share_beside_prefill"] == pytest.approx(1 / 6)


def decoding(
    first: float, num: int, step: float = 0.1, prompt: int = 10, pieces: int | None = None
) -> Answer:
    """A client's answer of `num` tokens, a step each."""
    arrivals = [first + step * i for i in range(pieces or num)]
    return Answer(0.0, arrivals, arrivals[-1], prompt, num, "")


def test_a_step_is_timed_while_all_clients_decode() -> None:
    slow_start = decoding(1.0, 40)
    slow_start.arrivals[1:] = [at + 3.0 for at in slow_start.arrivals[1:]]  # the other's prefill
    found = steady([slow_start, decoding(4.05, 30)])
    assert found.mean_ms == pytest.approx(100.0)
    assert found.median_ms == pytest.approx(100.0)
    assert (found.begin, found.end) == (4.05, pytest.approx(4.05 + 2.9))
    # One had 1 to 29 tokens of its answer before it, the other from the second piece on 2 to 30.
    assert found.context == pytest.approx(10 + (15 * 29 + 16 * 28) / 57, abs=0.6)


def test_one_long_step_counts_in_the_mean_and_not_in_the_median() -> None:
    answer = decoding(1.0, 41)
    answer.arrivals[20:] = [at + 4.0 for at in answer.arrivals[20:]]
    found = steady([answer])
    assert found.mean_ms == pytest.approx(200.0)
    assert found.median_ms == pytest.approx(100.0)
    assert found.context == 10 + 20.5


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        ([decoding(1.0, 30), decoding(3.0, 30)], "together for 9 steps; 16 are needed"),
        ([decoding(1.0, 30), decoding(9.0, 30)], "together for 0 steps"),
        ([decoding(1.0, 60, pieces=30)], "a piece has 2.000 tokens"),
    ],
    ids=["too short", "never together", "several tokens a piece"],
)
def test_what_is_not_steady_is_no_time_of_a_step(answers: list[Answer], match: str) -> None:
    with pytest.raises(NotSteady, match=match):
        steady(answers)


def test_a_round_that_is_not_steady_is_left_out() -> None:
    short, long = [decoding(1.0, 10)], [decoding(1.0, 40)]
    answers = iter([short, long, long, short, short])
    target = SimpleNamespace(vocab_size=1000, watch=lambda asks: (next(answers), []))
    typed = options("--concurrency", "1", "--rounds", "3", "--replay")
    steps = serving.watch_steps(cast(serving.Target, target), typed, 1, random.Random(0))
    assert steps.context == 10 + 20
    found = steps.results(replay_ms=80.0)
    assert found["rounds"] == 2
    assert found["ratio"] == pytest.approx(1.25)
    typed.rounds = 2
    with pytest.raises(NotSteady, match="for 9 steps"):
        serving.watch_steps(cast(serving.Target, target), typed, 1, random.Random(0))


def test_the_routers_steps_are_timed_by_when_its_count_was_new() -> None:
    counts = [(0.0, 5), (1.0, 5), (1.5, 10), (2.0, 10), (2.5, 30), (3.0, 30), (3.5, 50), (9.0, 500)]
    assert step_rate_ms(counts, 1.2, 4.0) == pytest.approx(50.0)
    assert step_rate_ms(counts, 1.2, 2.0) is None


# --------------------------------------------------------------------------------
# Parts in processes of their own

CHILD = """
import os, sys, threading, time
from bench.common.child import serve

def handle(request):
    print("noise")
    os.write(1, b"noise of a library\\n")
    threading.Thread(target=time.sleep, args=(600,)).start()  # it must not keep the process
    for number in request["numbers"]:
        yield number * 2
    if request["end"] == "raise":
        raise ValueError("no more")
    if request["end"] == "die":
        print("its last words", file=sys.stderr, flush=True)
        os._exit(3)
    if request["end"] == "hang":
        time.sleep(600)

serve(handle)
"""


@pytest.mark.parametrize(
    ("end", "match"),
    [
        ("return", None),
        ("raise", "^ValueError: no more$"),
        ("die", "ended with code 3: .*its last words"),
        ("hang", "not done within 3 s"),
    ],
)
def test_a_child_answers_until_its_end_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, match: str | None
) -> None:
    (tmp_path / "some_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = []
    with nullcontext() if match is None else pytest.raises(ChildFailed, match=f"(?s){match}"):
        for answer in ask("some_child", {"numbers": [1, 2], "end": end}, 3.0 if end == "hang" else 60.0):
            found.append(answer)
    assert found == [2, 4]


TINY = LlamaConfig(
    vocab_size=1000,
    hidden_size=192,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=512,
)


def test_sequences_are_brought_to_the_length_of_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(TINY, torch.device("cpu"), torch.float32)
    config = EngineConfig(device="cpu", max_total_tokens=1200, max_num_seqs=8, prefill_chunk=64)
    runner, info = assemble(model, config, lambda line: None)

    def replay_ms(runner: object, batch: int, times: int) -> float:
        """Takes slots as a graph does, and the ledger never hears of it."""
        memory = cast(replay.ModelRunner, runner)._parts.memory
        memory.allocator.alloc(batch * times * replay.REPLAY_ROUNDS)
        return 1.0

    monkeypatch.setattr(replay, "replay_ms", replay_ms)
    levels = [Level(2, 90.0), Level(5, 70.5), Level(8, 300.0)]
    decoding = Decoding(runner, info, levels)
    for level in levels[:2]:
        # The first replay is over one token more than were computed before it, the last over 29 more.
        assert decoding.bring(level) + 1 + 14.5 == pytest.approx(level.context, abs=1.0)
        assert decoding.replay_ms(level.batch) == 1.0
        decoding.end(level.batch)
    with pytest.raises(NoReplay, match="of 8 sequences of 300 tokens were there"):
        decoding.bring(levels[2])


def test_sequences_shorter_than_the_replays_are_refused() -> None:
    model = random_model(TINY, torch.device("cpu"), torch.float32)
    runner, info = assemble(model, EngineConfig(device="cpu", max_total_tokens=500), lambda line: None)
    with pytest.raises(NoReplay, match="cannot be brought to 20 tokens"):
        Decoding(runner, info, [Level(2, 20.0)]).bring(Level(2, 20.0))
    with pytest.raises(NoReplay, match="take 600 tokens, of 500"):
        Decoding(runner, info, [Level(20, 90.0)])


@pytest.mark.gpu
def test_graphs_are_replayed_at_each_level(tmp_path: Path) -> None:
    random_model(TINY, torch.device("cpu"), torch.bfloat16).save_pretrained(tmp_path)
    random_checkpoint.save_tokenizer(tmp_path, TINY.vocab_size)
    config = EngineConfig(model=str(tmp_path), max_total_tokens=2000, max_num_seqs=8)
    levels = [Level(5, 70.5), Level(1, 90.0), Level(8, 100.0)]
    found = dict(replays(config, levels, 300.0))
    assert set(found) == set(levels)
    assert all(milliseconds > 0 for milliseconds in found.values())


# --------------------------------------------------------------------------------
# Peers


def asks_of(num: int, num_output: int) -> list[Ask]:
    return [Ask([i], num_output) for i in range(num)]


def test_the_sides_of_a_comparison_take_turns_and_the_first_batch_does_not_count() -> None:
    order = []

    class Other:
        llm = SimpleNamespace(info=SimpleNamespace(dtype="bfloat16"))

        def run(self, asks: Sequence[Ask]) -> tuple[float, list[str]]:
            order.append("other")
            return 4.0, ["same", "x"]

    def serve(asks: Sequence[Ask]) -> tuple[float, list[str]]:
        order.append("service")
        return 5.0, ["same", "y"]

    rounds = run_batches(serve, cast(peers.InProcess, Other()), [asks_of(2, 10)] * 3)
    assert order == ["service", "other", "other", "service", "service", "other"]
    found = rounds.results()
    assert found["http_tokens_per_s"] == {"median": 4.0, "low": 4.0, "high": 4.0}
    assert found["http_over_in_process"]["median"] == pytest.approx(0.8)
    assert found["same_text"] == 0.5


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random layers, and a text for every token: so that a piece of an answer has one."""
    directory = tmp_path_factory.mktemp("bench") / "tiny"
    directory.mkdir()
    torch.manual_seed(0)
    model = random_model(TINY, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight[:256] = 0.0  # single bytes, of which many are no text
    model.save_pretrained(directory)
    random_checkpoint.save_tokenizer(directory, TINY.vocab_size)
    return directory


# What each way does with two rounds of two requests of 10 tokens: seconds, ids, and its error.
GOOD, BAD = [[300] * 10, [301] * 10], [[300] * 10, [302] * 10]
DONE = {
    "flash-2": ([], [], "ImportError: no flash_attn"),
    "sdpa": ([9.0, 4.0, 2.0], GOOD, None),
    "sdpa-64": ([9.0, 1.0, 2.0], GOOD, None),
    "sdpa-128": ([9.0, 0.5, 0.5], BAD, None),
    "eager": ([9.0, 8.0], GOOD, "not done within 1 s"),
}


@pytest.mark.parametrize(
    ("ways", "tried", "speeds", "way"),
    [
        (
            ["flash-2", "sdpa", "sdpa-64", "sdpa-128"],
            ["flash-2", "sdpa", "sdpa-64", "sdpa-128"],
            [20.0, 10.0],
            "sdpa-64",
        ),
        (["flash-2", "sdpa-128"], ["flash-2", "sdpa-128", "eager"], [2.5], "eager"),
        (["eager"], ["eager"], [2.5], "eager"),
    ],
    ids=["the fastest that is right", "the last resort", "it alone"],
)
def test_the_best_way_of_transformers_counts_and_errors_are_kept(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
    ways: list[str],
    tried: list[str],
    speeds: list[float],
    way: str,
) -> None:
    def run_way(name: str, config: EngineConfig, batches: object, seconds: float) -> Run:
        times, tokens, error = DONE[name]
        answered = {2: [Answered(seconds, tokens) for seconds in times]}
        return Run(answered if times else {}, error)

    monkeypatch.setattr(peers, "run_way", run_way)
    decode = Tokenizer(tiny_model).decode
    rounds = {2: Rounds([40.0, 40.0], [], [], [], [[decode(ids) for ids in GOOD]] * 2)}
    saved: list[dict[str, Any]] = []
    config = EngineConfig(model=str(tiny_model), device="cpu")
    reason = run_transformers(config, {2: [asks_of(2, 10)] * 3}, rounds, ways, 1.0, saved.append)
    assert not reason
    assert list(saved[-1]) == tried
    assert rounds[2].transformers == speeds
    assert rounds[2].way == way
    for name, found in saved[-1].items():
        if name == "sdpa-128":
            assert found["error"] == "2 at once: only 50% of its texts are the service's"
        else:
            assert found["error"] == DONE[name][2]


def test_a_peer_without_figures_is_a_failure_that_says_so(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    monkeypatch.setattr(peers, "run_way", lambda *_: Run({}, "RuntimeError: no"))
    rounds = {num: Rounds([40.0], [], [], [], [["a"] * num]) for num in (1, 2)}
    saved: list[dict[str, Any]] = []
    config = EngineConfig(model=str(tiny_model), device="cpu")
    reason = run_transformers(config, {1: [], 2: []}, rounds, ["sdpa"], 1.0, saved.append)
    assert "no figures for 1, 2 at once" in reason
    assert [found["error"] for found in saved[-1].values()] == ["RuntimeError: no"] * 2


@pytest.mark.slow
def test_a_whole_run_keeps_its_figures_where_a_part_fails(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, drawn = tmp_path / "results.json", tmp_path / "results.svg"
    argv = ["--model", tiny_model, "--device", "cpu", "--max-total-tokens", 4096, "--concurrency", 3]
    argv += ["--requests", 6, "--prompt", 300, "--output", 24, "--rounds", 1, "--in-process", "--replay"]
    argv += ["--transformers", "flash-2", "sdpa-64", "--plot", drawn, "--out", out]
    monkeypatch.setattr(sys, "argv", ["serving", *map(str, argv)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    pyplot = serving_figures.load_pyplot()
    monkeypatch.setitem(pyplot.rcParams, "svg.fonttype", "none")  # so that words are words
    with pytest.raises(SystemExit, match=r"--replay failed: .*CUDA graphs") as ended:
        serving.main()
    assert ended.value.code
    results = json.loads(out.read_text())["results"]
    assert results["settings"]["engine"]["model"] == "tiny"
    load = results["loads"]["3 clients"]
    assert (load["requests"], load["output_tokens"]) == (6, 144)
    assert load["host_core_at_100_tokens_per_s"] > 0
    at_once = results["at_once"]["3"]
    for peer in ("in_process", "transformers"):
        expected = at_once["http_tokens_per_s"]["median"] / at_once[f"{peer}_tokens_per_s"]["median"]
        assert at_once[f"http_over_{peer}"]["median"] == pytest.approx(expected)
    assert "FlashAttention2" in results["transformers"]["flash-2"]["error"]
    assert results["transformers"]["sdpa-64"]["error"] is None
    assert results["transformers"]["sdpa-64"]["batches"]["3"]["same_text"] == 1.0
    assert "CUDA graphs" in results["failures"]["replay"]
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1])["results"]["at_once"] == results["at_once"]
    assert "transformers, all at once" in drawn.read_text()


def test_figures_are_drawn_again_from_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = tmp_path / "again.png"
    results = Path(__file__).parents[2] / "bench" / "results" / "serving-h200.json"
    monkeypatch.setattr(sys, "argv", ["serving", "--replot", str(results), "--plot", str(drawn)])
    serving.main()
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert "256 clients" in capsys.readouterr().out


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        serving_figures.load_pyplot()


def test_processor_time_of_a_process_is_read_from_the_right_fields() -> None:
    before = served._cpu_seconds(served.os.getpid())
    used = served.os.times()
    assert before == pytest.approx(used.user + used.system, abs=0.1)


def test_memory_of_a_process_is_what_it_has_touched() -> None:
    before = served._memory(served.os.getpid())
    touched = bytearray(b"x" * (64 * 2**20))
    after = served._memory(served.os.getpid())
    assert after.resident - before.resident == pytest.approx(len(touched), rel=0.1)
    assert after.proportional <= after.resident


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("churn", [False, True], ids=["steady", "churn"])
def test_the_load_of_the_router_is_the_one_that_it_claims(churn: bool, depth: int) -> None:
    load = router_step.Load(num_running=60, num_queued=100, prompt=8, shared=4, churn=churn, depth=depth)
    router = router_step.Router(load, steps=200)
    router.measure(60)
    admitted = router.scheduler.num_prompt_tokens
    router.measure(120)
    assert abs(router.scheduler.num_running - 60) <= 1
    assert router.scheduler.num_waiting == 100
    assert (router.scheduler.num_prompt_tokens - admitted) / 8 == pytest.approx(120 * churn, abs=2)
    assert all(len(times) == 120 for times in router.times.values())


def test_every_id_of_the_random_checkpoint_has_a_text_of_its_own(tmp_path: Path) -> None:
    random_checkpoint.save_tokenizer(tmp_path, 1000)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64, "vocab_size": 1000}')
    tokenizer = Tokenizer(tmp_path)
    pieces = {tokenizer.token_bytes(token_id) for token_id in range(1000)}
    assert len(pieces) == 1000
    assert b"" not in pieces
    assert tokenizer.decode([300, 999]) == " 300 999"
