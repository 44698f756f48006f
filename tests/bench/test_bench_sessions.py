"""The benchmark of sessions runs from end to end on a small trace, and finds what it has to find."""

import json
import sys
from pathlib import Path

import pytest

from bench.trace import sessions
from lightkv.router.simulate.trace_files import BLOCK, IN_MILLISECONDS, FileTrace


def write_trace(path: Path, others: int = 12) -> Path:
    """Writes six conversations of five turns each, and single requests between the turns. All begin with one
    system prompt, of a block."""
    lines = []
    unused = iter(range(1, 10_000))
    blocks = {conversation: [0, next(unused)] for conversation in range(6)}
    for turn in range(5):
        for conversation, own in blocks.items():
            at = 1000 * (100 * turn + conversation)
            own.append(next(unused))
            length = (
                BLOCK * len(own) - 100
            )  # the last block is not full, and so is another one in the next turn
            lines.append({"timestamp": at, "input_length": length, "output_length": 20, "hash_ids": [*own]})
            own[-1] = next(unused)
        for i in range(others):
            ids = [0, *(next(unused) for _ in range(4))]
            at = 1000 * (100 * turn + 10 + i)
            lines.append({"timestamp": at, "input_length": 5 * BLOCK, "output_length": 9, "hash_ids": ids})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_conversations_are_found_by_their_blocks(tmp_path: Path) -> None:
    turns = sessions.conversations(FileTrace(write_trace(tmp_path / "trace.jsonl"), IN_MILLISECONDS), every=1)
    assert len(turns) == 6 * 5 + 12 * 5
    assert sum(turn.has_session for turn in turns) == 30
    assert len({turn.conversation for turn in turns}) == 6 + 12 * 5
    first = next(turn for turn in turns if turn.has_session)
    assert len(first.prompt_ids()) == 4 * first.asked.prompt


def test_sessions_find_their_tokens_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    trace = write_trace(tmp_path / "trace.jsonl")
    options = ["--trace", str(trace), "--every", "1", "--ttl", "150", "--occupancy", "0.9", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    sessions.main()
    results = json.loads(out.read_text())["results"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["results"] == results
    pool = results["pools"]["0.9"]
    assert {name: found["turns"] for name, found in pool.items()} == {"all fit": 24, "half": 24, "none": 24}
    assert pool["all fit"]["hit_share"] >= 0.99
    assert pool["none"]["hit_share"] < 0.5
    assert pool["none"]["hit_share"] <= pool["half"]["hit_share"] <= pool["all fit"]["hit_share"]
    assert pool["all fit"]["evicted"] == pool["all fit"]["over_share"] == 0
    assert pool["half"]["over_share"] > 0


def test_a_turn_that_comes_too_late_does_not_count(tmp_path: Path) -> None:
    turns = sessions.conversations(FileTrace(write_trace(tmp_path / "trace.jsonl"), IN_MILLISECONDS), every=1)
    found = sessions.Replay(100_000, 0.5, 50.0, sessions.StepTime.parse("")).run(turns)
    assert (found.turns, found.late_turns, found.own) == (0, 24, 0)


def test_a_trace_without_conversations_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n7,9\n")
    monkeypatch.setattr(sys, "argv", ["bench", "--trace", str(trace)])
    with pytest.raises(SystemExit, match="no conversation of several turns"):
        sessions.main()
