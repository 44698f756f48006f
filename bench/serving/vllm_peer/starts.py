"""Compares how long the services of vLLM and lightkv take to start, on one machine and in turns.

    python -m bench.serving.vllm_peer.starts --site FOLDER --model DIRECTORY --out bench/results/NAME.json

FOLDER is where run.sh unpacked vLLM, and DIRECTORY has a checkpoint. A start lasts from the beginning of the
process until the service answers that it is ready. In an engine's first start nothing is compiled, and in the
others everything is. Before that, the packages of each engine are imported once and the weights are read, so
that all files are in the system's page cache and all packages have bytecode. A ratio is lightkv's median over
vLLM's.
"""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.common.report import parser, print_json, print_machine, print_table, refuse
from bench.serving.vllm_peer.compare import START_SECONDS, set_page_cache
from bench.serving.vllm_peer.processes import Engine, PartFailed, Service, make_lightkv, make_vllm

IMPORTS = {
    "vllm": "import vllm.entrypoints.openai.api_server, vllm.v1.worker.gpu_worker",
    "lightkv": "import fastapi, lightkv.router.model.build",
}
STATES = ("empty", "filled")  # of what is compiled


def measure(engines: list[Engine], work: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds of the starts of each engine, by what was compiled. Raises PartFailed."""
    found: dict[str, dict[str, list[float]]] = {
        engine.name: {state: [] for state in STATES} for engine in engines
    }
    for round_idx in range(1 + rounds):
        for engine in engines:
            state = engine.compile_cache
            with Service(engine, work / f"{engine.name}-{round_idx}.log", START_SECONDS) as service:
                found[engine.name][state].append(service.start_seconds)
            print(f"{engine.name}, compiled code {state}: {service.start_seconds:.1f} s", flush=True)
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--site", type=Path, help="where run.sh unpacked vLLM; without it, it is installed"
    )
    arguments.add_argument("--model", type=Path, required=True)
    arguments.add_argument("--rounds", type=int, default=2, help="starts of each engine with all compiled")
    options = arguments.parse_args()

    print_machine()
    work = Path(tempfile.mkdtemp())
    engines = [
        make_vllm(options.site, work, options.model),
        make_lightkv(options.site, work, options.model, {}),
    ]
    for engine in engines:
        subprocess.run(
            [sys.executable, "-c", IMPORTS[engine.name]], env=engine.environment, cwd=work, check=True
        )
    set_page_cache(options.model, "warm")
    try:
        seconds = measure(engines, work, options.rounds)
    except PartFailed as error:
        refuse(str(error))
    rows, ratios = [], {}
    for state in STATES:
        vllm, lightkv = (statistics.median(seconds[engine.name][state]) for engine in engines)
        ratios[state] = lightkv / vllm
        rows.append([state, f"{lightkv:.1f}", f"{vllm:.1f}", f"{ratios[state]:.2f}"])
    print_table(["compiled code", "lightkv s", "vLLM s", "ratio"], rows)
    versions = {engine.name: engine.version for engine in engines}
    print_json("vllm_peer_starts", {"versions": versions, "seconds": seconds, "ratios": ratios}, options.out)


if __name__ == "__main__":
    main()
