"""Prints and plots the results of `attention.py`."""

from pathlib import Path
from typing import Any

from bench.common.report import Spread, print_table
from bench.kernels.attention_batches import SEVERAL_QUERIES

Results = dict[str, Any]

READ, COMPUTED = ("TB/s", "tb_per_s"), ("TFLOP/s", "tflop_per_s")
PARTS = {"decode": READ, "prefill": COMPUTED, "mixed": COMPUTED, "groups": READ}


def print_rows(rows: dict[str, Results], unit: str, rate: str) -> None:
    """Prints the µs of every side; the other columns are about lightkv at page 1, except the last."""
    rows = {row: found for row, found in rows.items() if "sides" in found}
    names = list(dict.fromkeys(name for found in rows.values() for name in found["sides"]))
    table = []
    for row, found in rows.items():
        sides, floor = found["sides"], found["floor_us"]
        cells = [f"{sides[name]['median']:.1f}" if name in sides else "" for name in names]
        ours = sides.get("lightkv p1")
        cells += [f"{ours['median'] / floor:.2f}", f"{ours[rate]:.3g}"] if ours else ["", ""]
        cells += [f"{found[key]:.2f}" if key in found else "" for key in ("ratio", "ratio_of_best_page")]
        table.append([row, f"{floor:.1f}", *cells])
    print(
        "\nµs, medians; over the floor, the rate, over the best peer: lightkv at page 1, and at its best page"
    )
    print_table(["row", "floor", *names, "over floor", unit, "over peer", "best page"], table)


def print_figures(results: Results) -> None:
    for part, (unit, rate) in PARTS.items():
        if results.get(part):
            print_rows(results[part], unit, rate)
    for row, found in results.get("reading", {}).items():
        if "p1" in found:
            took = " and ".join(f"{found[page]:.1f} µs of {page}" for page in found)
            print(f"{row}: a kernel that reads its rows and does nothing else takes {took}")
    for row, found in results.get("plan", {}).items():
        if "median" in found:
            print(f"{row}: the plan of a step takes {Spread(**found).text('.1f')} µs in a graph")
    for row, found in results.get("queries", {}).items():
        if "ratio" in found:
            print(f"{row}: {SEVERAL_QUERIES[row]} queries a request cost {found['ratio']:.2f} of one")
    for row, found in results.get("mixed", {}).items():
        if "alone_us" in found and "lightkv p1" in found["sides"]:
            alone = ", ".join(f"{part} {took:.1f}" for part, took in found["alone_us"].items())
            whole, total = found["sides"]["lightkv p1"]["median"], sum(found["alone_us"].values())
            print(f"{row}: alone {alone}, together {total:.1f} µs; in one call {whole:.1f} µs")
    for row, found in results.get("groups", {}).items():
        for name, speedup in found.get("speedups", {}).items():
            print(f"{row}: {name} is {speedup:.2f} times as fast as lightkv ungrouped")
    for row, found in results.get("write", {}).items():
        if "us_per_layer" in found:
            print(f"{row}: writing K/V adds {found['us_per_layer']:.2f} µs a layer")


def over_floor(found: Results) -> dict[str, float]:
    """Returns the time over the floor of lightkv's sides, and of each peer at its best."""
    best: dict[str, float] = {}
    for name, side in found["sides"].items():
        key = name if name.startswith("lightkv") else name.split()[0]
        best[key] = min(best.get(key, float("inf")), side["median"] / found["floor_us"])
    return best


def plot(pyplot: Any, results: Results, path: Path) -> None:
    """Plots the time over the floor as bars, row by row; each peer at its best."""
    parts = [part for part in PARTS if results.get(part)]
    figure, axes = pyplot.subplots(
        len(parts), 1, figsize=(15, 5 * len(parts)), layout="constrained", squeeze=False
    )
    for part, axis in zip(parts, axes[:, 0], strict=True):
        rows = {row: over_floor(found) for row, found in results[part].items() if "sides" in found}
        names = list(dict.fromkeys(name for ratios in rows.values() for name in ratios))
        for i, name in enumerate(names):
            at = [j + (i - (len(names) - 1) / 2) * 0.8 / len(names) for j in range(len(rows))]
            heights = [ratios.get(name, float("nan")) for ratios in rows.values()]
            axis.bar(at, heights, 0.8 / len(names), label=name)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xticks(range(len(rows)), list(rows), rotation=15, ha="right", fontsize="small")
        axis.set(title=part, ylabel="time over the floor")
        axis.grid(axis="y", alpha=0.3)
        axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
