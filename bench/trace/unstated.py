"""Simulates requests that do not state max_tokens, and how long requests wait.

    python -m bench.trace.unstated --trace AzureLLMInferenceTrace_conv.csv --out bench/results/unstated.json

A table for each of several loads has tokens and goodput beside those of an oracle, which knows the length of
each answer, the share of requests that were preempted, and the longest wait for a first token. No, half or all
of the requests state --max-new. Also in the order of "timely", in which requests that have waited too long let
others go first.

It refuses to report if a request that states max_tokens was preempted.
"""

import argparse
from dataclasses import replace

from bench.common.report import parser, print_json, print_machine, print_table, refuse, save_json
from bench.trace.simulate import FULL_STEPS
from lightkv.router.engine.admission import make_admission
from lightkv.router.simulate.result import Figures
from lightkv.router.simulate.simulator import saturation, simulate

PATIENT = ", timely's order"
PATIENCE = make_admission("timely").patience
POLICIES = {
    "oracle": replace(FULL_STEPS, admission="oracle"),
    "none stated": replace(FULL_STEPS, admission="reserved", stated=0.0),
    "half stated": replace(FULL_STEPS, admission="reserved", stated=0.5),
    "all stated": replace(FULL_STEPS, admission="reserved", stated=1.0),
    "oracle" + PATIENT: replace(FULL_STEPS, admission="oracle", patience=PATIENCE),
    "none stated" + PATIENT: replace(FULL_STEPS, admission="reserved", stated=0.0, patience=PATIENCE),
}


def run(options: argparse.Namespace, load: float, saturated: float) -> dict[str, Figures]:
    """Simulates each policy at one load. Exits if a request that states max_tokens was preempted."""
    found = {}
    for name, policy in POLICIES.items():
        config = replace(
            policy,
            capacity=options.capacity,
            max_new=options.max_new,
            requests=options.requests,
            load=load,
            saturation=saturated,
        )
        found[name] = simulate(options.trace, config).figures
        if found[name].num_preempted_stated:
            refuse(f"{name}: {found[name].num_preempted_stated} requests with max_tokens were preempted")
    return found


HEADER = (
    "admission", "tokens/s", "of oracle's", "goodput", "of oracle's", "preempted", "used", "TTFT p50 s",
    "longest s",
)  # fmt: skip


def rows_of(found: dict[str, Figures]) -> list[list[str]]:
    """Returns the rows of a table, with each policy beside the oracle in the same order."""
    rows = []
    for name, f in found.items():
        oracle = found["oracle" + (PATIENT if name.endswith(PATIENT) else "")]
        rows.append(
            [name, f"{f.output_rate:,.0f}", f"{f.output_rate / oracle.output_rate:.1%}", f"{f.goodput:.2f}",
             f"{f.goodput / oracle.goodput:.1%}" if oracle.goodput else "-", f"{f.preempted_share:.2%}",
             f"{f.memory_used_share:.1%}", f"{f.ttft_p50:.2f}", f"{f.ttft_max:.0f}"]
        )  # fmt: skip
    return rows


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--trace", default="azure-conv", help="a file, or the name of a generated workload")
    made.add_argument("--loads", type=float, nargs="+", default=[0.7, 1.0, 1.3], metavar="LOAD")
    made.add_argument("--capacity", type=int, default=120_000)
    made.add_argument("--max-new", type=int, default=4096)
    made.add_argument("--requests", type=int, default=None, help="default: all of a file")
    return made.parse_args()


def main() -> None:
    options = arguments()
    print_machine()
    settings = {name: getattr(options, name) for name in ("capacity", "max_new", "requests")}
    config = replace(
        FULL_STEPS, capacity=options.capacity, max_new=options.max_new, requests=options.requests
    )
    saturated = saturation(options.trace, config)
    results: dict = {"settings": settings, "saturation": saturated, "unstated": {}}
    for load in options.loads:
        found = run(options, load, saturated)
        print(f"\n{load} of saturation ({saturated:.2f} requests a second)")
        print_table(HEADER, rows_of(found))
        results["unstated"][str(load)] = {name: vars(figures) for name, figures in found.items()}
        save_json("unstated", results, options.out)
    print_json("unstated", results, options.out)


if __name__ == "__main__":
    main()
