"""Zeroes the device code of a shared library that a GPU of one architecture does not use.

    python cutfat.py SOURCE DESTINATION [--architecture 90]

The size and the layout of the file stay as they are, so the library still loads; the zeroes then compress to
almost nothing. In each fat binary of the library the cubins of the architecture are kept, or, where there are
none, the PTX for it and for older ones.
"""

import argparse
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = struct.pack("<I", 0xBA55ED50)  # starts the header of a fat binary
PTX, CUBIN = 1, 2


class Entry(NamedTuple):
    """Device code: its kind (PTX or CUBIN), its architecture, and its bytes [start, start + size)."""

    kind: int
    architecture: int
    start: int
    size: int


def read_entries(data: bytearray, start: int, end: int) -> list[Entry]:
    """Returns the entries of the fat binary whose body is at [start, end)."""
    found = []
    while start < end:
        kind, _, header_size, size = struct.unpack_from("<HHIQ", data, start)
        (architecture,) = struct.unpack_from("<I", data, start + 28)
        if not header_size:
            break
        found.append(Entry(kind, architecture, start + header_size, size))
        start += header_size + size
    return found


def fat_binaries(data: bytearray) -> Iterator[list[Entry]]:
    """Yields the entries of every fat binary in a file."""
    start = data.find(MAGIC)
    while start >= 0:
        version, header_size, size = struct.unpack_from("<HHQ", data, start + 4)
        end = start + header_size + size
        is_header = version == 1 and header_size == 16 and end <= len(data)
        if is_header:
            yield read_entries(data, start + header_size, end)
        start = data.find(MAGIC, end if is_header else start + 4)


def cut(data: bytearray, architecture: int) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
    """Zeroes the unused entries in place. Returns the bytes kept and cut, by kind and architecture."""
    kept: Counter[tuple[int, int]] = Counter()
    removed: Counter[tuple[int, int]] = Counter()
    for entries in fat_binaries(data):
        has_cubin = any(own.kind == CUBIN and own.architecture == architecture for own in entries)
        for own in entries:
            if has_cubin:
                is_used = own.kind == CUBIN and own.architecture == architecture
            else:
                is_used = own.kind == PTX and own.architecture <= architecture
            (kept if is_used else removed)[own.kind, own.architecture] += own.size
            if not is_used:
                data[own.start : own.start + own.size] = bytes(own.size)
    return kept, removed


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("source", type=Path)
    made.add_argument("destination", type=Path)
    made.add_argument("--architecture", type=int, default=90, help="compute capability without its point")
    options = made.parse_args()
    data = bytearray(options.source.read_bytes())
    kept, removed = cut(data, options.architecture)
    options.destination.write_bytes(data)
    for name, found in (("kept", kept), ("cut", removed)):
        parts = (
            f"{'cubin' if kind == CUBIN else 'PTX'} {number}: {size / 1e6:.1f} MB"
            for (kind, number), size in sorted(found.items())
        )
        print(f"{options.source.name}, {name}: {', '.join(parts) or 'nothing'}")


if __name__ == "__main__":
    main()
