"""The figures of `serving.py` for people: tables on the terminal, and a plot.

Knows the shape of its results; measures nothing. matplotlib is imported only when something is to be drawn.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.report import Spread, print_table

Results = dict[str, Any]

BUSY_CLIENT = 0.8  # of a core: beyond it the client may be what is measured


def print_levels(levels: dict[str, Results]) -> None:
    def cell(figures: dict[str, float] | None) -> str:
        return "" if figures is None else f"{figures['p50']:.1f} / {figures['p99']:.1f}"

    rows = []
    for name, found in levels.items():
        latencies = [
            cell(found[f"{what}_ms"]) for what in ("ttft", "between_pieces", "per_token", "end_to_end")
        ]
        router = f"{found['router_us_per_step']:.0f}" if "router_us_per_step" in found else ""
        throughput = [f"{found['output_tokens_per_s']:,.1f}", f"{found['requests_per_s']:.2f}"]
        rows.append([name, *throughput, *latencies, f"{found['tokens_per_piece']:.2f}", router])
    print("\nmilliseconds as p50 / p99")
    print_table(
        ["load", "tokens/s", "requests/s", "TTFT", "between pieces", "a token", "end to end", "tokens a piece",
         "router µs a step"], rows
    )  # fmt: skip
    for name, found in levels.items():
        cores = ", ".join(f"{role} {used:.2f}" for role, used in found["cores"].items())
        line = f"{name}: cores used: {cores}"
        if "host_core_at_100_tokens_per_s" in found:
            share = found["host_core_at_100_tokens_per_s"]
            line += f"; router and API at 100 tokens/s: {share:.1%} of a core"
        if found["cores"]["client"] > BUSY_CLIENT:
            line += "; THE CLIENT ITSELF IS BUSY, and may be what is measured"
        print(line)


def print_peers(peers: dict[int, Results]) -> None:
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


def load_pyplot() -> ModuleType:
    """matplotlib.pyplot, drawing into files. Ends where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib, or leave it out")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(pyplot: ModuleType, levels: dict[str, Results], path: Path) -> None:
    """Throughput and latencies over the load, closed and open loops apart."""
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for is_open, style in ((False, "o-"), (True, "s--")):
        found = [level for level in levels.values() if level["is_open"] == is_open]
        if not found:
            continue
        loop = "open loop, requests a second" if is_open else "closed loop, clients"
        at = [level["level"] for level in found]
        axes[0].plot(at, [level["output_tokens_per_s"] for level in found], style, label=loop)
        for axis, key in ((axes[1], "ttft_ms"), (axes[2], "per_token_ms")):
            for percentile in ("p50", "p99"):
                values = [(level[key] or {}).get(percentile, float("nan")) for level in found]
                axis.plot(at, values, style, label=f"{percentile}, {loop}")
    for axis, title in zip(
        axes, ("output tokens a second", "TTFT, ms", "a token after the first, ms"), strict=True
    ):
        axis.set(title=title, xlabel="load", xscale="log", ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
