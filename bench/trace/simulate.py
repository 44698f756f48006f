"""Compares simulations: empty slots in pages, memory used by admission policy, and goodput under load.

    python -m bench.trace.simulate --traces DIRECTORY --out bench/results/simulate.json

It prints three tables. Each row is one simulation, which `lightkv simulate` can also run by itself:

    waste     share of the slots in a request's pages that are empty, for pages of 16 to 256 policies  share
    of the memory used, and preemptions per request, by admission; all requests wait at the start goodput
    requests per second that meet both targets, by admission, at 0.7, 1.0 and 1.3 of saturation. The
              last row is an oracle that orders requests as "timely" does: it separates the effect of the
              estimate from that of the order

Without --traces, generated workloads with the lengths of the published traces are used. Among the policies
`sum` is the floor and `oracle` the ceiling.
"""

import argparse
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.report import parser, print_json, print_machine, print_table, save_json
from lightkv.router.engine.admission import make_admission
from lightkv.router.simulate.config import PAGE_SIZES, SIMULATED_ADMISSIONS, SimulationConfig
from lightkv.router.simulate.result import Figures
from lightkv.router.simulate.simulator import saturation, simulate
from lightkv.router.simulate.trace_files import BLOCK, Reading
from lightkv.router.simulate.traces import open_trace

FILES = {
    "azure-conv": "AzureLLMInferenceTrace_conv.csv",
    "azure-code": "AzureLLMInferenceTrace_code.csv",
    "sharegpt": "sharegpt_8k_filtered_stats_llama2_tokenizer.csv",
    "mooncake": "mooncake_conversation_trace.jsonl",
}
LOADS = (0.7, 1.0, 1.3)
POLICY_WORKLOADS = ("decode-heavy", "prefill-heavy", "chat")
GOODPUT_TRACES = ("azure-conv", "sharegpt")
PATIENT_ORACLE = "oracle, timely's order"
# The figures in docs/ are of steps of 2,048 prompt tokens, without a target for the time between tokens.
FULL_STEPS = SimulationConfig(prefill_chunk=2048, itl_target=0.0)


def trace_of(name: str, directory: Path | None) -> str:
    """Returns the path of the published trace, or the name of the workload with its lengths."""
    return name if directory is None else str(directory / FILES[name])


def waste(name: str, directory: Path | None, requests: int | None) -> list[float]:
    """Returns the share of empty slots in the pages of a request while it decodes, for each page size."""
    reading = Reading("ms" if name == "mooncake" and directory is not None else None, BLOCK)
    trace = open_trace(trace_of(name, directory), requests, reading=reading)
    outputs = ((one.prompt, min(one.output, FULL_STEPS.max_new)) for one in trace)
    lengths = np.concatenate([np.arange(prompt, prompt + output) for prompt, output in outputs])
    return [float((-lengths % page).sum() / (lengths + -lengths % page).sum()) for page in PAGE_SIZES]


def policies(name: str, requests: int, capacity: int) -> dict[str, Figures]:
    """Simulates each admission, with all requests waiting at the start."""
    config = replace(FULL_STEPS, capacity=capacity, rate=math.inf, requests=requests)
    return {
        admission: simulate(name, replace(config, admission=admission)).figures
        for admission in SIMULATED_ADMISSIONS
        if admission != "timely"  # it differs only in the order, and all wait equally long
    }


def goodput(
    trace: str,
    capacity: int,
    requests: int | None,
    load: float,
    saturated: float,
    admissions: Iterable[str] = SIMULATED_ADMISSIONS,
) -> dict[str, Figures]:
    """Simulates each admission at one load, and an oracle in the order of "timely"."""
    config = replace(FULL_STEPS, capacity=capacity, load=load, saturation=saturated, requests=requests)
    found = {
        admission: simulate(trace, replace(config, admission=admission)).figures for admission in admissions
    }
    patience = make_admission("timely", ttft_target=config.ttft_target).patience
    patient = replace(config, admission="oracle", patience=patience)
    return {**found, PATIENT_ORACLE: simulate(trace, patient).figures}


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--traces", type=Path, help=f"where these are: {', '.join(FILES.values())}")
    made.add_argument("--parts", nargs="+", default=["policies", "goodput", "waste"], metavar="PART",
                      choices=["policies", "goodput", "waste"])  # fmt: skip
    made.add_argument("--capacity", type=int, default=120_000)
    made.add_argument("--requests", type=int, default=None, help="of each trace (default: all of a file)")
    made.add_argument("--policy-requests", type=int, default=2000)
    made.add_argument("--goodput-admissions", nargs="+", default=list(SIMULATED_ADMISSIONS),
                      choices=SIMULATED_ADMISSIONS, metavar="NAME",
                      help="the oracle is always among them")  # fmt: skip
    return made.parse_args()


def main() -> None:
    options = arguments()
    print_machine()
    results: dict[str, Any] = {"settings": {
        "capacity": options.capacity, "requests": options.requests, "published": options.traces is not None,
        "policy_requests": options.policy_requests,
    }}  # fmt: skip

    def keep() -> None:
        save_json("simulate", results, options.out)

    if "policies" in options.parts:
        found = {name: policies(name, options.policy_requests, options.capacity) for name in POLICY_WORKLOADS}
        print("\nmemory used / preemptions a request, saturated")
        rows = []
        for admission in next(iter(found.values())):
            cells = [found[name][admission] for name in POLICY_WORKLOADS]
            shares = [f"{f.memory_used_share:.1%} / {f.num_preemptions / f.num_finished:.2%}" for f in cells]
            rows.append([admission, *shares])
        print_table(["admission", *POLICY_WORKLOADS], rows)
        results["policies"] = {
            name: {admission: vars(f) for admission, f in by.items()} for name, by in found.items()
        }
        keep()
    if "goodput" in options.parts:
        results["goodput"] = {}
        admissions = dict.fromkeys([*options.goodput_admissions, "oracle"])
        for name in GOODPUT_TRACES:
            trace = trace_of(name, options.traces)
            config = replace(FULL_STEPS, capacity=options.capacity, requests=options.requests)
            saturated = saturation(trace, config)
            results["goodput"][name] = {"saturation": saturated}
            for load in LOADS:
                by = goodput(trace, options.capacity, options.requests, load, saturated, admissions)
                results["goodput"][name][str(load)] = {admission: vars(f) for admission, f in by.items()}
                keep()
                print(f"\n{name} at {load} of saturation ({saturated:.2f} requests a second)")
                rows = [
                    [admission, f"{f.goodput:.2f}", f"{f.goodput / by['oracle'].goodput:.1%}",
                     f"{f.met_share:.1%}", f"{f.preempted_share:.2%}", f"{f.memory_used_share:.1%}",
                     f"{f.ttft_p50:.2f}", f"{f.ttft_p99:.1f}", f"{f.tpot_p99 * 1e3:.0f}"]
                    for admission, f in by.items()
                ]  # fmt: skip
                header = ["admission", "goodput", "of oracle's", "met", "preempted", "used", "TTFT p50 s",
                          "p99 s", "TPOT p99 ms"]  # fmt: skip
                print_table(header, rows)
    if "waste" in options.parts:
        print("\nempty slots in the pages of a request, mean of its decode life")
        results["waste"] = {name: waste(name, options.traces, options.requests) for name in FILES}
        print_table(
            ["trace", *map(str, PAGE_SIZES)],
            [[name, *(f"{share:.2%}" for share in shares)] for name, shares in results["waste"].items()],
        )
    print_json("simulate", results, options.out)


if __name__ == "__main__":
    main()
