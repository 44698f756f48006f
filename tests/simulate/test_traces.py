"""Traces: the published formats with their times and prefixes, the generated ones, and arrivals."""

import itertools
import math
import statistics
import time
from pathlib import Path

import pytest

from lightkv.router.simulate import traces
from lightkv.router.simulate.arrivals import faster, poisson
from lightkv.router.simulate.config import InvalidSimulation, SimulationConfig
from lightkv.router.simulate.simulator import simulate
from lightkv.router.simulate.trace_files import (
    IN_MILLISECONDS,
    FileTrace,
    Reading,
    TraceRequest,
    UnreadableTrace,
)
from lightkv.router.simulate.traces import GeneratedTrace, Repeated

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
    "2023-11-16 18:15:49.0000000,10,0\n"
    "2023-11-16 18:15:48.1805900,12,3\n"
)
MOONCAKE = (
    '{"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]}\n'
    '{"timestamp": 4500, "input_length": 512, "output_length": 2, "hash_ids": [0]}\n'
)
OWN = "prompt_tokens,output_tokens,arrival_seconds\n350,120,10\n12,3,12.5\n"
SHAREGPT = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n"


def write(path: Path, text: str, reading: Reading = IN_MILLISECONDS) -> FileTrace:
    path.write_text(text)
    return FileTrace(path, reading)


def test_azure_times_are_seconds_from_the_first_and_never_go_back(tmp_path: Path) -> None:
    found = list(write(tmp_path / "a.csv", AZURE))
    assert [(r.prompt, r.output, r.blocks) for r in found] == [(374, 44, ()), (396, 109, ()), (12, 3, ())]
    assert [r.arrival for r in found] == pytest.approx([0.0, 4.314579, 4.314579])


def test_mooncake_has_milliseconds_and_prefix_blocks(tmp_path: Path) -> None:
    found = list(write(tmp_path / "m.jsonl", MOONCAKE))
    assert found == [TraceRequest(0.0, 700, 5, (0, 7)), TraceRequest(3.5, 512, 2, (0,))]


@pytest.mark.parametrize(("unit", "seconds"), [("s", 3500.0), ("ms", 3.5), ("us", 0.0035), ("ns", 3.5e-6)])
def test_a_time_is_in_the_unit_that_is_given(tmp_path: Path, unit: str, seconds: float) -> None:
    found = list(write(tmp_path / "m.jsonl", MOONCAKE, Reading(unit)))
    assert [request.arrival for request in found] == pytest.approx([0.0, seconds])


@pytest.mark.parametrize("times", [("0", "3"), ("0.5", "1.25"), ("1700000000", "1700000003")])
def test_a_time_of_an_unknown_unit_is_not_guessed(tmp_path: Path, times: tuple[str, str]) -> None:
    """Seconds under Mooncake's names were read as milliseconds."""
    lines = [f'{{"timestamp": {time}, "input_length": 9, "output_length": 2}}' for time in times]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(lines))
    match = (
        rf"line 1: timestamp is {times[0]}, and its unit is not known: give --time-unit ms .* s, ms, us, ns"
    )
    with pytest.raises(UnreadableTrace, match=match):
        simulate(str(path), SimulationConfig())
    assert simulate(str(path), SimulationConfig(time_unit="s")).figures.seconds > 0.75


def test_a_unit_that_a_file_tells_itself_cannot_be_given_too(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", AZURE)
    write(tmp_path / "own.csv", OWN)
    for name in ("chat", str(tmp_path / "a.csv"), str(tmp_path / "own.csv")):
        with pytest.raises(InvalidSimulation, match=r"--time-unit is s, and .*; leave --time-unit out"):
            simulate(name, SimulationConfig(time_unit="s", requests=2))
    with pytest.raises(InvalidSimulation, match="--time-unit is 'minutes'; give one of s, ms, us, ns"):
        SimulationConfig(time_unit="minutes")


def test_seconds_among_dates_are_refused(tmp_path: Path) -> None:
    for time_ in ("1700000000", "20231116", "0.5"):
        text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n{time_},7,5\n"
        with pytest.raises(UnreadableTrace, match="has to be a date and a time"):
            list(write(tmp_path / "a.csv", text))


def test_the_docs_smallest_trace_runs(tmp_path: Path) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
    text = docs.split("`mine.csv`:\n\n```\n")[1].split("```")[0]
    found = list(write(tmp_path / "mine.csv", text, Reading()))
    assert found == [TraceRequest(0.0, 350, 120), TraceRequest(0.8, 1200, 45), TraceRequest(2.5, 90, 600)]
    assert simulate(str(tmp_path / "mine.csv"), SimulationConfig()).figures.num_finished == 3


@pytest.mark.parametrize("reading", [Reading(), IN_MILLISECONDS])
def test_a_trace_of_ones_own(tmp_path: Path, reading: Reading) -> None:
    """Its times are seconds, whatever the unit of times that do not say so."""
    found = list(write(tmp_path / "own.csv", OWN, reading))
    assert found == [TraceRequest(0.0, 350, 120), TraceRequest(2.5, 12, 3)]
    line = '{"prompt_tokens": 40, "output_tokens": 5, "hash_ids": [7, 9, 4]}\n'
    assert list(write(tmp_path / "own.jsonl", line, Reading(None, 16))) == [
        TraceRequest(None, 40, 5, (7, 9, 4), 16)
    ]


@pytest.mark.parametrize("field", ["timestamp", "arrival_ms", "arrival_time", "Arrived at", "seconds"])
def test_a_time_whose_name_tells_no_unit_is_not_left_out(tmp_path: Path, field: str) -> None:
    with pytest.raises(UnreadableTrace, match=f"the unit of {field} is not known; call it arrival_seconds"):
        list(write(tmp_path / "own.csv", f"prompt_tokens,output_tokens,{field}\n5,5,1\n"))
    more = "prompt_tokens,output_tokens,model,arrival_seconds,end_time\n5,5,x,1,2\n"
    assert list(write(tmp_path / "own.csv", more)) == [TraceRequest(0.0, 5, 5)]


@pytest.mark.parametrize(("num", "is_right"), [(1, False), (2, True), (3, True), (4, False)])
def test_the_number_of_blocks_tells_a_wrong_size(tmp_path: Path, num: int, is_right: bool) -> None:
    """A prompt of 1,200 tokens has two whole blocks of 512, and a part of a third."""
    line = f'{{"input_length": 1200, "output_length": 5, "hash_ids": {list(range(num))}}}\n'
    trace = write(tmp_path / "m.jsonl", line)
    if is_right:
        assert len(next(iter(trace)).blocks) == num
        return
    with pytest.raises(UnreadableTrace, match=rf"1200 tokens has {num} hash_ids, .* of 512 .*--block-tokens"):
        list(trace)


def test_shared_blocks_of_any_size_are_hit(tmp_path: Path) -> None:
    """Two prompts of 64 tokens with three of four blocks of 16 in common; a page of 32 hits one page less."""
    lines = [
        f'{{"prompt_tokens": 64, "output_tokens": 2, "arrival_seconds": {at}, "hash_ids": [1, 2, 3, {last}]}}\n'
        for at, last in ((0, 4), (60, 5))
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(lines))
    config = SimulationConfig(block_tokens=16)
    assert simulate(str(path), config).figures.hit_tokens == 48
    paged = simulate(str(path), SimulationConfig(block_tokens=16, allocation="paged:32"))
    assert paged.figures.hit_tokens == 32


def test_sharegpt_has_no_times(tmp_path: Path) -> None:
    trace = write(tmp_path / "s.csv", SHAREGPT)
    assert list(trace) == [TraceRequest(None, 74, 918)]
    assert not traces.is_timed(trace)


def test_the_error_for_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        UnreadableTrace,
        match=r"prompt, answer; known are prompt_tokens, output_tokens .*Azure.*ShareGPT.*Mooncake",
    ):
        list(write(tmp_path / "x.csv", "prompt,answer\n1,2\n"))


def test_the_error_for_an_unknown_name_lists_the_workloads() -> None:
    with pytest.raises(UnreadableTrace, match="azure-conv, azure-code, sharegpt"):
        traces.open_trace("nothing.csv")


def test_a_repeated_file_begins_again_after_its_last_request(tmp_path: Path) -> None:
    found = list(Repeated(write(tmp_path / "m.jsonl", MOONCAKE), 5))
    assert [r.prompt for r in found] == [700, 512, 700, 512, 700]
    assert [r.arrival for r in found] == pytest.approx([0.0, 3.5, 5.25, 8.75, 10.5])


@pytest.mark.parametrize("name", list(traces.WORKLOADS))
def test_a_workload_depends_only_on_its_seed(name: str) -> None:
    trace = GeneratedTrace(name, 50, seed=3)
    assert list(trace) == list(trace)
    assert len(list(trace)) == 50
    assert list(trace) != list(GeneratedTrace(name, 50, seed=4))


@pytest.mark.parametrize("name", ["azure-conv", "azure-code", "sharegpt", "mooncake"])
def test_a_workload_has_the_published_quantiles(name: str) -> None:
    lengths = [(r.prompt, r.output) for r in GeneratedTrace(name, 20_000)]
    for column, distribution in zip(zip(*lengths, strict=True), traces.WORKLOADS[name], strict=True):
        assert isinstance(distribution, traces.Quantiles)
        tokens = distribution.tokens
        assert tokens[0] <= min(column)
        assert max(column) <= tokens[-1]
        ordered = sorted(column)
        for share, low, high in zip(traces.SHARES[1:-1], tokens, tokens[2:], strict=False):
            assert low <= ordered[int(share * len(ordered))] <= high


def test_arrivals_keep_the_mean_rate() -> None:
    trace = GeneratedTrace("chat", 20_000)
    times = [r.arrival for r in poisson(trace, 50.0, seed=1)]
    assert times == sorted(times)  # type: ignore[type-var]
    gaps = [b - a for a, b in itertools.pairwise(times)]  # type: ignore[operator]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert times == [r.arrival for r in poisson(trace, 50.0, seed=1)]


def test_a_trace_is_made_faster(tmp_path: Path) -> None:
    trace = write(tmp_path / "m.jsonl", MOONCAKE)
    assert [r.arrival for r in faster(trace, 7.0)] == pytest.approx([0.0, 0.5])
    assert [r.arrival for r in faster(trace, math.inf)] == [0.0, 0.0]
    assert traces.summarise(trace) == (2, 3.5)
    assert math.isclose(traces.summarise(trace).span or 0.0, 3.5)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ('{"timestamp": NaN, "input_length": 7, "output_length": 5}', "line 2: the time is nan"),
        (
            '{"input_length": "x", "output_length": 5}',
            "line 2: input_length is 'x'; it has to be a whole number",
        ),
        ('{"input_length": 7, "output_length": 5, "hash_ids": ["a"]}', "have to be whole numbers"),
        (
            '{"input_length": 7.5, "output_length": 5}',
            "line 2: input_length is 7.5; it has to be a whole number",
        ),
        (
            '{"timestamp": "soon", "input_length": 7, "output_length": 5}',
            "timestamp is 'soon'; it has to be a number",
        ),
        ("{input_length", "line 2: no JSON, Expecting property name enclosed in double quotes; correct"),
    ],
    ids=["time", "length", "blocks", "fraction", "word", "json"],
)
def test_the_error_for_an_invalid_json_line_names_it(tmp_path: Path, line: str, match: str) -> None:
    trace = write(tmp_path / "m.jsonl", MOONCAKE.splitlines()[0] + "\n" + line + "\n")
    with pytest.raises(UnreadableTrace, match=match):
        list(trace)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("soon,7,5", "TIMESTAMP is 'soon'; it has to be a date"),
        ("2023-11-16 18:15:47,7", "GeneratedTokens is None"),
    ],
    ids=["time", "short"],
)
def test_the_error_for_an_invalid_line_of_a_table_names_it(tmp_path: Path, line: str, match: str) -> None:
    first = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,7,5\n"
    with pytest.raises(UnreadableTrace, match=f"line 3: {match}"):
        list(write(tmp_path / "a.csv", first + line + "\n"))


def test_a_packed_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(UnreadableTrace, match="unpack it"):
        list(FileTrace(tmp_path / "a.csv.gz"))


def test_any_number_can_be_the_id_of_a_block(tmp_path: Path) -> None:
    line = '{{"input_length": 1024, "output_length": 5, "hash_ids": [{}, 3]}}\n'
    found = list(
        write(tmp_path / "m.jsonl", line.format(2**63) + line.format(2**63) + line.format(2**63 + 1))
    )
    assert found[0].blocks == found[1].blocks != found[2].blocks
    assert all(0 <= block < 2**31 - 2 for request in found for block in request.blocks)


def test_times_do_not_depend_on_the_time_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/Los_Angeles")
    time.tzset()
    try:
        rows = "2023-03-12 01:59:59,5,5\n2023-03-12 03:00:01,5,5\n"
        found = list(write(tmp_path / "a.csv", AZURE.splitlines()[0] + "\n" + rows))
        assert [request.arrival for request in found] == [0.0, 3602.0]
    finally:
        monkeypatch.undo()
        time.tzset()
