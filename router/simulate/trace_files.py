"""Reads the requests of trace files, line by line: lightkv's own format and the published ones.

docs/simulator.md describes the formats. A unit that a file does not tell is never guessed: it is asked for.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from lightkv.errors import LightKVError

BLOCK = 512  # tokens of a prefix block in Mooncake's traces
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}  # in seconds


class UnreadableTrace(LightKVError, ValueError):
    """Raised for a file of an unknown format or without requests, and for an unknown name."""


class _Unclear(ValueError):
    """A record that can be read if more is known about its file. The message says what."""


class TraceRequest(NamedTuple):
    """A request. `arrival`: seconds from the first one, None if the trace has no times. `prompt`, `output`:
    numbers of tokens. `blocks`: ids of the prompt's blocks of `block_tokens` tokens, which are equal for equal
    prefixes; empty: the prompt shares no prefix."""

    arrival: float | None
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = BLOCK


class Reading(NamedTuple):
    """How the numbers of a file are read. `time_unit`: of times whose field does not name their unit, one of
    `TIME_UNITS`; None: such times are refused. `block_tokens`: the tokens of a block of `hash_ids`."""

    time_unit: str | None = None
    block_tokens: int = BLOCK


IN_MILLISECONDS = Reading("ms")  # as Mooncake publishes its traces


class _Format(NamedTuple):
    """The fields of a known format. `time_in`: what its times are: "dates", one of `TIME_UNITS`, or "" for
    numbers whose unit the field's name does not tell."""

    prompt: str
    output: str
    time: str | None = None
    time_in: str = ""
    blocks: str | None = None


_OWN = _Format("prompt_tokens", "output_tokens", "arrival_seconds", "s", "hash_ids")
_FORMATS = {
    # For traces of one's own (docs/simulator.md).
    "lightkv": _OWN,
    # AzurePublicDataset; Patel et al., Splitwise, ISCA 2024.
    "Azure": _Format("ContextTokens", "GeneratedTokens", "TIMESTAMP", "dates"),
    # ShareGPT's lengths as sarathi-serve publishes them: no arrival times.
    "ShareGPT": _Format("num_prefill_tokens", "num_decode_tokens"),
    # Mooncake, FAST 2025: JSON lines, times in milliseconds. Other traces have the same names and seconds.
    "Mooncake": _Format("input_length", "output_length", "timestamp", "", "hash_ids"),
}


class FileTrace:
    """A trace in a known format: CSV, or JSON lines if its name ends in .jsonl or .json.

    Requests with an empty prompt or answer are left out. A time before the last one counts as the last one.
    """

    def __init__(self, path: Path, reading: Reading = Reading()) -> None:  # noqa: B008, it cannot change
        self.path = path
        self._reading = reading

    @property
    def name(self) -> str:
        return self.path.name

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yields the requests. Raises UnreadableTrace, also for a file without requests, and OSError."""
        last = 0.0
        first: float | None = None
        time_unit, block_tokens = self._reading
        empty = True
        with self.path.open(encoding="utf-8-sig", newline="") as lines:
            records: Iterable[Mapping[str, Any]]
            is_json = self.path.suffix in (".jsonl", ".json")
            counted = _Lines(lines)
            records = map(json.loads, counted) if is_json else csv.DictReader(counted)
            try:
                for record in records:
                    known = _format_of(record)
                    prompt, output = (_tokens(record, field) for field in (known.prompt, known.output))
                    if prompt < 1 or output < 1:
                        continue
                    empty = False
                    at = _seconds(record, known, time_unit)
                    if at is not None:
                        first = at if first is None else first
                        last = at = max(at - first, last)
                    blocks = _blocks(record, known, prompt, block_tokens)
                    yield TraceRequest(at, prompt, output, blocks, block_tokens)
            except UnicodeDecodeError as error:
                raise UnreadableTrace(f"{self.path} is not text; unpack it if it is compressed") from error
            except (ValueError, TypeError, csv.Error) as error:
                reason = f"no JSON, {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)
                remedy = "" if isinstance(error, _Unclear) else "; correct it or leave it out"
                raise UnreadableTrace(f"{self.path}, line {counted.number}: {reason}{remedy}") from error
        if empty:
            raise UnreadableTrace(f"{self.path} has no request; give a trace with one line for each")


class _Lines:
    """Iterates lines. `number`: that of the last line read, from 1."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = lines
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.number += 1
            yield line


def _format_of(record: Mapping[str, Any]) -> _Format:
    for known in _FORMATS.values():
        if known.prompt in record and known.output in record:
            return known
    names = "; ".join(f"{known.prompt}, {known.output} ({name}'s)" for name, known in _FORMATS.items())
    raise _Unclear(f"its fields are {', '.join(map(str, record))}; known are {names}")


def _tokens(record: Mapping[str, Any], field: str) -> int:
    value = record[field]
    try:
        tokens = int(value)
    except (TypeError, ValueError, OverflowError):
        tokens = None
    if tokens is None or (isinstance(value, float) and tokens != value):
        raise ValueError(f"{field} is {value!r:.80}; it has to be a whole number")
    return tokens


def _seconds(record: Mapping[str, Any], known: _Format, time_unit: str | None) -> float | None:
    """Returns when a request arrives, None where the format or the record has no time."""
    if known is _OWN and known.time not in record:
        for field in record:
            if any(part in str(field).lower() for part in ("time", "arriv", "second")):
                raise _Unclear(f"the unit of {field} is not known; call it {known.time}, in seconds")
    if known.time is None or known.time not in record:
        return None
    value = record[known.time]
    if known.time_in == "dates":
        return _date(known.time, value)
    unit = known.time_in or time_unit
    if unit is None:
        raise _Unclear(
            f"{known.time} is {value!r:.80}, and its unit is not known: give --time-unit ms for Mooncake's own "
            f"traces, or one of {', '.join(TIME_UNITS)}"
        )
    try:
        seconds = float(value) * TIME_UNITS[unit]
    except (TypeError, ValueError):
        raise ValueError(f"{known.time} is {value!r:.80}; it has to be a number") from None
    if not math.isfinite(seconds):
        raise ValueError(f"the time is {value}")
    return seconds


def _date(field: str, value: Any) -> float:
    """Returns the seconds of a date and time, in UTC if it names no zone."""
    if not isinstance(value, str) or "-" not in value:  # digits alone are a date to fromisoformat, too
        raise ValueError(
            f"{field} is {value!r:.80}; it has to be a date and a time, as 2023-11-16 18:15:46.68 (or seconds, "
            f"in a file with {_OWN.time}, {_OWN.prompt} and {_OWN.output})"
        )
    at = datetime.fromisoformat(value)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _blocks(record: Mapping[str, Any], known: _Format, prompt: int, block_tokens: int) -> tuple[int, ...]:
    """Returns the ids of a prompt's blocks, reduced to the range of token ids. Collisions are very rare.

    Their number says whether a block has `block_tokens` tokens; a last part of a block may have an id, too.
    """
    if not known.blocks or not record.get(known.blocks):
        return ()
    blocks = record[known.blocks]
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise ValueError(f"{known.blocks} are {blocks!r:.80}; they have to be whole numbers, in JSON lines")
    if not prompt // block_tokens <= len(blocks) <= -(-prompt // block_tokens):
        raise _Unclear(
            f"a prompt of {prompt} tokens has {len(blocks)} {known.blocks}, which are no blocks of "
            f"{block_tokens} tokens; give their size as --block-tokens"
        )
    return tuple(block % (2**31 - 2) for block in blocks)
