"""Makes the tables of docs/kernels.md, feature by kernel, from what the tests run, and compares the page with
them. `python tests/kernels/test_feature_table.py` prints them."""

from pathlib import Path

import test_rings
import test_rings_gpu
import test_score_features
import test_score_features_gpu
import test_write_kv_rotary
from feature_table import covered_features, made_table
from score_features import FEATURES

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
# Tests of these modules are recorded as they are imported.
MODULES = test_rings, test_rings_gpu, test_score_features_gpu, test_write_kv_rotary


def score_table() -> list[str]:
    """Returns the table of what changes scores or hides keys: the features that each kernel's test runs with.
    What Hopper's kernel does not have, general prefill computes."""
    tests = {
        "decode": test_score_features.test_decode,
        "a shared prefix": test_score_features.test_shared_prefix,
        "prefill": test_score_features.test_prefill,
        "prefill, keys shared out": test_score_features.test_prefill_with_shared_out_keys,
        "mixed": test_score_features.test_mixed,
        "scores": test_score_features.test_scores,
    }
    runs = {}
    for kernel, test in tests.items():
        (marks,) = (mark.args[1] for mark in test.pytestmark if mark.args[:1] == ("name",))
        runs[kernel] = {param.values[0] for param in marks}
    runs["Hopper's prefill"] = {name for name in FEATURES if name != "mask, blocks, ALiBi, full"}
    lines = ["| feature | " + " | ".join(runs) + " |", "|---|" + "---|" * len(runs)]
    for name in FEATURES:
        cells = ["yes" if name in has else "–" for has in runs.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    named = [f"`{test.__name__}`" for test in tests.values()]
    hopper = "`test_warpgroups`, on a GPU `test_prefill`"
    return [*lines, "| tested by | " + " | ".join([*named, hopper]) + " |"]


def tables() -> list[str]:
    """Returns the three tables."""
    places = made_table("where K/V is", PLACES, ["decode", "prefill", "mixed", "Hopper's prefill"])
    writes = made_table("`write_kv`", WRITES, ["NeoX", "GPT-J", "not rotated"])
    return ["\n".join(lines) for lines in (score_table(), places, writes)]


def test_the_tables_in_the_docs_are_what_the_tests_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert all(module.__name__.startswith("test_") for module in MODULES)
    assert covered_features() == {*PLACES, *WRITES}
    for table in tables():
        assert table in page


if __name__ == "__main__":
    print("\n\n".join(tables()))
