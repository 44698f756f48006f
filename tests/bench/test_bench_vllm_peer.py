"""vLLM beside lightkv: a whole run on a fake vLLM, and how measurements become rows."""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.serving.vllm_peer import compare, rows
from bench.serving.vllm_peer.processes import (
    Engine,
    PartFailed,
    Service,
    make_lightkv,
    make_vllm,
    run_child,
)

# --------------------------------------------------------------------------------
# Measurements


def offline(engine: str, factor: float = 1.0, **changed: Any) -> dict[str, Any]:
    """A measurement in process whose times are `factor` times those of another."""
    batch = {"step_ms": [4.0 * factor, 5.0 * factor, 9.0 * factor], "tokens_per_s": [200 / factor],
             "first_tokens": [7, 8, 9, round(10 * factor)]}  # fmt: skip
    return {
        "engine": engine, "version": f"{engine}-1", "kind": "offline", "settings": {}, "quick": False,
        "page_cache": "warm", "compile_cache": "empty", "start_seconds": 90.0 * factor,
        "batches": {"1": batch}, "first_token_ms": {"512": [16.0 * factor]}, **changed,
    }  # fmt: skip


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
    )
    loads = {f"{clients} clients": http("vllm")["loads"]["256 clients"] for clients in rows.CLIENTS}
    service = http("vllm") | {"loads": loads}
    names = [row["name"] for row in rows.compare([whole, service])]
    assert len(names) == 3 + 3 + 3 + 1 + 3 * 7 + 1
    assert len(set(names)) == len(names)


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
    assert compare.Document("llama-3-8b", machine, earlier, None).saturation == 17.5
    assert compare.Document("llama-3-8b", machine, [], None).saturation is None


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


# --------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize(
    "argv",
    [
        ["--only", "nothing"],
        ["--skip-http", "--skip-offline"],
        ["--http-rounds", "0"],
        ["--set", "fuse"],
        ["--lifelike"],
        ["--lifelike", "no-such-cell", "--traces", "."],
    ],
    ids=" ".join,
)
def test_options_that_make_no_sense_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.arguments(argv)
    assert "error" in capsys.readouterr().err


@pytest.mark.slow
def test_settings_reach_lightkv_in_process_and_as_a_service(tmp_path: Path) -> None:
    options = compare.arguments(["--set", "max_num_seqs=8", "cuda_graphs=False", "--set", "admission=exact"])
    settings = compare.parse_settings(options.set)
    assert settings == {"max_num_seqs": 8, "cuda_graphs": False, "admission": "guaranteed"}
    engine = make_lightkv(None, tmp_path, tmp_path / "m", settings)
    assert engine.serve[-4:] == (str(tmp_path / "m"), "--max-num-seqs", "8", "--no-cuda-graphs")
    with pytest.raises(TypeError, match="no_such_setting"):
        make_lightkv(None, tmp_path, tmp_path / "m", {"no_such_setting": 1})


def test_an_engines_compiled_code_is_noticed(tmp_path: Path) -> None:
    engine = make_vllm(tmp_path, tmp_path, tmp_path / "m")
    assert (engine.version, engine.compile_cache) == ("not installed", "empty")
    (tmp_path / "compiled" / "vllm" / "a").mkdir(parents=True)
    assert engine.compile_cache == "empty"
    (tmp_path / "compiled" / "vllm" / "a" / "b").touch()
    assert engine.compile_cache == "filled"
    assert engine.environment["VLLM_CACHE_ROOT"] == str(tmp_path / "compiled" / "vllm")
    assert engine.environment["PYTHONPATH"] == f"{tmp_path / 'site'}{os.pathsep}{tmp_path / 'vllm'}"


# --------------------------------------------------------------------------------
# Processes


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


LEAVES_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
print("shown: one", flush=True)
print("a line of the log", flush=True)
if sys.argv[2] == "fail":
    child.kill()
    sys.exit(3)
time.sleep(600)
"""


@pytest.mark.parametrize(("end", "match"), [("fail", "ended with code 3"), ("hang", "not done within 1.5 s")])
def test_a_process_that_fails_or_hangs_is_ended_with_its_children(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str, match: str
) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(PartFailed, match=f"(?s){match}.*a line of the log"):
        run_child(
            ["-c", LEAVES_A_CHILD, str(pid), end],
            dict(os.environ),
            tmp_path / "log",
            1.5,
            re.compile("shown"),
        )
    assert not runs(int(pid.read_text()))
    assert capsys.readouterr().out == "   shown: one\n"


@pytest.mark.parametrize(
    ("code", "match"),
    [
        ("print('no memory'); raise SystemExit(4)", "(?s)code 4.*no memory"),
        ("import time; time.sleep(60)", "not ready"),
    ],
    ids=["ends", "hangs"],
)
def test_a_service_that_does_not_start_says_why(tmp_path: Path, code: str, match: str) -> None:
    engine = Engine("vllm", "1", (), ("-c", code), "/health", {})
    start = time.monotonic()
    with pytest.raises(PartFailed, match=match), Service(engine, tmp_path / "log", 1.0):
        pass
    assert time.monotonic() - start < 10.0


FAKE_VLLM = """
import random, time
__version__ = "9.9"

class SamplingParams:
    def __init__(self, max_tokens, **_):
        self.max_tokens = max_tokens

class Output:
    def __init__(self, ids):
        self.outputs, self.token_ids = [self], ids

class LLM:
    def __init__(self, model, **_):
        print("a warning of vLLM")

    def generate(self, inputs, params, use_tqdm):
        time.sleep(1e-4 * params.max_tokens)
        return [Output([len(own["prompt_token_ids"])] * params.max_tokens) for own in inputs]
"""
FAKE_SERVICE = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        found = {"/health": "", "/v1/models": json.dumps({"data": [{"id": "m"}]})}.get(self.path)
        self.send_response(404 if found is None else 200)
        self.end_headers()
        self.wfile.write((found or "").encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number, length = body["max_tokens"], len(body["prompt"])
        self.send_response(200)
        self.end_headers()
        for i in range(number):
            reason = "length" if i == number - 1 else None
            self.send({"choices": [{"text": "a", "finish_reason": reason}]})
        self.send({"choices": [], "usage": {"prompt_tokens": length, "completion_tokens": number}})

    def send(self, event):
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")

    def log_message(self, *_):
        pass

class Server(ThreadingHTTPServer):
    request_queue_size = 128

assert sys.argv[1] == "serve", sys.argv
Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.slow
def test_a_whole_run_measures_an_engine_and_joins_earlier_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "vllm" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (tmp_path / "vllm" / "vllm" / "__init__.py").write_text(FAKE_VLLM)
    (package / "main.py").write_text(FAKE_SERVICE)
    (tmp_path / "vllm" / "vllm-9.9.dist-info").mkdir()
    (tmp_path / "vllm" / "vllm-9.9.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 9.9\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 1000, "model_type": "llama"}')
    earlier = tmp_path / "earlier.json"
    own = offline("lightkv")
    own["batches"]["1"]["first_tokens"] = [512]
    earlier.write_text(json.dumps(document(own, http("lightkv"))))
    here = {"device": "NVIDIA H200", "versions": {"torch": "2.11"}}
    monkeypatch.setattr(compare, "read_machine", lambda engine: here)
    monkeypatch.setattr(compare.signal, "signal", lambda *_: None)
    monkeypatch.setattr(compare, "BATCHES", (1, 2))
    monkeypatch.setattr(compare, "PROMPTS", (512,))
    monkeypatch.setattr(compare, "CLIENTS", (1, 32))
    monkeypatch.setattr(compare, "FULL", compare.Amount(2, (3, 40)))
    monkeypatch.setattr(compare, "OUTPUT", 6)
    out, logs = tmp_path / "out.json", tmp_path / "logs"
    argv = ["--site", tmp_path, "--model", tmp_path / "model", "--logs", logs, "--only", "vllm"]
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, argv), "--with", str(earlier), "--out", str(out)])
    compare.main()
    written = json.loads(out.read_text())
    assert written["versions"] == {"torch": "2.11", "vllm": "9.9", "lightkv": "lightkv-1"}
    results = written["results"]
    assert results["failures"] == {}
    assert results["same_first_tokens"] == {"1": 1.0}
    assert [(own["engine"], own["kind"]) for own in results["measurements"]] == [
        ("lightkv", "offline"), ("lightkv", "http"), ("vllm", "offline"), ("vllm", "http"),
    ]  # fmt: skip
    found = {row["name"]: row for row in results["rows"]}
    assert len(found["decode step, batch 1"]["vllm"]["values"]) == 2
    assert found["decode step, batch 1"]["vllm"]["median"] == pytest.approx(0.1, rel=0.5)
    assert found["decode step, batch 1"]["lightkv_over_vllm"] > 1
    assert len(found["first token, prompt 512"]["vllm"]["values"]) == 5
    assert found["HTTP, 32 clients: tokens/s"]["vllm"]["median"] > 0
    loads = results["measurements"][-1]["loads"]
    assert [(own["requests"], own["prompt_tokens"]) for own in loads.values()] == [
        (3, 3 * 512),
        (40, 40 * 512),
    ]
    assert all(own["output_tokens"] == own["requests"] * 6 for own in loads.values())
    printed = capsys.readouterr().out
    assert "service ready in" in printed
    assert "32 clients: 40 requests" in printed
    assert "vllm 9.9" in printed
    assert "a warning of vLLM" in (logs / "vllm-offline.log").read_text()


def test_a_part_that_fails_leaves_the_figures_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        yield {"start_seconds": 1.0, "batches": {}, "first_token_ms": {}}
        raise PartFailed("out of memory")

    def serve(*_: object) -> Any:
        yield {"start_seconds": 2.0, "loads": {}}

    monkeypatch.setattr(compare, "measure_offline", fail)
    monkeypatch.setattr(compare, "measure_http", serve)
    out = tmp_path / "out.json"
    engine = make_vllm(tmp_path, tmp_path, tmp_path)
    made = compare.Document("llama-3-8b", {"device": "NVIDIA H200", "versions": {}}, [], out)
    place = compare.Workplace(tmp_path, "llama-3-8b", tmp_path, tmp_path)
    compare.measure(engine, engine, compare.arguments([]), place, made)
    results = json.loads(out.read_text())["results"]
    assert [own["start_seconds"] for own in results["measurements"]] == [1.0, 2.0]
    assert results["failures"] == {"vllm, offline": "out of memory"}


def test_cells_that_were_measured_before_a_failure_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def fail(command: list[str], *_: object) -> None:
        commands.append(command)
        results = {name: lifelike("vllm")[name] for name in ("cells", "load", "saturation")}
        Path(command[command.index("--out") + 1]).write_text(json.dumps({"results": results}))
        raise PartFailed("not done within 60 s")

    monkeypatch.setattr(compare, "run_child", fail)
    (tmp_path / "config.json").write_text('{"vocab_size": 1000}')
    serve = ("-m", "http.server", "--bind", "127.0.0.1")
    monkeypatch.setattr(compare.Service, "_is_ready", lambda service: True)
    engine = Engine("vllm", "1", (), serve, "/", {})
    options = compare.arguments(["--lifelike", "poisson-0.6", "--traces", str(tmp_path), "--seconds", "40"])
    place = compare.Workplace(tmp_path, "llama-3-8b", tmp_path, tmp_path)
    parts = compare.measure_lifelike(engine, engine, place, options, 17.5)
    assert set(next(parts)["cells"]) == {"bursty-0.6", "sessions-0.6"}
    with pytest.raises(PartFailed, match="60 s"):
        next(parts)
    (command,) = commands
    for option, value in (("--cells", "poisson-0.6"), ("--seconds", "40.0"), ("--saturation", "17.5")):
        assert command[command.index(option) + 1] == value


@pytest.mark.parametrize("state", ["warm", "cold"])
def test_the_page_cache_is_set_without_changing_the_weights(tmp_path: Path, state: str) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(os.urandom(2**20))
    before = weights.read_bytes()
    compare.set_page_cache(tmp_path, state)
    assert weights.read_bytes() == before
