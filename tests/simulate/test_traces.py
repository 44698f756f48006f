"""Traces: the published formats with their times and prefixes, the generated ones, and arrivals."""

import itertools
import math
import statistics
import time
from pathlib import Path

import pytest

from lightkv.router.simulate import traces
from lightkv.router.simulate.traces import FileTrace, GeneratedTrace, Repeated, TraceRequest, UnreadableTrace

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
SHAREGPT = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n"


def write(path: Path, text: str) -> FileTrace:
    path.write_text(text)
    return FileTrace(path)


def test_azure_times_are_seconds_from_the_first_and_never_go_back(tmp_path: Path) -> None:
    found = list(write(tmp_path / "a.csv", AZURE))
    assert [(r.prompt, r.output, r.blocks) for r in found] == [(374, 44, ()), (396, 109, ()), (12, 3, ())]
    assert [r.arrival for r in found] == pytest.approx([0.0, 4.314579, 4.314579])


def test_mooncake_has_milliseconds_and_prefix_blocks(tmp_path: Path) -> None:
    found = list(write(tmp_path / "m.jsonl", MOONCAKE))
    assert found == [TraceRequest(0.0, 700, 5, (0, 7)), TraceRequest(3.5, 512, 2, (0,))]


def test_sharegpt_has_no_times(tmp_path: Path) -> None:
    trace = write(tmp_path / "s.csv", SHAREGPT)
    assert list(trace) == [TraceRequest(None, 74, 918)]
    assert not traces.is_timed(trace)


def test_the_error_for_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnreadableTrace, match=r"prompt, answer; known are .*Azure.*ShareGPT.*Mooncake"):
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
    times = [r.arrival for r in traces.poisson(trace, 50.0, seed=1)]
    assert times == sorted(times)  # type: ignore[type-var]
    gaps = [b - a for a, b in itertools.pairwise(times)]  # type: ignore[operator]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert times == [r.arrival for r in traces.poisson(trace, 50.0, seed=1)]


def test_a_trace_is_made_faster(tmp_path: Path) -> None:
    trace = write(tmp_path / "m.jsonl", MOONCAKE)
    assert [r.arrival for r in traces.faster(trace, 7.0)] == pytest.approx([0.0, 0.5])
    assert [r.arrival for r in traces.at_once(trace)] == [0.0, 0.0]
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
        ("{input_length", "line 2: no JSON, Expecting property name enclosed in double quotes; correct"),
    ],
    ids=["time", "length", "blocks", "json"],
)
def test_the_error_for_an_invalid_json_line_names_it(tmp_path: Path, line: str, match: str) -> None:
    trace = write(tmp_path / "m.jsonl", MOONCAKE.splitlines()[0] + "\n" + line + "\n")
    with pytest.raises(UnreadableTrace, match=match):
        list(trace)


@pytest.mark.parametrize(
    ("line", "match"),
    [("soon,7,5", "Invalid isoformat"), ("2023-11-16 18:15:47,7", "GeneratedTokens is None")],
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
