"""Prints and plots the results of `attention.py`."""

from pathlib import Path
from typing import Any

from bench.common.report import Spread, print_table, save_figure

from .attention_rows import SEVERAL_QUERIES

Results = dict[str, Any]

READ, COMPUTED = ("TB/s", "tb_per_s"), ("TFLOP/s", "tflop_per_s")
PARTS = {
    "decode": READ,
    "decode_dims": READ,
    "prefill": COMPUTED,
    "prefill_dims": COMPUTED,
    "turns": COMPUTED,
    "curve": READ,
    "mixed": COMPUTED,
    "groups": READ,
}
FALL = 0.02  # of the time, that more queries may take less than fewer do
SLOWER = 1.15  # than FlashAttention 3, that any number of queries may be


def print_rows(part: str, rows: dict[str, Results], unit: str, rate: str) -> None:
    """Prints the µs of every side, then the rates and ratios of lightkv."""
    rows = {row: found for row, found in rows.items() if "sides" in found}
    names = list(dict.fromkeys(name for found in rows.values() for name in found["sides"]))
    pages = list(dict.fromkeys(page for found in rows.values() for page in found.get("over_fa3", ())))
    table = []
    for row, found in rows.items():
        sides, floor, over_fa3 = found["sides"], found["floor_us"], found.get("over_fa3", {})
        cells = [f"{sides[name]['median']:.1f}" if name in sides else "" for name in names]
        ours = sides.get("lightkv p1")
        cells += [f"{ours['median'] / floor:.2f}", f"{ours[rate]:.3g}"] if ours else ["", ""]
        if pages:
            cells.append(f"{sides['FA3 p1'][rate]:.3g}" if "FA3 p1" in sides else "")
            cells += [f"{over_fa3[page]:.3f}" if page in over_fa3 else "" for page in pages]
        cells += [f"{found[key]:.2f}" if key in found else "" for key in ("ratio", "ratio_of_best_page")]
        table.append([row, f"{floor:.1f}", *cells])
    beside_fa3 = [f"FA3 {unit}", *(f"over FA3 {page}" for page in pages)] if pages else []
    print(
        f"\n{part}: µs, medians; over the floor, the rate, over FA3 with pages of the same size, over the best "
        "peer: lightkv at page 1; and its best page over the best peer"
    )
    header = ["row", "floor", *names, "over floor", unit, *beside_fa3, "over peer", "best page"]
    print_table(header, table)


def curve_points(rows: dict[str, Results]) -> dict[str, dict[int, float]]:
    """Returns each side's µs by the number of queries, in ascending order, and the floor's."""
    points: dict[str, dict[int, float]] = {}
    measured = [found for found in rows.values() if "sides" in found]
    for found in sorted(measured, key=lambda found: found["queries"]):
        times = {name: side["median"] for name, side in found["sides"].items()}
        for name, took in (times | {"floor": found["floor_us"]}).items():
            points.setdefault(name, {})[found["queries"]] = took
    return points


def curve_faults(points: dict[str, dict[int, float]]) -> list[str]:
    """Returns where lightkv at page 1 takes less time for more queries, or much more than FA3 at page 1."""
    ours, fa3 = points.get("lightkv p1", {}), points.get("FA3 p1", {})
    faults, slowest = [], 0.0
    for queries, took in ours.items():
        if took < (1 - FALL) * slowest:
            faults.append(f"{queries} queries take {took:.1f} µs, fewer take up to {slowest:.1f} µs")
        if queries in fa3 and took > SLOWER * fa3[queries]:
            faults.append(f"{queries} queries take {took / fa3[queries]:.2f} times as long as FA3")
        slowest = max(slowest, took)
    return faults


def print_figures(results: Results) -> None:
    for part, (unit, rate) in PARTS.items():
        if results.get(part):
            print_rows(part, results[part], unit, rate)
    if results.get("curve"):
        faults = curve_faults(curve_points(results["curve"]))
        print(f"the curve: {'; '.join(faults) or 'monotone, and never far behind FA3'}")
    for row, found in results.get("reading", {}).items():
        if "p1" in found:
            took = " and ".join(f"{found[page]:.1f} µs of {page}" for page in found)
            print(f"{row}: a kernel that reads its rows and does nothing else takes {took}")
    for row, found in results.get("plan", {}).items():
        if "median" in found:
            spread = Spread(found["median"], found["low"], found["high"])
            print(f"{row}: the plan of a step takes {spread.text('.1f')} µs in a graph")
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


def plot_bars(axis: Any, rows: dict[str, dict[str, float]]) -> None:
    """Draws the time over the floor as bars, row by row."""
    names = list(dict.fromkeys(name for ratios in rows.values() for name in ratios))
    for i, name in enumerate(names):
        at = [j + (i - (len(names) - 1) / 2) * 0.8 / len(names) for j in range(len(rows))]
        heights = [ratios.get(name, float("nan")) for ratios in rows.values()]
        axis.bar(at, heights, 0.8 / len(names), label=name)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(rows)), list(rows), rotation=15, ha="right", fontsize="small")
    axis.set(ylabel="time over the floor")


def plot_curve(axis: Any, points: dict[str, dict[int, float]]) -> None:
    """Draws the time over the number of queries, both logarithmic."""
    for name, times in points.items():
        style = {"color": "black", "linewidth": 0.8} if name == "floor" else {"marker": "o", "markersize": 3}
        axis.plot(list(times), list(times.values()), label=name, **style)
    numbers = sorted({queries for times in points.values() for queries in times})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(numbers, [str(queries) for queries in numbers])
    axis.set(xlabel="queries after the same prefix", ylabel="µs")


def plot(pyplot: Any, results: Results, path: Path) -> None:
    """Plots every part's time over the floor, each peer at its best, and the curve as time over queries."""
    parts = [part for part in PARTS if results.get(part)]
    figure, axes = pyplot.subplots(
        len(parts), 1, figsize=(15, 5 * len(parts)), layout="constrained", squeeze=False
    )
    for part, axis in zip(parts, axes[:, 0], strict=True):
        if part == "curve":
            plot_curve(axis, curve_points(results[part]))
        else:
            rows = results[part].items()
            plot_bars(axis, {row: over_floor(found) for row, found in rows if "sides" in found})
        axis.set(title=part.replace("_", ", other head "))
        axis.grid(axis="y", alpha=0.3)
        axis.legend(fontsize="small")
    save_figure(pyplot, figure, path)
