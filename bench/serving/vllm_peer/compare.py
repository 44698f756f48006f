"""Runs vLLM and lightkv under the same load on one machine, and writes both to one file.

    FOLDER/run.sh --out results/vllm-peer-h200.json
    FOLDER/run.sh --only vllm --out /tmp/vllm.json
    FOLDER/run.sh --only lightkv --with /tmp/vllm.json --out results/vllm-peer-h200.json
    FOLDER/run.sh --skip-offline --skip-http --lifelike --traces TRACES --out results/lifelike-h200.json
    FOLDER/run.sh --shape qwen3-8b --out results/vllm-peer-qwen3-h200.json
    python -m bench.serving.vllm_peer.compare --only lightkv --set max_num_seqs=128

`run.sh` is in the folder that `assemble.sh` packs, and calls this module with the packages in place. Each
engine runs alone, with its own default settings: first in process (`peer_bench.py`), then as a service under
closed loops of 1, 32 and 256 clients (`bench.serving.load`). The model has the shape of a published one
(Llama-3-8B, unless --shape names another) and random weights, prompts are 512 random ids, answers are greedy
and have 128 tokens. With --lifelike each also serves the loads of `bench.serving.lifelike`, at shares of what
vLLM can serve. The result file is written after each part, so a run that is cut off keeps its figures.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bench.common.model_shapes import SHAPES
from bench.common.report import parser, refuse
from bench.serving.lifelike_cells import CELLS, CLOSED
from bench.serving.load_options import positive
from bench.serving.vllm_peer.peer_bench import parse_settings
from bench.serving.vllm_peer.processes import (
    Engine,
    PartFailed,
    Service,
    make_lightkv,
    make_vllm,
    run_child,
)
from bench.serving.vllm_peer.rows import (
    BATCHES,
    CLIENTS,
    ENGINES,
    HTTP,
    LIFELIKE,
    OFFLINE,
    PAUSES,
    PROMPTS,
    Results,
    compare,
    merge,
    print_rows,
    same_first_tokens,
)
from lightkv.errors import LightKVError

NAME = "vllm_peer"
CELL_NAMES = [*(cell.name for cell in CELLS), *CLOSED]
PROMPT, OUTPUT = 512, 128  # tokens
MAX_LENGTH = 16384  # of a sequence: room for the longest prompt and an answer
PART_SECONDS = 330.0  # that one engine may take in process, or under the load
START_SECONDS = 240.0  # that a service may take to start
READ_BYTES = 2**24
SHOWN_OFFLINE = re.compile(r"==|batch|prompt")
SHOWN_HTTP = re.compile(r"\d+ clients: \d+ requests")
SHOWN_LIFELIKE = re.compile(r"saturation: |\S+: \d+ of \d+ answered")
LIFELIKE_START_SECONDS = 120.0  # to warm up, and to find the saturation
LIFELIKE_DRAIN_SECONDS = 45.0  # that a cell may take beyond --seconds


class Amount(NamedTuple):
    """How much is measured. `rounds`: in process, of each batch size. `requests`: of the loads of CLIENTS.
    `num_shared`: prompts that begin alike. `traced`: batches whose steps are traced on the device."""

    rounds: int
    requests: tuple[int, ...]
    num_shared: int = 0
    traced: tuple[int, ...] = ()


FULL = Amount(3, (24, 128, 1024))  # four waves and more of each number of clients
QUICK = Amount(1, (8, 64, 512))


class Workplace(NamedTuple):
    """Where files go. `checkpoint`: the options of `bench.common.random_checkpoint`. `logs`: what the
    processes print. `work`: the results of single processes."""

    model: Path
    checkpoint: Sequence[str]
    logs: Path
    work: Path

    @property
    def vocab_size(self) -> int:
        size: int = json.loads((self.model / "config.json").read_text())["vocab_size"]
        return size


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line. Exits if options contradict each other."""
    default = Path(tempfile.gettempdir()) / "vllm_peer"
    made = parser(__doc__)
    made.add_argument("--site", type=Path, help="where run.sh unpacked vLLM; without it, vLLM is installed")
    made.add_argument("--model", type=Path, default=default / "model",
                      help="directory of the checkpoint, which is made if it does not exist")  # fmt: skip
    made.add_argument("--shape", choices=SHAPES, default="llama-3-8b", help="of the checkpoint that is made")
    made.add_argument("--format", help="of its weights, as bench.common.random_checkpoint takes it")
    made.add_argument("--layers", type=int, help="of it, if not all")
    made.add_argument("--logs", type=Path, default=default / "logs", help="directory for the engines' output")
    made.add_argument("--only", choices=[*ENGINES, "nothing"], help="measure one engine, or nothing")
    made.add_argument("--skip-offline", action="store_true", help="leave out the part in process")
    made.add_argument("--skip-http", action="store_true", help="leave out the part with services")
    made.add_argument("--device-time", type=int, nargs="*", choices=BATCHES, default=[], metavar="BATCH",
                      help="also trace steps of these batches on the device")  # fmt: skip
    made.add_argument("--lifelike", nargs="*", choices=CELL_NAMES, metavar="CELL",
                      help=f"also serve loads like life: all, or some of {', '.join(CELL_NAMES)}")  # fmt: skip
    made.add_argument("--traces", type=Path, help="for --lifelike: the folder with Azure's traces")
    made.add_argument("--seconds", type=positive, default=60.0, help="of each cell of --lifelike")
    made.add_argument("--saturation", type=positive,
                      help="requests/s, of which loads are shares; default: vLLM's, measured")  # fmt: skip
    made.add_argument("--quick", action="store_true", help="one round in process, and half as many requests")
    made.add_argument("--shared", type=int, default=0, metavar="N",
                      help="measure N prompts that begin alike in process, too")  # fmt: skip
    made.add_argument("--http-rounds", type=int, default=1, help="of the load on each service")
    made.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", action="extend",
                      help="settings of lightkv's EngineConfig, for both parts")  # fmt: skip
    made.add_argument("--page-cache", choices=["warm", "cold"], default="warm",
                      help="whether the weights are in the system's memory when an engine starts")  # fmt: skip
    made.add_argument("--with", nargs="+", type=Path, default=[], dest="earlier", metavar="FILE",
                      help="results of earlier calls on this machine, to be added to this one's")  # fmt: skip
    options = made.parse_args(argv)
    if options.only == "nothing" and not options.earlier:
        made.error("--only nothing joins earlier results; give them with --with")
    if options.lifelike is not None and not (options.traces and options.traces.is_dir()):
        made.error("--lifelike takes the folder of the traces; give --traces")
    nothing = options.skip_offline and options.skip_http and options.lifelike is None
    if nothing and options.only != "nothing":
        made.error("--skip-offline and --skip-http leave nothing to measure")
    if options.http_rounds < 1:
        made.error(f"--http-rounds is {options.http_rounds}; give at least 1")
    if bad := [pair for pair in options.set if not re.fullmatch(r"\w+=.*", pair)]:
        made.error(f"--set takes NAME=VALUE, not {', '.join(bad)}")
    return options


# --------------------------------------------------------------------------------
# The checkpoint


def make_model(engine: Engine, place: Workplace) -> None:
    """Writes the checkpoint, unless it is there. Raises PartFailed."""
    if (place.model / "config.json").exists():
        made = json.loads((place.model / "config.json").read_text()).get("model_type")
        shape = place.checkpoint[1]
        if made != SHAPES[shape].model_type:
            raise PartFailed(
                f"{place.model} has a model of type {made}, but --shape is {shape}; give another --model"
            )
        return
    partial = place.model.with_name(place.model.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    print(f"writing the checkpoint to {place.model}", flush=True)
    command = ["-m", "bench.common.random_checkpoint", str(partial), *place.checkpoint,
               "--max-length", str(MAX_LENGTH)]  # fmt: skip
    run_child(command, engine.environment, place.logs / "model.log", PART_SECONDS, re.compile("/"))
    partial.rename(place.model)


def set_page_cache(model: Path, state: str) -> None:
    """Brings the checkpoint's weights into the operating system's page cache, or drops them from it."""
    files = sorted(model.glob("*.safetensors"))
    if state == "cold":
        for path in files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return

    def read(path: Path) -> None:
        buffer = bytearray(READ_BYTES)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    with ThreadPoolExecutor() as threads:
        list(threads.map(read, files))


# --------------------------------------------------------------------------------
# The parts


def measure_offline(engine: Engine, place: Workplace, amount: Amount, settings: Results) -> Iterator[Results]:
    """Yields the figures in process. Raises PartFailed, after it has yielded those that there are."""
    out = place.work / f"{engine.name}-offline.json"
    script = Path(__file__).with_name("peer_bench.py")
    command = [str(script), engine.name, str(place.model), "--out", str(out), "--rounds", str(amount.rounds),
               "--vocab-size", str(place.vocab_size), "--prompt", str(PROMPT),
               "--batches", *map(str, BATCHES), "--first-token", *map(str, PROMPTS),
               "--shared", str(amount.num_shared), "--device-time", *map(str, amount.traced),
               "--pauses", *map(str, PAUSES),
               "--set", *(f"{name}={value!r}" for name, value in settings.items())]  # fmt: skip
    log = place.logs / f"{engine.name}-offline.log"
    log.unlink(missing_ok=True)
    failure = None
    try:
        run_child(command, engine.environment, log, PART_SECONDS, SHOWN_OFFLINE)
    except PartFailed as error:
        failure = error
    if out.exists():
        found = json.loads(out.read_text())
        names = ("start_seconds", "batches", "first_token_ms", "device", "shared_s", "unshared_s")
        yield {name: found[name] for name in names if name in found}
    if failure is not None:
        raise failure


def measure_http(
    engine: Engine, client: Engine, place: Workplace, amount: Amount, rounds: int
) -> Iterator[Results]:
    """Yields the figures of each round of the load on the engine's service. Raises PartFailed.

    `client`: the engine whose packages the load client needs. Each round has other prompts, so that none is
    found in a prefix cache.
    """
    service_log, log = (place.logs / f"{engine.name}-{name}.log" for name in ("service", "load"))
    log.unlink(missing_ok=True)
    with Service(engine, service_log, START_SECONDS) as service:
        print(f"   service ready in {service.start_seconds:.1f} s", flush=True)
        for round_idx in range(rounds):
            out = place.work / f"{engine.name}-http-{round_idx}.json"
            command = ["-m", "bench.serving.load", "--url", service.url, "--out", str(out),
                       "--concurrency", *map(str, CLIENTS), "--requests", *map(str, amount.requests),
                       "--prompt", str(PROMPT), "--output", str(OUTPUT), "--seed", str(round_idx),
                       "--vocab-size", str(place.vocab_size)]  # fmt: skip
            run_child(command, client.environment, log, PART_SECONDS, SHOWN_HTTP)
            found: Results = {"loads": json.loads(out.read_text())["results"]["loads"]}
            if not round_idx:
                found["start_seconds"] = service.start_seconds
            yield found


def measure_lifelike(
    engine: Engine, client: Engine, place: Workplace, options: argparse.Namespace, saturation: float | None
) -> Iterator[Results]:
    """Yields the figures of the loads like life. Raises PartFailed, after it has yielded those that there are.

    `saturation`: requests/s, of which the loads are shares; None: the engine's own.
    """
    service_log, log = (place.logs / f"{engine.name}-{name}.log" for name in ("lifelike-service", "lifelike"))
    log.unlink(missing_ok=True)
    out = place.logs / f"{engine.name}-lifelike.json"
    out.unlink(missing_ok=True)
    cells = options.lifelike or CELL_NAMES
    command = ["-m", "bench.serving.lifelike", "--out", str(out), "--traces", str(options.traces.resolve()),
               "--vocab-size", str(place.vocab_size), "--max-length", str(MAX_LENGTH), "--cells", *cells,
               "--seconds", str(options.seconds), "--drain", str(LIFELIKE_DRAIN_SECONDS)]  # fmt: skip
    if options.saturation is None:
        command.append("--measure-saturation")
    if saturation is not None:
        command += ["--saturation", str(saturation)]
    limit = LIFELIKE_START_SECONDS + len(cells) * (options.seconds + LIFELIKE_DRAIN_SECONDS)
    failure = None
    with Service(engine, service_log, START_SECONDS) as service:
        print(f"   service ready in {service.start_seconds:.1f} s", flush=True)
        try:
            run_child([*command, "--url", service.url], client.environment, log, limit, SHOWN_LIFELIKE)
        except (PartFailed, KeyboardInterrupt) as error:
            failure = error
    if out.exists():
        yield json.loads(out.read_text())["results"] | {"start_seconds": service.start_seconds}
    if failure is not None:
        raise failure


class Document:
    """The result file. `model`: what runs. `failures`: the parts that have no figures, or not all."""

    def __init__(self, model: str, machine: Results, earlier: Sequence[Results], out: Path | None) -> None:
        self._settings = {"model": model, "prompt": PROMPT, "output": OUTPUT}
        self._machine = machine
        self._out = out
        self.measurements = merge(
            [*earlier, {**machine, "results": {"settings": self._settings, "measurements": []}}]
        )
        self.failures: dict[str, str] = {}

    def add(self, measurement: Results) -> None:
        """Adds a measurement, and writes the file."""
        self.measurements.append(measurement)
        self.save()

    @property
    def saturation(self) -> float | None:
        """What vLLM can serve of the conversation trace in requests/s; None if it was not measured."""
        found = [own for own in self.measurements if (own["engine"], own["kind"]) == ("vllm", LIFELIKE)]
        return found[0]["load"]["saturation"] if found else None

    def made(self) -> Results:
        rows = compare(self.measurements)
        versions = {own["engine"]: own["version"] for own in self.measurements}
        results = {
            "settings": self._settings,
            "rows": rows,
            "same_first_tokens": same_first_tokens(self.measurements),
            "failures": self.failures,
            "measurements": self.measurements,
        }
        made = {"benchmark": NAME, **self._machine, "results": results}
        return made | {"versions": self._machine["versions"] | versions}

    def save(self) -> None:
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(json.dumps(self.made(), indent=1) + "\n")


def measure(
    engine: Engine, lightkv: Engine, options: argparse.Namespace, place: Workplace, document: Document
) -> None:
    """Measures an engine in process and as a service. If a part fails, the others still run."""
    settings = parse_settings(options.set) if engine is lightkv else {}
    amount = (QUICK if options.quick else FULL)._replace(
        num_shared=options.shared, traced=tuple(options.device_time)
    )
    parts: dict[str, Iterator[Results]] = {}
    if not options.skip_offline:
        parts[OFFLINE] = measure_offline(engine, place, amount, settings)
    if not options.skip_http:
        parts[HTTP] = measure_http(engine, lightkv, place, amount, options.http_rounds)
    if options.lifelike is not None:
        saturation = options.saturation or document.saturation
        parts[LIFELIKE] = measure_lifelike(engine, lightkv, place, options, saturation)
    for kind, part in parts.items():
        print(f"{engine.name} {engine.version}, {kind}", flush=True)
        set_page_cache(place.model, options.page_cache)
        facts = {
            "engine": engine.name,
            "version": engine.version,
            "kind": kind,
            "settings": settings,
            "quick": options.quick,
            "page_cache": options.page_cache,
            "compile_cache": engine.compile_cache,
            "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        start = time.perf_counter()
        try:
            for found in part:
                document.add(facts | found)
        except PartFailed as error:
            document.failures[f"{engine.name}, {kind}"] = str(error)
            document.save()
            print(f"   failed: {error}", flush=True)
        print(f"   took {time.perf_counter() - start:.0f} s", flush=True)


def read_machine(engine: Engine) -> Results:
    """Returns the device and the versions, as a process of its own sees them, which then leaves the GPU."""
    code = "import json; from bench.common.report import machine; print(json.dumps(machine()))"
    said = subprocess.run(
        [sys.executable, "-c", code], env=engine.environment, capture_output=True, text=True, check=True
    )
    found: Results = json.loads(said.stdout.splitlines()[-1])
    found["versions"].pop("lightkv")  # its commit is told instead
    return found


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the engines stop with this process
    settings = parse_settings(options.set)
    options.logs.mkdir(parents=True, exist_ok=True)
    earlier = [json.loads(path.read_text()) for path in options.earlier]
    caches = (options.site or options.logs).resolve()
    model = options.model.resolve()
    try:
        lightkv = make_lightkv(options.site, caches, model, settings)
    except (LightKVError, TypeError) as error:
        refuse(f"--set: {error}")
    engines = [make_vllm(options.site, caches, model), lightkv]
    machine = read_machine(lightkv) if options.only != "nothing" else {
        name: value for name, value in earlier[0].items() if name != "results"
    }  # fmt: skip
    checkpoint = ["--shape", options.shape]
    what = f"the shape of {options.shape}, random weights, {options.format or 'bfloat16'}"
    if options.format:
        checkpoint += ["--format", options.format]
    if options.layers:
        checkpoint += ["--layers", str(options.layers)]
        what += f", {options.layers} layers"
    document = Document(what, machine, earlier, options.out)
    chosen = [own for own in engines if options.only in (None, own.name)]
    with tempfile.TemporaryDirectory() as work:
        place = Workplace(model, checkpoint, options.logs.resolve(), Path(work))
        try:
            if chosen:
                make_model(lightkv, place)
            for engine in chosen:
                measure(engine, lightkv, options, place, document)
        except PartFailed as error:
            refuse(f"there is no checkpoint: {error}")
        except KeyboardInterrupt:
            document.failures["this run"] = "it was ended early"
    document.save()
    made = document.made()
    print_rows(made["results"]["rows"], document.measurements)
    if options.out is None:
        print(json.dumps(made))
    if document.failures:
        sys.exit("\n".join(f"{part} failed: {reason}" for part, reason in document.failures.items()))


if __name__ == "__main__":
    main()
