"""The comparison of rules of admission runs from end to end on small cells, and goes on where it stopped."""

import json
import sys
from pathlib import Path

import pytest

from bench.trace import admission_rules
from lightkv.router.simulate.trace_files import FileTrace, Reading


def test_a_run_adds_the_cells_that_the_file_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cells.jsonl"

    def run(*policies: str) -> list[dict]:
        options = ["--cells", str(path), "--requests", "40", "--capacity", "9000", "--loads", "1.3"]
        names = ["--workloads", "chat, half of them state 4,096", "sessions", "--policies", *policies]
        monkeypatch.setattr(sys, "argv", ["bench", *options, *names, "--processes", "2"])
        admission_rules.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])["results"]

    first = run("quantile")
    before = path.read_text()
    both = run("quantile", "watermark")
    assert path.read_text().startswith(before)
    assert len(path.read_text().splitlines()) == 4
    assert [one["workload"] for one in both] == ["chat, half of them state 4,096", "sessions"]
    assert [one["policies"]["quantile"] for one in both] == [one["policies"]["quantile"] for one in first]
    for one in both:
        assert one["load"] == 1.3
        assert one["policies"]["watermark"]["guaranteed"] == 0.0
        assert 0 < one["policies"]["watermark"]["in_time"] <= 1


def test_the_table_has_means_and_ratios_to_the_better_rival() -> None:
    def cell(policy: str, seed: int, met: float, first: float) -> dict:
        return {
            "workload": "sharegpt", "load": 1.0, "policy": policy, "seed": seed, "met_share": met,
            "ttft_p99": first, "preempted_share": 0.01, "most_preemptions": seed, "recomputed_tokens": 30,
            "prompt_tokens": 1000, "hit_tokens": 500, "output_tokens": 500, "mean_guaranteed": 2.0,
            "mean_running": 8.0, "num_preempted_guaranteed": 0,
        }  # fmt: skip

    cells = [cell("reserved", 0, 0.4, 9.0), cell("reserved", 1, 0.5, 7.0)]
    cells += [cell("quantile", 0, 0.9, 2.0), cell("watermark", 0, 0.6, 1.6)]
    table = admission_rules.table_of(cells, ["reserved", "quantile", "watermark"])
    rows = admission_rules.rows_of(table)
    assert rows[0] == [
        "sharegpt, 1.0",
        "reserved",
        "45.0%",
        "0.500",
        "8.00",
        "5.00",
        "1.00%",
        "1",
        "3.00%",
        "25%",
        "0",
        "2",
    ]
    assert [row[3] for row in rows] == ["0.500", "1.000", "0.667"]
    assert [row[5] for row in rows] == ["5.00", "1.25", "1.00"]


def test_sessions_continue_their_prompts(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    admission_rules.write_sessions(path, seed=3, num=60)
    requests = list(FileTrace(path, Reading(block_tokens=admission_rules.BLOCK)))
    assert len(requests) == 60
    turns = [
        (earlier, later)
        for i, earlier in enumerate(requests)
        for later in requests[i + 1 :]
        if later.blocks[0] == earlier.blocks[0]
    ]
    assert len(turns) > 30
    for earlier, later in turns:
        whole = earlier.prompt // admission_rules.BLOCK
        assert later.blocks[:whole] == earlier.blocks[:whole]
        assert later.blocks[whole : whole + 1] != earlier.blocks[whole:]
        assert later.prompt > earlier.prompt + earlier.output
