"""The loads of `bench/memory/ledger.py` are as described, and counts that differ are refused."""

import json
import sys
from pathlib import Path

import pytest

from bench.memory import ledger as bench
from lightkv.edits import Alloc, FreeRange, FreeSegment, KeepEntries, SplitSegment, StoreSegment
from lightkv.ledger import TokenLedger

SMALL = bench.Load("small", 60, turn=16, turns=2, stems=24, siblings=6)


def make(load: bench.Load = SMALL) -> bench.Service:
    return bench.Service(load, cached=3000, running=6)


@pytest.mark.parametrize("load", bench.LOADS, ids=lambda load: load.name)
def test_prompts_have_their_length_and_what_they_share(load: bench.Load) -> None:
    prompts = bench.Prompts(load)
    stems = prompts.stems()
    assert len(stems) == load.stems * load.turns
    assert len({stem[: load.turn * 4] for stem in stems}) == -(-load.stems // load.siblings)
    drawn = [prompts.next() for _ in range(400)]
    assert {len(prompt) for prompt in drawn} == {load.prompt * 4}
    whole = {stem for stem in stems if len(stem) == load.turn * load.turns * 4}
    num_whole = sum(prompt[: load.turn * load.turns * 4] in whole for prompt in drawn)
    assert 0.8 < num_whole / len(drawn) < 0.95  # seven in eight
    first_turns = {stem[: load.turn * 4] for stem in whole}
    assert all(prompt[: load.turn * 4] in first_turns for prompt in drawn)


def test_a_service_has_as_much_cached_as_was_asked_for_whatever_is_done() -> None:
    service = make()
    for work in (service.request, service.branch, service.window, service.step):
        for _ in range(40):
            work()
        service.level()
        assert service.ledger.num_cached == 3000
        assert service.ledger.num_open == 6
        assert service.check() > 24
    service.beam_search(20)
    assert service.ledger.num_open == 6
    assert service.check() > 24
    times = service.clock.times
    assert len(times["fork, a beam"]) == len(times["close, a beam"]) == 20 * bench.NUM_BEAMS
    assert len(times["open"]) == len(times["evict"]) == len(times["close"]) == len(times["fork"]) == 40
    assert len(times["extend"]) == 80
    assert len(times["release 1"]) == 40 * bench.WINDOW_STEPS
    assert len(times[bench.STEP]) == 40
    assert len(times["truncate"]) == 40  # the truncations after each step are not measured
    assert all(time > 0 for found in times.values() for time in found)
    assert 16 < sum(service.hits) / len(service.hits) < 60


def test_a_wrong_count_is_refused() -> None:
    service = make()
    service.ledger._state.num_free -= 1
    with pytest.raises(SystemExit, match="no figures"):
        service.check()


def test_an_edit_that_is_lost_is_refused() -> None:
    service = make()
    service.ledger.evict(10)
    service.ledger.drain()
    with pytest.raises(SystemExit, match="the edits leave"):
        service.check()


def test_too_little_cached_is_refused() -> None:
    service = make()
    service.clock("evict", service.ledger.evict, 1000)
    with pytest.raises(SystemExit, match="2000 tokens are cached, not 3000"):
        service.check()


def test_every_edit_is_counted() -> None:
    count = bench.EditCount(100)
    count.apply(
        [
            Alloc((1, 2), (0, 0), (20, 10)),
            FreeRange(2, 8, 10),
            KeepEntries(2, 0, 8, 5),
            StoreSegment(1, 4, 20, 7),
        ]
    )
    assert (count.num_free, count.segments) == (75, {7: 16})
    count.apply([SplitSegment(7, 6, 8), FreeSegment(7, 3), FreeSegment(8, 0)])
    assert (count.num_free, count.segments) == (88, {7: 3})


def test_time_is_kept_of_what_is_measured_alone() -> None:
    clock = bench.Clock(TokenLedger(100, 4, 50))
    with clock.paused():
        clock("open", clock.ledger.open, b"\1\0\0\0\2\0\0\0")
    assert clock.times == {}
    clock.is_running = True
    sequence = clock("open", clock.ledger.open, b"\1\0\0\0\2\0\0\0")
    with clock.paused():
        clock("extend", clock.ledger.extend, [sequence], [2])
    assert {name: len(times) for name, times in clock.times.items()} == {"open": 1, "encode": 1}
    assert clock.edits() == [Alloc((sequence.row,), (0,), (2,))]


def test_what_is_too_slow_is_named() -> None:
    fast = {"mean": 1.0, "p99": 2.0}
    verbs = dict.fromkeys((*bench.TARGETED, bench.STEP), fast)
    assert bench.missed(verbs) == []
    verbs |= {"open": {"mean": 6.0, "p99": 2.0}, bench.STEP: {"mean": 21.0, "p99": 30.0}}
    assert bench.missed(verbs) == ["open mean 6.0 µs, over 5", f"{bench.STEP} mean 21.0 µs, over 20"]


def test_a_whole_run_reports_every_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "LOADS", (SMALL,))
    out = tmp_path / "ledger.json"
    argv = ["ledger", "--cached", "3000", "--running", "6", "--requests", "20", "--steps", "10"]
    monkeypatch.setattr(sys, "argv", [*argv, "--out", str(out)])
    bench.main()
    results = json.loads(out.read_text())["results"]
    found = results["loads"]["small"]
    verbs = {"open", "extend", "publish", "close", "evict", "fork", "truncate", "release 1", bench.STEP}
    assert verbs <= set(found["verbs"])
    assert all(times["calls"] >= 10 and times["mean"] > 0 for times in found["verbs"].values())
    assert found["floor"]["mean"] > 0
    assert len(found["conversions"]) == 3
    assert {kind: us["calls"] for kind, us in results["changed_steps"].items()} == dict.fromkeys(
        bench.CLASSES, 10
    )
    assert "tokens cached in" in capsys.readouterr().out
