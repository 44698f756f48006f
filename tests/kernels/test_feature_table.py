"""Makes the tables of docs/kernels.md, feature by kernel, from what the tests run, and compares the page with
them. `python -m tests.kernels.test_feature_table` prints them."""

from pathlib import Path

from tests.support.attention.feature_table import covered, made_table, named_by
from tests.support.attention.score_features import FEATURES, KERNELS

PLACES = [
    "ring, its sinks and window",
    "ring, a layer with a window",
    "positions read from other rows",
    "keys of another sequence",
]
WRITES = [
    "rotary, all dims",
    "rotary, some of the dims",
    "QKV bias",
    "fused QKV input and bias",
    "tables with a row for each token",
]


def score_table() -> list[str]:
    """Returns the table of what changes scores or hides keys: the features that each kernel's test runs with.
    What Hopper's kernel does not have, general prefill computes."""
    tests, runs = named_by("each_feature"), {kernel: set(names) for kernel, names in KERNELS.items()}
    runs["Hopper's prefill"] = {name for name in FEATURES if name != "mask, blocks, ALiBi, full"}
    lines = ["| feature | " + " | ".join(runs) + " |", "|---|" + "---|" * len(runs)]
    for name in FEATURES:
        cells = ["yes" if name in has else "–" for has in runs.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    named = [f"`{tests[kernel]}`" for kernel in KERNELS]
    hopper = "`test_warpgroups`, on a GPU `test_prefill`"
    return [*lines, "| tested by | " + " | ".join([*named, hopper]) + " |"]


def tables() -> list[str]:
    """Returns the three tables."""
    places = made_table("where K/V is", PLACES, ["decode", "prefill", "mixed", "Hopper's prefill"])
    writes = made_table("`write_kv`", WRITES, ["NeoX", "GPT-J", "not rotated"])
    return ["\n".join(lines) for lines in (score_table(), places, writes)]


def test_the_tables_in_the_docs_are_what_the_tests_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert {feature for feature, _ in covered()} == {*PLACES, *WRITES}
    for table in tables():
        assert table in page


if __name__ == "__main__":
    print("\n\n".join(tables()))
