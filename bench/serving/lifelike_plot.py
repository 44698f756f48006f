"""Draws first tokens and the time between tokens over the load, for each engine of a file of results.

    python -m bench.serving.lifelike_plot bench/results/lifelike-two-machines-h100.json docs/lifelike.svg

The file is one of `bench.serving.lifelike`, or of `bench.serving.vllm_peer.compare --lifelike`.
"""

import argparse
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.common.report import load_pyplot, refuse, save_figure
from bench.serving.lifelike_cells import BURSTY

Results = dict[str, Any]

PANELS = (("ttft_ms", "first token, p99, ms"), ("between_pieces_ms", "between two tokens, p99, ms"))
# By workload, and whether it comes in bursts: the name, and the line and mark.
KINDS = {
    ("conversation", False): ("Poisson", "o-"),
    ("conversation", True): ("bursty", "s--"),
    ("code", False): ("code", "^"),
    ("sessions", False): ("sessions", "D"),
}
PERCENTILE = "p99"


def engines_of(document: Results) -> dict[str, Results]:
    """Returns the cells of each engine in a file of results. Exits if there are none."""
    results = document["results"]
    if "cells" in results:
        return {"": results["cells"]}
    found: dict[str, Results] = {}
    for own in results.get("measurements", ()):
        if own["kind"] == "lifelike":
            found.setdefault(own["engine"], {}).update(own["cells"])
    if not found:
        refuse(
            "the file has no loads like life; give one of bench.serving.lifelike, or of compare --lifelike"
        )
    return found


def plot(pyplot: ModuleType, engines: dict[str, Results], path: Path) -> None:
    """Draws a panel for each of PANELS into the file at `path`."""
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(11, 4.8), layout="constrained")
    for axis, (key, title) in zip(axes, PANELS, strict=True):
        for colour, (engine, cells) in enumerate(engines.items()):
            for (workload, is_bursty), (name, style) in KINDS.items():
                points = sorted(
                    (cell["load"], cell[key][PERCENTILE])
                    for cell in cells.values()
                    if cell.get("workload") == workload
                    and (cell["cv"] == BURSTY) == is_bursty
                    and cell.get(key)
                )
                if points:
                    axis.plot(
                        *zip(*points, strict=True),
                        style,
                        color=f"C{colour}",
                        label=f"{engine} {name}".strip(),
                    )
        axis.set(title=title, xlabel="load, as a share of the saturation")
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    save_figure(pyplot, figure, path)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("results", type=Path, help="a file that --out wrote")
    made.add_argument("plot", type=Path, help="the file to draw into, a PNG or SVG")
    options = made.parse_args()
    pyplot = load_pyplot()
    plot(pyplot, engines_of(json.loads(options.results.read_text())), options.plot)


if __name__ == "__main__":
    main()
