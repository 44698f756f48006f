"""Prints the product's lines by room beside a ceiling, and fails where a room is above its own: `make lint`.

A change that needs more lines names what leaves for them. A ceiling is raised only by the number of lines that
an issue grants, and falls with every change that takes lines away.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Lines of Python files, with docstrings, comments and blank lines.
CEILINGS = {"lightkv": 20453, "router": 29700, "triton_kernels": 15110}


def lines(room: str) -> Counter[str]:
    """Returns the lines of the room's Python files that git tracks, by the folder in the room."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", f"{room}/*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    counts: Counter[str] = Counter()
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file():
            folders = Path(name).parts[1:-1]
            counts[folders[0] if folders else "."] += len(path.read_text(encoding="utf-8").splitlines())
    return counts


def main() -> None:
    """Prints the table; exits with 1 where a room has more lines than its ceiling."""
    above = []
    for room, ceiling in CEILINGS.items():
        counts = lines(room)
        total = sum(counts.values())
        print(f"{room:15}{total:7,} lines, ceiling {ceiling:,}: ", end="")
        print(", ".join(f"{folder} {count:,}" for folder, count in counts.most_common()))
        if total > ceiling:
            above.append(f"{room} has {total - ceiling} lines more than its ceiling")
    if above:
        sys.exit(
            "; ".join(above)
            + ". Let something leave, or name the issue that grants the lines (tests/support/product_lines.py)."
        )


if __name__ == "__main__":
    main()
