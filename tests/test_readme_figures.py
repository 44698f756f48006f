"""Compares the figures that the README quotes with the files of results that they come from.

`FIGURES` says for each file of `bench/results/` which of its values the README may quote. A figure is a number
with a unit of measure, a number with a decimal point, or a number in a table, its first column aside. It has to
be one of these values, rounded to the digits that the README prints. Where its table row or paragraph links
files of results, it has to be a value of one of those.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NUMBER = r"\d[\d,]*(?:\.\d+)?(?![\d.]*\d)"
UNIT = r"(?:ms|µs|s|seconds|tokens/s|TFLOP/s|GB/s|%|times)(?!\w)"
WITH_UNIT = re.compile(rf"{NUMBER}(?:(?: ?[/,;] ?| (?:to|and|or) ){NUMBER})* ?{UNIT}")
DECIMAL = re.compile(r"\d[\d,]*\.\d+")
# Numbers that are part of a name, a version or a setting.
NAMES = re.compile(
    r"\b(?:Python|vLLM|FlashInfer|FlashAttention|transformers|torch|Triton|CUDA|Llama|SmolLM|Apache|lightkv"
    r"|page|batch|states)(?: is)?[ -]?\d[\d.]*\b|\bpages of \d+|\d[\d.]*(?: and \d[\d.]*)? of saturation"
    r"|\d+ clients|\b[HAB]\d{2,3}\b|\b(?=\d*[a-f])[\da-f]{7}\b"  # the last: a commit
)


def both(found: Any, *rows: str) -> Iterator[float]:
    """The medians of lightkv and vLLM in these rows of a comparison."""
    for row in rows_of(found, *rows):
        yield row["lightkv"]["median"]
        yield row["vllm"]["median"]


def ratios(found: Any, *rows: str) -> Iterator[float]:
    """What lightkv's median is of vLLM's, in these rows of a comparison."""
    for row in rows_of(found, *rows):
        yield row["lightkv"]["median"] / row["vllm"]["median"]


def rows_of(found: Any, *names: str) -> list[Any]:
    by_name = {row["name"]: row for row in found["rows"]}
    return [by_name[name] for name in names]


def in_process(found: Any) -> Iterator[float]:
    yield from both(found, *(f"decode step, batch {batch}" for batch in (1, 32, 256)))
    yield from both(found, *(f"first token, prompt {length}" for length in ("512", "2,048", "8,192")))
    yield from both(found, "start in process, empty compile cache, warm page cache")


def mixture(found: Any) -> Iterator[float]:
    yield from both(
        found, *(f"device in a step, batch {one}, pauses of 0 s: step_ms" for one in (1, 32, 256))
    )


def few_bits(found: Any) -> Iterator[float]:
    found = found["models"]["4 bits in groups of 128"]
    yield from both(found, "decode step, batch 1", "decode step, batch 32", "first token of 2,048")


def over_http(found: Any) -> Iterator[float]:
    levels = [f"HTTP, {clients} clients" for clients in (1, 32, 256)]
    rates = [f"{level}: tokens/s" for level in levels]
    yield from both(found, *rates, *(f"{level}: time per output token, mean" for level in levels))
    yield from (100 * (ratio - 1) for ratio in ratios(found, *rates))


def lifelike(found: Any) -> Iterator[float]:
    figures = ("first token, p50", "first token, p99", "between tokens, p99")
    yield from both(found, *(f"poisson-0.8: {figure}" for figure in figures))
    for figure in figures:  # the lowest and the highest of four loads
        cells = [f"{load}: {figure}" for load in ("poisson-0.6", "poisson-0.8", "bursty-0.6", "bursty-0.8")]
        found_ratios = list(ratios(found, *cells))
        yield from (min(found_ratios), max(found_ratios))


def next_turn(found: Any) -> Iterator[float]:
    times = found["milliseconds"]["64 after 32768"]
    yield from (median(times["turns"]), median(times["conversation"]))


def attention_decode(found: Any) -> Iterator[float]:
    sides = found["decode"]["B256 × 2k"]["sides"]
    for side in ("lightkv p1", "FlashInfer tc p1", "FlashInfer tc p16", "SDPA cuDNN"):
        yield sides[side]["median"]


def attention_prefill(found: Any) -> Iterator[float]:
    for row in ("4 × 4k fresh", "1 × 16k fresh"):
        for side in ("lightkv p1", "FA3 p1"):
            yield found["prefill"][row]["sides"][side]["tflop_per_s"]


def allocator(found: Any) -> Iterator[float]:
    pools = [cells for name, cells in found["us"].items() if name.startswith("1,000,000 ")]
    times = [cells["decode 256"]["lightkv"]["graph_hot_l2"] for cells in pools]
    yield from (min(times), max(times), found["floor_us"]["graph_hot_l2"])


def generate(found: Any) -> Iterator[float]:
    cell = found["32 x 8..900"]
    yield from (cell["lightkv_tokens_per_s"]["median"], cell["transformers_tokens_per_s"]["median"])


def capacity(found: Any) -> Iterator[float]:
    """The least whole percentage that is more than what pages of 16 leave empty, in every trace."""
    yield math.floor(100 * max(shares[0] for shares in found["waste"].values())) + 1


def admission(found: Any) -> Iterator[float]:
    """Percentages of the chats that state 4,096 tokens, at 1.3 of saturation."""
    (cell,) = (one for one in found if (one["workload"], one["load"]) == ("chat, 4,096 stated", 1.3))
    for policy in ("guaranteed", "watermark"):
        yield from (100 * cell["policies"][policy][name] for name in ("in_time", "preempted"))


FIGURES: dict[str, Callable[[Any], Iterator[float]]] = {
    "vllm-peer-in-process-h200.json": in_process,
    "vllm-peer-few-bits-h200.json": few_bits,
    "vllm-peer-qwen3-moe-12-layers-h200.json": mixture,
    "vllm-peer-h200.json": over_http,
    "lifelike-h100.json": lifelike,
    "next-turn-h200.json": next_turn,
    "attention-decode-h200.json": attention_decode,
    "attention-fa3-quick-h100.json": attention_prefill,
    "allocator-h200.json": allocator,
    "generate-cpu.json": generate,
    "simulate.json": capacity,
    "admission-rules.json": admission,
}


@cache
def values(file: str) -> tuple[float, ...]:
    """The values of a file of results that the README may quote."""
    if file not in FIGURES:
        return ()
    found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return tuple(FIGURES[file](found["results"]))


def figures_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each figure of a page, and the files of results that its table row or its paragraph links."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", text), flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", text):
        rows = re.findall(r"^\|.*\|$", paragraph, re.MULTILINE)
        for part in rows or [paragraph]:
            files = re.findall(r"\]\(bench/results/([\w.-]+\.json)\)", part)
            plain = re.sub(r"`[^`]*`|\]\([^)]*\)|[*[]", "", part)
            plain = NAMES.sub("", re.sub(r"\s+", " ", plain))
            if rows:
                found = re.findall(NUMBER, plain.strip("|").partition("|")[2])
            else:
                found = [one for chain in WITH_UNIT.findall(plain) for one in re.findall(NUMBER, chain)]
                found += DECIMAL.findall(WITH_UNIT.sub("", plain))
            yield from ((figure, files) for figure in found)


def is_found(figure: str, files: list[str]) -> bool:
    """Whether a value of these files, or of any file if there are none, is printed so."""
    decimals = len(figure.partition(".")[2])
    return any(f"{value:,.{decimals}f}" == figure for file in files or FIGURES for value in values(file))


def test_every_figure_of_the_readme_is_in_its_file_of_results() -> None:
    figures = list(figures_of((ROOT / "README.md").read_text(encoding="utf-8")))
    unknown = [figure for figure, files in figures if not is_found(figure, files)]
    assert figures
    assert not unknown, "measure again, or add where it comes from to FIGURES"


def test_every_figure_of_the_readme_stands_in_measured_md() -> None:
    measured = set(re.findall(NUMBER, (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")))
    figures = {figure for figure, _ in figures_of((ROOT / "README.md").read_text(encoding="utf-8"))}
    assert not figures - measured


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("Python 3.11, 3 GB of disk, 32 clients, `--x 0.5` and [docs](docs/a-1.5.md) have none.", []),
        (
            "A step takes **3.97 ms** where vLLM 0.33.0 takes 4.86,\nand starts in 40 s.",
            ["3.97", "40", "4.86"],
        ),
        ("It sends 11\nto 21 % more at 0.6 and 0.8 of saturation.", ["11", "21"]),
        ("| batch | it |\n|---|---|\n| 1 / 32 | **3.97 / 13 ms** at page 16 |", ["3.97", "13"]),
    ],
)
def test_figures_are_told_from_names_and_settings(text: str, figures: list[str]) -> None:
    assert [figure for figure, _ in figures_of(text)] == figures


def test_a_wrong_figure_and_a_wrong_file_are_found() -> None:
    right, wrong = "vllm-peer-in-process-h200.json", "next-turn-h200.json"
    text = f"| step | 3.97 ms | [figures](bench/results/{right}) |"
    assert list(figures_of(text)) == [("3.97", [right])]
    assert is_found("3.97", [right])
    assert is_found("3.97", [])
    assert not is_found("3.98", [right])
    assert not is_found("3.97", [wrong])
    assert not is_found("3.97", ["lifelike-h100.png"])
