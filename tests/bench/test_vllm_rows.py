"""How measurements of vLLM and lightkv become the rows that README and docs/measured.md quote."""

import re
from typing import Any

import pytest

from bench.serving.vllm_peer import compare, peer_bench, rows


def offline(engine: str, factor: float = 1.0, **changed: Any) -> dict[str, Any]:
    """A measurement in process whose times are `factor` times those of another."""
    batch = {"step_ms": [4.0 * factor, 5.0 * factor, 9.0 * factor], "tokens_per_s": [200 / factor],
             "first_tokens": [7, 8, 9, round(10 * factor)]}  # fmt: skip
    return {
        "engine": engine, "version": f"{engine}-1", "kind": "offline", "settings": {}, "quick": False,
        "page_cache": "warm", "compile_cache": "empty", "start_seconds": 90.0 * factor,
        "batches": {"1": batch}, "first_token_ms": {"512": [16.0 * factor]}, **changed,
    }  # fmt: skip


class Answering:
    """An engine that takes a second longer with each call. `asked`: the prompts of each."""

    version = "1"

    def __init__(self) -> None:
        self.asked: list[peer_bench.Prompts] = []

    def settle(self) -> None: ...

    def generate(self, prompts: peer_bench.Prompts, num_output: int) -> tuple[float, list[list[int]]]:
        self.asked.append(prompts)
        return float(len(self.asked)), [[7] * num_output] * len(prompts)


def http(engine: str, factor: float = 1.0) -> dict[str, Any]:
    times = dict.fromkeys(("mean", "p50", "p90", "p95", "p99"), 10.0 * factor)
    load = {"output_tokens_per_s": 6600.0 / factor, "ttft_ms": times, "per_token_ms": times,
            "between_pieces_ms": times}  # fmt: skip
    return offline(engine, factor, kind="http", loads={"256 clients": load}, batches={}, first_token_ms={})


def lifelike(engine: str, factor: float = 1.0, saturation: float = 20.0) -> dict[str, Any]:
    """A measurement of two cells."""
    times = dict.fromkeys(("mean", "p50", "p90", "p95", "p99"), 10.0 * factor)
    cell = {"output_tokens_per_s": 3000.0 / factor, "ttft_ms": times, "per_token_ms": times, "failed": 0,
            "between_pieces_ms": times, "goodput_per_s": 12.0 / factor, "cut_off": 3}  # fmt: skip
    cells = {"bursty-0.6": cell, "sessions-0.6": cell | {"turns": {"5 and later": {"ttft_ms": times}}}}
    made = offline(engine, factor, kind="lifelike", cells=cells, batches={}, first_token_ms={})
    return made | {"load": {"saturation": saturation}, "saturation": {"requests_per_s": saturation / factor}}


def document(
    *measurements: dict[str, Any], device: str = "NVIDIA H200", shape: str = "llama-3-8b"
) -> dict[str, Any]:
    settings = {"model": f"the shape of {shape}, random weights, bfloat16", "prompt": 512, "output": 128}
    return {"device": device, "results": {"settings": settings, "measurements": list(measurements)}}


def test_rows_have_the_medians_of_all_measurements_and_the_ratio() -> None:
    found = {
        row["name"]: row
        for row in rows.compare(
            [offline("vllm"), offline("vllm", 2.0), offline("lightkv", 0.5), http("vllm")]
        )
    }
    step = found["decode step, batch 1"]
    assert step["vllm"] == {
        "median": 8.5,
        "low": 4.0,
        "high": 18.0,
        "values": [4.0, 5.0, 9.0, 8.0, 10.0, 18.0],
    }
    assert step["lightkv"]["median"] == 2.5
    assert step["lightkv_over_vllm"] == pytest.approx(2.5 / 8.5)
    assert found["first token, prompt 512"]["lightkv_over_vllm"] == pytest.approx(8.0 / 24.0)
    rate = found["HTTP, 256 clients: tokens/s"]
    assert (rate["vllm"]["median"], rate["lightkv"], rate["lightkv_over_vllm"]) == (6600.0, None, None)
    assert found["HTTP, 256 clients: first token, p95"]["vllm"]["median"] == 10.0
    assert "decode step, batch 32" not in found, "no engine has it"


def test_starts_are_told_apart_by_what_was_compiled_and_read_before() -> None:
    again = offline("vllm", compile_cache="filled", start_seconds=50.0)
    cold = offline("vllm", page_cache="cold", start_seconds=120.0)
    found = {row["name"]: row["vllm"] for row in rows.compare([offline("vllm"), again, cold])}
    starts = {name: own["values"] for name, own in found.items() if name.startswith("start")}
    assert starts == {
        "start in process, empty compile cache, warm page cache": [90.0],
        "start in process, empty compile cache, cold page cache": [120.0],
        "start in process, filled compile cache, warm page cache": [50.0],
    }


def test_every_row_of_a_whole_run_has_a_value() -> None:
    """The keys that are read are those that `peer_bench.py` and `bench.serving.load` write."""
    whole = offline(
        "vllm",
        batches={str(batch): offline("vllm")["batches"]["1"] for batch in rows.BATCHES},
        first_token_ms={str(prompt): [1.0] for prompt in rows.PROMPTS},
        **peer_bench.measure_shared(Answering(), peer_bench.Load(1000), 8, 2),
    )
    loads = {f"{clients} clients": http("vllm")["loads"]["256 clients"] for clients in rows.CLIENTS}
    service = http("vllm") | {"loads": loads}
    names = [row["name"] for row in rows.compare([whole, service])]
    assert len(names) == 3 + 3 + 3 + 2 + 1 + 3 * 7 + 1
    assert len(set(names)) == len(names)


def test_prompts_that_begin_alike_are_as_long_as_those_that_share_nothing() -> None:
    engine = Answering()
    found = peer_bench.measure_shared(engine, peer_bench.Load(1000), 8, 2)
    assert found == {"shared_s": [3.0, 5.0], "unshared_s": [4.0, 6.0]}  # without the run that warms up
    for alike, others in (engine.asked[:2], engine.asked[2:4], engine.asked[4:]):
        assert list(map(len, alike)) == list(map(len, others)) == [370, 371, 372, 373] * 2
        assert len({tuple(ids[:369]) for ids in alike}) == 1
        assert len({tuple(ids[:369]) for ids in others}) == 8


def test_loads_like_life_have_rows_of_their_own() -> None:
    found = {row["name"]: row for row in rows.compare([lifelike("vllm"), lifelike("lightkv", 0.5)])}
    assert found["saturation"]["lightkv_over_vllm"] == 2.0
    assert found["bursty-0.6: first token, p99"]["lightkv_over_vllm"] == 0.5
    assert found["bursty-0.6: failed"]["lightkv_over_vllm"] is None, "none of vLLM's failed"
    assert found["bursty-0.6: cut off"]["vllm"]["median"] == 3
    assert found["sessions-0.6: first token of turn 5 and later, p50"]["lightkv"]["median"] == 5.0
    assert len(found) == 1 + 2 * 11 + 1


def test_shares_are_of_what_vllm_can_serve() -> None:
    machine = {"device": "NVIDIA H200", "versions": {}}
    earlier = [document(lifelike("vllm", saturation=17.5))]
    model = "the shape of llama-3-8b, random weights, bfloat16"
    assert compare.Document(model, machine, earlier, None).saturation == 17.5
    assert compare.Document(model, machine, [], None).saturation is None


def test_the_table_shows_both_engines_and_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    measurements = [offline("vllm"), offline("lightkv", 0.5)]
    rows.print_rows(rows.compare(measurements), measurements)
    lines = capsys.readouterr().out.splitlines()
    assert re.split(r"\s{2,}", lines[1].strip()) == ["vllm vllm-1", "lightkv lightkv-1", "lightkv / vllm"]
    assert re.split(r"\s{2,}", lines[2]) == [
        "decode step, batch 1", "5.00 (4.00 to 9.00) ms", "2.50 (2.00 to 4.50) ms", "0.500",
    ]  # fmt: skip


def test_the_engines_first_tokens_are_compared() -> None:
    assert rows.same_first_tokens([offline("vllm"), http("vllm")]) == {}
    assert rows.same_first_tokens([offline("vllm"), offline("lightkv"), http("vllm")]) == {"1": 1.0}
    assert rows.same_first_tokens([offline("vllm"), offline("lightkv", 2.0)]) == {"1": 0.75}


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (document(offline("vllm"), device="NVIDIA B200"), "different machines: NVIDIA B200, NVIDIA H200"),
        (document(offline("vllm"), shape="qwen3-8b"), "different models: the shape of llama-3-8b"),
        (document(offline("lightkv", version="abc")), "lightkv are of different versions"),
        (document(offline("lightkv", settings={"max_num_seqs": 1})), "different versions or settings"),
        (document(offline("vllm", quick=True)), "--quick"),
        (document(lifelike("vllm"), lifelike("lightkv", saturation=3.0)), "different loads"),
    ],
    ids=["machine", "model", "commit", "settings", "amount", "loads"],
)
def test_measurements_that_do_not_belong_together_are_refused(other: dict[str, Any], match: str) -> None:
    first = document(offline("lightkv"))
    assert len(rows.merge([first, document(offline("vllm"), http("lightkv"))])) == 3
    with pytest.raises(SystemExit, match=match):
        rows.merge([first, other])
