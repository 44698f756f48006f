"""A benchmark's report: the machine, the versions, medians with their spread, a table, one line of JSON."""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from lightkv.router.config import EngineConfig

T = TypeVar("T")


class Spread(NamedTuple):
    """The median, the lowest and the highest of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def text(self, form: str = ".2f") -> str:
        """Formats as `median (low to high)`."""
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's model and the vector instructions that torch uses, say `AMD EPYC (AVX2)`."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = cpuinfo.read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def machine() -> dict[str, Any]:
    """Returns device, processor and versions of the libraries, which are stored beside the figures."""
    on_gpu = torch.cuda.is_available()
    versions: dict[str, str] = {"python": platform.python_version()}
    for name in ("lightkv", "torch", "triton", "transformers", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "uninstalled"
    processor = processor_name()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else processor,
        "processor": processor,
        "cuda": torch.version.cuda if on_gpu else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


def alternate(rounds: int, sides: Mapping[str, Callable[[], T]]) -> Iterator[dict[str, T]]:
    """Yields what each side returns, round by round. Every other round runs the sides in reverse.

    So no side always runs after the same one, and a machine that is slow for a while slows all sides.
    """
    for round_idx in range(rounds):
        order = list(sides) if round_idx % 2 == 0 else list(reversed(sides))
        found = {side: sides[side]() for side in order}
        yield {side: found[side] for side in sides}


def print_machine() -> None:
    """Prints one line with the device and the versions."""
    where = machine()
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    print(f"{where['device']}, {where['cores']} cores, {where['threads']} threads; {versions}\n")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints columns as wide as their cells. The first is aligned left, the others right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells), flush=True)


def print_json(name: str, results: Any, out: Path | None) -> None:
    """Prints the results as one line of JSON, the last line of a benchmark, and writes them to `out`."""
    print(json.dumps(save_json(name, results, out)), flush=True)


def save_json(name: str, results: Any, out: Path | None) -> dict[str, Any]:
    """Writes what `print_json` prints to `out` alone, so that a run that fails keeps its figures."""
    document = {"benchmark": name, **machine(), "results": results}
    _write(document, out)
    return document


def _write(document: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")


def read_json(name: str, path: Path) -> dict[str, Any]:
    """Reads the document that `print_json` wrote for the benchmark `name`. Exits if `path` holds another."""
    wanted = f"give a file written by --out of the benchmark {name!r}"
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        written = document["benchmark"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        refuse(f"{path} is no result of a benchmark ({type(error).__name__}: {error}); {wanted}")
    if written != name:
        refuse(f"{path} is a result of the benchmark {written!r}; {wanted}")
    return document


def print_again(document: dict[str, Any], out: Path | None) -> None:
    """Prints and writes a stored document. The device and the versions stay those of its measurement."""
    _write(document, out)
    print(json.dumps(document), flush=True)


def refuse(reason: str) -> NoReturn:
    """Exits without figures, because the benchmark's own check failed."""
    sys.exit(f"no figures: {reason}")


def load_pyplot() -> ModuleType:
    """Imports matplotlib.pyplot, set up to draw into files. Exits if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib, or leave --plot out")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(pyplot: ModuleType, figure: Any, path: Path) -> None:
    """Writes a figure of matplotlib as a PNG or SVG, into a folder that is made if need be, and closes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns an argument parser with the option `--out`."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, help="also write the JSON to this file, say in bench/results/")
    return made


def engine_help(name: str) -> str:
    """Returns the text that explains the engine's setting `name`, for an option of a benchmark."""
    text: str = next(field.metadata["help"] for field in fields(EngineConfig) if field.name == name)
    return text.replace("%", "%%")
