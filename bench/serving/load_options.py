"""The options of `load.py`: the load, the comparisons, and the settings of the engine that it starts."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from bench.common.report import engine_help, parser
from bench.serving.continuous_batching import DEFAULT_WAYS, WAYS
from lightkv.router import EngineConfig


def span_of_lengths(text: str) -> tuple[int, int]:
    """Parses `128`, or `16:512` for any length between the two."""
    shortest, _, longest = text.partition(":")
    pair = int(shortest), int(longest or shortest)
    if not 1 <= pair[0] <= pair[1]:
        raise ValueError(text)
    return pair


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


def arguments(description: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line. Exits if options contradict each other."""
    made = parser(description)
    made.add_argument("--url", help="root of a server that runs already; without it, one is started")
    made.add_argument("--api-key", help="the key of the server at --url")
    made.add_argument("--vocab-size", type=int, help="of the model at --url (default 32000)")
    made.add_argument("--concurrency", type=int, nargs="+", default=[], help="closed loops (default 1 8 32)")
    made.add_argument("--rate", type=positive, nargs="+", default=[], help="open loops, requests a second")
    made.add_argument(
        "--requests", type=int, nargs="+", default=[],
        help="one number for all loads, or one for each (default 4 a client, at least 24; open: 64)",
    )  # fmt: skip
    made.add_argument("--prompt", type=span_of_lengths, default=(128, 128), help="tokens, as 128 or 16:512")
    made.add_argument("--output", type=int, default=64, help="tokens of every answer")
    made.add_argument("--trace", type=Path, help="lengths from an Azure, ShareGPT or Mooncake trace instead")
    made.add_argument(
        "--max-prompt", type=int, help="scale the trace's prompts: the longest has so many tokens"
    )
    made.add_argument("--max-output", type=int, help="scale its answers likewise")
    made.add_argument(
        "--arrivals", choices=["poisson", "trace"], default="poisson",
        help="of open loops; trace: its requests at its own times, stretched to the rate",
    )  # fmt: skip
    made.add_argument("--tpot-target", type=positive, default=0.1, help="seconds a token, for goodput")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--timeout", type=positive, default=600.0, help="seconds for one answer")
    made.add_argument("--in-process", action="store_true", help="compare with LLM.generate")
    made.add_argument(
        "--transformers", nargs="*", choices=WAYS, metavar="WAY",
        help=f"compare with transformers in these ways (default {' '.join(DEFAULT_WAYS)}) of {' '.join(WAYS)}",
    )  # fmt: skip
    made.add_argument("--way-seconds", type=positive, default=600.0, help="that each of these may take")
    made.add_argument("--replay", action="store_true", help="compare steps with their graphs' replay")
    made.add_argument("--rounds", type=int, default=3, help="of these comparisons")
    made.add_argument("--plot", type=Path, help="draw the figures into this file, a PNG or SVG")
    made.add_argument("--replot", type=Path, help="measure nothing: draw and print the figures of this file")
    engine = made.add_argument_group("the engine, where one is started")
    kinds = get_type_hints(EngineConfig)
    for field in fields(EngineConfig):
        flag = "--" + field.name.replace("_", "-")
        if kinds[field.name] is bool:
            engine.add_argument(flag, action=argparse.BooleanOptionalAction, help=engine_help(field.name))
        else:
            kind = next((k for k in get_args(kinds[field.name]) if k is not type(None)), kinds[field.name])
            engine.add_argument(flag, type=kind, help=engine_help(field.name))
    made.add_argument("serve", nargs="*", metavar="-- OPTION", help="further options of lightkv serve")
    options = made.parse_args(argv)
    if not options.concurrency and not options.rate:
        options.concurrency = [1, 8, 32]
    num_loads = len(options.concurrency) + len(options.rate)
    if len(options.requests) not in (0, 1, num_loads):
        made.error(
            f"--requests has {len(options.requests)} numbers for {num_loads} loads; give one, or one for each"
        )
    if len(options.requests) == 1:
        options.requests *= num_loads
    if options.transformers == []:
        options.transformers = list(DEFAULT_WAYS)
    if options.url and (options.in_process or options.transformers or options.replay):
        made.error("--in-process, --transformers and --replay take a server of our own; leave out --url")
    if options.transformers and options.trace:
        made.error("--transformers takes answers of one length; leave out --trace")
    if (options.in_process or options.transformers or options.replay) and not options.concurrency:
        made.error("--in-process, --transformers and --replay compare closed loops; give a --concurrency")
    if options.arrivals == "trace" and not (options.trace and options.rate):
        made.error("--arrivals trace takes a --trace, and a --rate that its times are stretched to")
    if options.rounds < 1:
        made.error(f"--rounds is {options.rounds}; give at least 1")
    return options


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Raises InvalidConfig."""
    given = {field.name: getattr(options, field.name) for field in fields(EngineConfig)}
    return EngineConfig(**{name: value for name, value in given.items() if value is not None})


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that affect the figures, with files by their names."""
    hidden = {"api_key", "out", "plot", "replot", *(field.name for field in fields(EngineConfig))}
    settings = {key: value for key, value in vars(options).items() if key not in hidden}
    settings["trace"] = options.trace.name if options.trace else None
    if options.url:
        return settings
    engine = asdict(engine_config(options))
    if Path(engine["model"]).is_dir():
        engine["model"] = Path(engine["model"]).name
    return settings | {"engine": engine}
