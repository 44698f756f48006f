"""Prints the results of `load.py` as tables, and draws them with matplotlib."""

from pathlib import Path
from types import ModuleType
from typing import Any

from bench.common.report import Spread, print_table, save_figure

Results = dict[str, Any]

BUSY_CLIENT = 0.8  # of a core: above it the client itself may limit the throughput
PERCENTILES = ("p50", "p90", "p99")
PEERS = {"http": "the service", "in_process": "LLM.generate", "transformers": "transformers"}


def print_levels(levels: dict[str, Results]) -> None:
    """Prints throughput and latencies of each load."""

    def cell(figures: dict[str, float] | None) -> str:
        return "" if figures is None else f"{figures['p50']:.1f} / {figures['p99']:.1f}"

    rows = []
    for name, found in levels.items():
        latencies = [
            cell(found[f"{what}_ms"]) for what in ("ttft", "between_pieces", "per_token", "end_to_end")
        ]
        router = f"{found['router_us_per_step']:.0f}" if "router_us_per_step" in found else ""
        throughput = [f"{found['output_tokens_per_s']:,.1f}", f"{found['requests_per_s']:.2f}"]
        throughput.append(f"{found['goodput_per_s']:.2f}" if "goodput_per_s" in found else "")
        rows.append([name, *throughput, *latencies, f"{found['tokens_per_piece']:.2f}", router])
    print("\nmilliseconds as p50 / p99")
    print_table(
        ["load", "tokens/s", "requests/s", "in time", "TTFT", "between pieces", "a token", "end to end",
         "tokens a piece", "router µs a step"], rows
    )  # fmt: skip
    for name, found in levels.items():
        if found.get("between_pieces_beside_prefill_ms"):
            alone, beside = (found[f"between_pieces_{how}_ms"] for how in ("alone", "beside_prefill"))
            print(
                f"{name}: between pieces {cell(beside)} beside another request's prefill "
                f"({found['share_beside_prefill']:.0%} of them), else {cell(alone) or 'none'}"
            )
        cores = ", ".join(f"{role} {used:.2f}" for role, used in found["cores"].items())
        line = f"{name}: cores used: {cores}"
        if "host_core_at_100_tokens_per_s" in found:
            share = found["host_core_at_100_tokens_per_s"]
            line += f"; router and API at 100 tokens/s: {share:.1%} of a core"
        if found["cores"]["client"] > BUSY_CLIENT:
            line += "; THE CLIENT ITSELF IS BUSY and may limit these figures"
        print(line)


def print_steps(steps: dict[int, Results]) -> None:
    """Prints the steps in which all clients decode, beside the replay of their graph."""

    def cell(found: Results, key: str, form: str) -> str:
        figure = found.get(key)
        return (
            ""
            if figure is None
            else Spread(**figure).text(form)
            if isinstance(figure, dict)
            else f"{figure:{form}}"
        )

    columns = {"context": ".0f", "step_ms": ".3f", "median_step_ms": ".3f", "router_step_ms": ".3f",
               "replay_ms": ".3f", "ratio": ".3f", "ratio_of_median": ".3f"}  # fmt: skip
    rows = [
        [f"{num} clients", *(cell(found, key, form) for key, form in columns.items())]
        for num, found in steps.items()
    ]
    print("\na step in which all clients decode, milliseconds; median (lowest to highest) of rounds")
    header = [
        "load",
        "context",
        "step",
        "its median",
        "by the router",
        "replay",
        "step over replay",
        "its median over replay",
    ]
    print_table(header, rows)


def print_peers(peers: dict[int, Results]) -> None:
    """Prints tokens per second of the service and of its peers."""

    def cell(figures: dict[str, float] | None, form: str) -> str:
        return "" if figures is None else Spread(**figures).text(form)

    rows = []
    for num, found in peers.items():
        tokens = [
            cell(found.get(f"{side}_tokens_per_s"), ",.1f") for side in ("http", "in_process", "transformers")
        ]
        ratios = [cell(found.get(f"http_over_{side}"), ".2f") for side in ("in_process", "transformers")]
        rows.append([f"{num} at once", *tokens, *ratios])
    print("\ntokens a second, median (lowest to highest)")
    header = ["batch", "service", "LLM.generate", "transformers", "over LLM.generate", "over transformers"]
    print_table(header, rows)


def plot(pyplot: ModuleType, results: Results, path: Path) -> None:
    """Draws throughput (the peers' too) and latencies over the load into the file at `path`."""
    figure, axes = pyplot.subplots(1, 3, figsize=(16, 4.8), layout="constrained")
    levels = results["loads"].values()
    for is_open, style in ((False, "o-"), (True, "s--")):
        found = [level for level in levels if level["is_open"] == is_open]
        if not found:
            continue
        loop = "open loop, requests a second" if is_open else "closed loop, clients"
        at = [level["level"] for level in found]
        axes[0].plot(at, [level["output_tokens_per_s"] for level in found], style, label=loop)
        for axis, key in ((axes[1], "ttft_ms"), (axes[2], "between_pieces_ms")):
            for percentile in PERCENTILES:
                values = [(level[key] or {}).get(percentile, float("nan")) for level in found]
                axis.plot(at, values, style, label=f"{percentile}, {loop}")
        values = [(level.get("between_pieces_alone_ms") or {}).get("p99", float("nan")) for level in found]
        if any(value == value for value in values):
            axes[2].plot(at, values, style, alpha=0.5, label="p99 with no prefill beside")
    for side, name in PEERS.items():
        speeds = {
            int(num): found[f"{side}_tokens_per_s"]
            for num, found in results.get("at_once", {}).items()
            if f"{side}_tokens_per_s" in found
        }
        if speeds:
            medians = [speed["median"] for speed in speeds.values()]
            reach = [
                [abs(speed[end] - speed["median"]) for speed in speeds.values()] for end in ("low", "high")
            ]
            axes[0].errorbar(list(speeds), medians, reach, fmt="^:", capsize=3, label=f"{name}, all at once")
    titles = ("output tokens a second", "TTFT, ms", "between two pieces of an answer, ms")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="load")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    save_figure(pyplot, figure, path)
