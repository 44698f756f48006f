"""Replays a trace in real time through one engine, by token and by pages, beside simulations of the same.

    python -m bench.trace.trace_replay TRACE --llama-3-8b --transformers --out FILE
    python -m bench.trace.trace_replay TRACE --capacity 6144 --requests 64 --max-prompt 384 --max-output 64 \\
        --max-new 64 --out bench/results/serving-trace-cpu.json
    python -m bench.trace.trace_replay TRACE --again FILE --out FILE

Scheduler, ledger and runner are those of the service, but in this process and without HTTP (use
`bench.serving.load --arrivals trace` for the service itself). One step follows the other, as in the
simulator; the service instead queues the next step behind the one in flight. Requests arrive at the trace's
times, stretched to `--load` times the rate that the simulator's oracle serves. The model computes every
token. An answer ends at the length that the trace gives, which the scheduler does not know: it gets
--max-new.

The allocations differ only in the ledger (`router/simulate/paged_ledger.py`): by pages it counts the empty
slots of a page as held, so that fewer requests run at once. On the device both use single slots and the same
attention; `bench.kernels.attention` measures what a page table changes there. The device's free count is
compared with the ledger's after every step, and all memory is recounted after every replay.

The simulations run the same requests at the same times (`lightkv simulate`): once with the step-time model
that comes with lightkv (on a GPU, or with --step-time), and once with a model fitted here to the steps of
other requests of the trace, which are replayed first. `ratio` is simulated over measured. --again repeats the
simulations with the first model for a file of measured results, with today's simulator and model (or
--step-time), to see the effect of a change. With --transformers, transformers' continuous batching runs the
same requests at the same times and at the first load; it is given the length of each answer.

Goodput counts the requests per second, over the whole run, that got their first token within --ttft-target
and the others within --tpot-target in the mean.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.common.child import ChildFailed
from bench.common.model_shapes import LLAMA_3_8B, with_layers
from bench.common.random_model import random_model
from bench.common.report import (
    engine_help,
    machine,
    parser,
    print_again,
    print_json,
    print_machine,
    print_table,
    read_json,
    refuse,
    save_json,
)
from bench.serving.stats import Targets
from bench.serving.workload import Replayed
from bench.trace.trace_machine import Machine
from bench.trace.transformers_trace import replay_transformers
from lightkv.errors import LightKVError
from lightkv.router import EngineConfig
from lightkv.router.engine.step import RunnerInfo
from lightkv.router.engine.step_time import LEAST_STEPS, StepTime, fit
from lightkv.router.model.build import assemble, build_runner
from lightkv.router.model.runner import ModelRunner
from lightkv.router.simulate.config import ALLOCATIONS, SIMULATED_ADMISSIONS, SimulationConfig
from lightkv.router.simulate.result import Figures
from lightkv.router.simulate.simulator import saturation, simulate
from lightkv.router.simulate.trace_files import IN_MILLISECONDS
from lightkv.router.simulate.traces import open_trace

Results = dict[str, Any]

WARM_UP = 24  # requests before those that the step-time model is fitted to
SATURATION_REQUESTS = 2000
COMPARED = (
    "output_rate", "goodput", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "mean_running", "seconds",
)  # fmt: skip


# --------------------------------------------------------------------------------
# Simulations


def simulated(trace: Replayed, config: SimulationConfig, step_time: StepTime) -> Figures:
    """Simulates the same requests at the same times."""
    with tempfile.TemporaryDirectory() as directory:
        return simulate(_write(trace, step_time, Path(directory)), _with_model(config, directory)).figures


def saturation_of(trace: Replayed, config: SimulationConfig, step_time: StepTime) -> float:
    """Simulates the requests per second that an oracle serves, with the trace repeated."""
    config = replace(config, requests=SATURATION_REQUESTS)
    with tempfile.TemporaryDirectory() as directory:
        return saturation(_write(trace, step_time, Path(directory)), _with_model(config, directory))


def _write(trace: Replayed, step_time: StepTime, directory: Path) -> str:
    (directory / "step_time.json").write_text(json.dumps(step_time.as_dict()))
    path = directory / "trace.jsonl"
    trace.write(path)
    return str(path)


def _with_model(config: SimulationConfig, directory: str) -> SimulationConfig:
    return replace(config, step_time=str(Path(directory) / "step_time.json"))


def compared(measured: Results, figures: Figures) -> Results:
    """Returns the simulated figures and their ratios to the measured ones."""
    own = vars(figures)
    ratio = {name: own[name] / measured[name] if measured[name] else None for name in COMPARED}
    return {"figures": {name: own[name] for name in measured}, "ratio": ratio}


# --------------------------------------------------------------------------------
# The command line


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("trace", help="a file (Azure, ShareGPT, Mooncake), or a workload's name")
    made.add_argument("--model", default=EngineConfig.model, help=engine_help("model"))
    made.add_argument(
        "--llama-3-8b", action="store_true", help="a model of its shape, random weights, instead"
    )
    made.add_argument("--layers", type=int, default=LLAMA_3_8B.num_hidden_layers, help="of that shape")
    made.add_argument("--device", default="auto", help=engine_help("device"))
    made.add_argument("--requests", type=int, default=256, help="of the trace, from its first")
    made.add_argument("--load", type=float, nargs="+", default=[0.7, 1.3], help="times the oracle's rate")
    made.add_argument("--allocation", nargs="+", default=["token", "paged:16", "paged:256"], metavar="NAME",
                      choices=ALLOCATIONS, help=", ".join(ALLOCATIONS))  # fmt: skip
    made.add_argument("--admission", default="quantile", choices=SIMULATED_ADMISSIONS)
    made.add_argument("--capacity", type=int, default=120_000, help="tokens of the pool")
    made.add_argument("--max-num-seqs", type=int, default=None, help=engine_help("max_num_seqs"))
    made.add_argument("--max-model-len", type=int, default=None, help=engine_help("max_model_len"))
    made.add_argument("--prefill-chunk", type=int, default=None, help=engine_help("prefill_chunk"))
    made.add_argument("--max-new", type=int, default=1024, help="max_tokens of every request")
    made.add_argument("--max-prompt", type=int, help="scale the prompts: the longest has so many tokens")
    made.add_argument("--max-output", type=int, help="scale the answers likewise")
    made.add_argument("--ttft-target", type=float, default=10.0)
    made.add_argument("--tpot-target", type=float, default=0.1)
    made.add_argument(
        "--itl-target", type=float, default=0.0, help="seconds of a step; 0 cuts no chunk by time"
    )
    made.add_argument("--step-time", default=None, help="as lightkv simulate has it")
    made.add_argument("--fit-requests", type=int, default=96, help="requests that the model is fitted to")
    made.add_argument("--seconds", type=float, default=1e9, help="begin no replay after this time")
    made.add_argument("--transformers", action="store_true", help="its continuous batching as well")
    made.add_argument(
        "--way", default="sdpa-128", help="of transformers (bench/serving/continuous_batching.py)"
    )
    made.add_argument(
        "--way-seconds", type=float, default=60.0, help="time of its replay; unfinished requests are cut"
    )
    made.add_argument("--again", type=Path, help="measure nothing: simulate this file's replays anew, by its "
                      "options and --step-time")  # fmt: skip
    made.add_argument("--seed", type=int, default=0)
    return made.parse_args()


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Raises InvalidConfig."""
    return EngineConfig(
        model=options.model,
        device=options.device,
        max_total_tokens=options.capacity,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        prefill_chunk=options.prefill_chunk,
        itl_target=options.itl_target,
    )


def build(options: argparse.Namespace) -> tuple[ModelRunner, RunnerInfo]:
    """Builds the runner: the model and its memory."""
    config = engine_config(options)

    def report(line: str) -> None:
        if "capturing" not in line:
            print(line, flush=True)

    if not options.llama_3_8b:
        return build_runner(config, report)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return assemble(random_model(with_layers(LLAMA_3_8B, options.layers), device, dtype), config, report)


def traces_of(options: argparse.Namespace, engine: Results) -> tuple[Replayed, Replayed, Replayed]:
    """Returns disjoint requests: to measure, to warm up, and to fit the step-time model to."""
    num = options.requests + WARM_UP + options.fit_requests
    longest = min(engine["max_model_len"], engine["capacity"] // 256 * 256)
    trace = open_trace(options.trace, 2 * num, reading=IN_MILLISECONDS)  # some may not fit
    own = Replayed.of(trace, options.max_prompt, options.max_output).fitting(longest, options.max_new)
    if len(own) < num:
        refuse(f"{own.name} has {len(own)} requests that fit, and {num} are wanted; give fewer --requests")
    ends = options.requests, options.requests + WARM_UP, num
    measured, warm_up, fitted = (
        Replayed(own.name, own.requests[start:end]) for start, end in zip((0, *ends), ends, strict=False)
    )
    return measured, warm_up.at_once(), fitted


def simulation_config(options: argparse.Namespace, engine: Results) -> SimulationConfig:
    """Returns the configuration of the simulations beside the replays of `engine`, by token."""
    return SimulationConfig(
        admission=options.admission,
        capacity=engine["capacity"],
        max_num_seqs=engine["max_num_seqs"],
        prefill_chunk=engine["prefill_chunk"],
        max_new=options.max_new,
        ttft_target=options.ttft_target,
        itl_target=options.itl_target,
        tpot_target=options.tpot_target,
        seed=options.seed,
    )


def fitted_model(
    place: Machine, trace: Replayed, to_fit: Replayed, config: SimulationConfig, load: float
) -> tuple[StepTime, float]:
    """Fits a step-time model to the steps of `to_fit`.

    The first half of the requests starts at once, which fills the steps. A first fit gives the rate at which an
    oracle serves `trace`, and the second half arrives at `load` times this rate. Returns the model, and the
    requests per second that an oracle serves of `trace` with it.
    """
    half = len(to_fit) // 2
    at_once, timed = (
        Replayed(trace.name, to_fit.requests[:half]),
        Replayed(trace.name, to_fit.requests[half:]),
    )
    place.replay(at_once.at_once(), "token", config.counted, config.seed + 2)
    points = place.points
    if len(points) < LEAST_STEPS:
        refuse(f"{half} requests took {len(points)} steps, too few for a model; give more --fit-requests")
    model = fit([point.work for point in points], [point.seconds for point in points])
    rate = load * saturation_of(trace, config, model)
    place.replay(timed.at_rate(rate, config.seed), "token", config.counted, config.seed + 3)
    points += place.points
    model = fit([point.work for point in points], [point.seconds for point in points])
    model = replace(model, source={**model.source, **machine()})
    return model, saturation_of(trace, config, model)


def run(options: argparse.Namespace, save: Callable[[Results], object]) -> Results:
    """Replays every load with every allocation. `save` gets the results after each replay."""
    begun = time.perf_counter()
    runner, info = build(options)
    limits, targets = info.limits, Targets(options.ttft_target, options.tpot_target)
    engine = {"architecture": info.architecture, "dtype": info.dtype, "capacity": info.capacity,
              "max_num_seqs": limits.max_num_seqs, "max_model_len": limits.max_model_len,
              "prefill_chunk": limits.prefill_chunk, "cuda_graphs": info.cuda_graphs, "depth": 1}  # fmt: skip
    trace, warm_up, to_fit = traces_of(options, engine)
    place = Machine(runner, info, options.max_new, targets)
    config = simulation_config(options, engine)
    place.replay(warm_up, "token", "reserved", options.seed + 1)
    model, saturated = fitted_model(place, trace, to_fit, config, options.load[0])
    models = {"fitted": model}
    if options.step_time is not None or info.device != "cpu":
        models["given"] = StepTime.parse(options.step_time or "")
    results: Results = {
        "engine": engine,
        "step_times": {name: own.as_dict() for name, own in models.items()},
        "saturation": saturated,
        "loads": {},
    }
    error = model.source["median_relative_error"]
    print(
        f"ready after {time.perf_counter() - begun:.0f} s; an oracle serves {saturated:.3f} requests a second"
    )
    print(f"the fitted model's median error is {error:.1%}", flush=True)
    save(results)
    for load in options.load:
        timed = trace.at_rate(load * saturated, options.seed)
        by: Results = {}
        results["loads"][f"{load:g}"] = {"rate": load * saturated, "allocations": by}
        for allocation in options.allocation:
            if time.perf_counter() - begun > options.seconds:
                print(f"--seconds are over: {allocation} at {load:g} is left out", flush=True)
                continue
            measured = place.replay(timed, allocation, options.admission, options.seed)
            same = replace(config, allocation=allocation)
            by[allocation] = {
                "measured": measured,
                "simulated": {
                    name: compared(measured, simulated(timed, same, own)) for name, own in models.items()
                },
            }
            show_row(load, allocation, by[allocation])
            save(results)
    if options.transformers:
        timed = trace.at_rate(options.load[0] * saturated, options.seed)
        asked = {
            "model": None if options.llama_3_8b else options.model,
            "layers": options.layers,
            "device": "cuda" if info.cuda_graphs else "cpu",
            "way": options.way,
            "capacity": info.capacity,
            "prompts": [ids.tolist() for ids in timed.prompts(limits.vocab_size, options.seed)],
            "outputs": [request.output for request in timed],
            "arrivals": [request.arrival for request in timed],
            "targets": targets,
            "seconds": options.way_seconds,
        }
        try:
            results["transformers"] = replay_transformers(asked)
        except ChildFailed as error:
            results["transformers"] = {"error": str(error)}
        save(results)
    return results


def simulate_again(results: Results, trace_path: str, given: str | None) -> None:
    """Replaces the simulations with the model "given" in stored results. Exits for another trace,
    and if no model is given."""
    settings = results["settings"]
    if Path(trace_path).name != settings["trace"]:
        refuse(f"{trace_path} is not what was replayed; give {settings['trace']}")
    if given is None and "given" not in results["step_times"]:
        refuse("this was measured without a given model; give a --step-time")
    step_time = StepTime.parse(given or settings["step_time"] or "")
    if given is not None:
        settings["step_time"] = named(given)
    options = argparse.Namespace(**{"itl_target": 0.0, **settings, "trace": trace_path})
    trace, _, _ = traces_of(options, results["engine"])
    config = simulation_config(options, results["engine"])
    results["step_times"]["given"] = step_time.as_dict()
    for own in results["loads"].values():
        timed = trace.at_rate(own["rate"], options.seed)
        for allocation, found in own["allocations"].items():
            figures = simulated(timed, replace(config, allocation=allocation), step_time)
            if figures.output_tokens != found["measured"]["output_tokens"]:
                tokens = found["measured"]["output_tokens"]
                refuse(f"{trace_path} has {figures.output_tokens} output tokens, and {tokens} were measured")
            found["simulated"]["given"] = compared(found["measured"], figures)


def named(setting: str) -> str:
    """Returns a setting as it is stored in results: a file by its name, without its folder."""
    return Path(setting).name if Path(setting).exists() else setting


def show_row(load: float, allocation: str, found: Results) -> None:
    """Prints the line of one replay."""
    own = found["measured"]
    text = ", ".join(f"{name} {own[name]:.4g}" for name in ("output_rate", "ttft_p99", "tpot_p99"))
    print(f"load {load:g}, {allocation}: {own['seconds']:.1f} s, {text}", flush=True)


def show(results: Results) -> None:
    """Prints the tables."""
    rows, ratios = [], []
    for load, own in results["loads"].items():
        for allocation, found in own["allocations"].items():
            rows.append([f"{load}, {allocation}", *_cells(found["measured"])])
            for name, simulated_ in found["simulated"].items():
                cells = ["-" if r is None else f"{r:.3f}" for r in simulated_["ratio"].values()]
                ratios.append([f"{load}, {allocation}, {name}", *cells])
    peer = results.get("transformers")
    if peer is not None:
        first = next(iter(results["loads"]))
        rows.append([f"{first}, transformers", *(["-"] * 8 if "error" in peer else _cells(peer))])
        if peer.get("error"):
            print(f"transformers: {peer['error']}")
    header = [
        "load",
        "tokens/s",
        "goodput",
        "TTFT p50 s",
        "p99",
        "TPOT p50 ms",
        "p99",
        "running",
        "preemptions",
    ]
    print("\nmeasured")
    print_table(header, rows)
    print("\nsimulated over measured")
    print_table(["load", *COMPARED], ratios)


def _cells(own: Results) -> list[str]:
    return [
        f"{own['output_rate']:.1f}", f"{own['goodput']:.3f}",
        f"{own['ttft_p50']:.3f}", f"{own['ttft_p99']:.3f}",
        f"{own['tpot_p50'] * 1e3:.1f}", f"{own['tpot_p99'] * 1e3:.1f}",
        f"{own['mean_running']:.1f}" if "mean_running" in own else "-", str(own.get("num_preemptions", "-")),
    ]  # fmt: skip


def main() -> None:
    options = arguments()
    if options.again is not None:
        document = read_json("trace_replay", options.again)
        try:
            simulate_again(document["results"], options.trace, options.step_time)
        except (LightKVError, ValueError, OSError) as error:
            refuse(str(error))
        show(document["results"])
        print_again(document, options.out)
        return
    print_machine()
    hidden = {"out", "again"}
    settings = {name: value for name, value in vars(options).items() if name not in hidden}
    for name in ("trace", "model", "step_time"):
        settings[name] = named(settings[name]) if settings[name] else settings[name]
    try:
        results = run(
            options, lambda found: save_json("trace_replay", {"settings": settings, **found}, options.out)
        )
    except (LightKVError, ValueError, OSError) as error:
        refuse(str(error))
    show(results)
    print_json("trace_replay", {"settings": settings, **results}, options.out)
    if results.get("transformers", {}).get("error"):
        sys.exit(f"--transformers failed: {results['transformers']['error']}")


if __name__ == "__main__":
    main()
