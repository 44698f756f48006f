"""Perplexity of a long text in constant memory: with sinks, the window alone, and full attention.

    python -m bench.streaming --out bench/results/streaming-cpu.json

SmolLM2 reads the language reference that every CPython carries (`pydoc_data.topics`, its topics in order of
their names), each token predicted from what is held. Full attention ends where the model's context does.
"Window alone" is plain truncation of the oldest tokens; it holds as many as window and sinks together. No
figure unless the three agree on the tokens before the window first moves, and the memory is right in the end.
"""

import hashlib
import math
import time
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch

from bench.report import parser, print_json, print_machine, print_table, refuse
from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.streaming import Stream, Window
from lightkv.router.tokenizer import Tokenizer
from lightkv.router.weights import DEFAULT_MODEL, load_model, resolve

AGREEMENT = 1e-3  # most that two losses of one token may differ, in nats


class Reading(NamedTuple):
    """A text read once. `losses`: of every token but the first, in nats."""

    losses: torch.Tensor
    seconds: float
    bytes_held: int


def long_text() -> str:
    """The language reference's topics, one after the other."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def token_losses(lm: CachedModel, ids: list[int], window: Window) -> torch.Tensor:
    """The negative log likelihood of every token but the first, as a stream sees it: float32 `[n - 1]`."""
    flow = Stream(lm, window, ids[:1])
    targets = torch.tensor(ids[1:], device=lm.model.device)
    losses = []
    at = 0
    try:
        for logits in flow.feed(ids[:-1], all_logits=True):
            due = targets[at : at + len(logits)]
            losses.append(torch.nn.functional.cross_entropy(logits.float(), due, reduction="none"))
            at += len(logits)
    finally:
        flow.close()
    return torch.cat(losses)


def read(model: Any, ids: list[int], window: Window) -> Reading:
    """In a pool that holds the window and no token more."""
    lm = CachedModel(model, window.capacity, max_sequences=1, exact_positions=True)
    start = time.perf_counter()
    losses = token_losses(lm, ids, window)
    seconds = time.perf_counter() - start
    lm.cache.check()
    if lm.cache.num_free != lm.cache.capacity:
        refuse(f"{window} left {lm.cache.num_held} tokens held")
    return Reading(losses, seconds, window.capacity * lm.cache.memory.pool.spec.bytes_per_token)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, default=16384)
    arguments.add_argument("--window", type=int, default=1024, help="tokens held, sinks included")
    arguments.add_argument("--sinks", type=int, default=4)
    arguments.add_argument("--stride", type=int, default=256)
    arguments.add_argument("--block", type=int, default=2048, help="tokens a line of the table")
    options = arguments.parse_args()

    print_machine()
    directory = resolve(DEFAULT_MODEL, print)
    model = load_model(directory, torch.device("cpu"), torch.float32, print)
    context = model.config.max_position_embeddings
    text = long_text()
    ids = Tokenizer(directory).encode(text)[: options.tokens].tolist()
    if len(ids) < options.tokens:
        refuse(f"the text has {len(ids)} tokens, and {options.tokens} are to be read")
    digest = hashlib.sha256(text.encode()).hexdigest()
    print(f"{len(ids):,} tokens of a text of {len(text):,} characters, SHA-256 {digest[:16]}\n", flush=True)

    full = min(context, len(ids))
    readings = {
        "sinks + window": read(
            model, ids, Window(options.window - options.sinks, options.sinks, options.stride)
        ),
        "window alone": read(model, ids, Window(options.window, 0, options.stride)),
        "full, to its context": read(model, ids[:full], Window(full, 0, 1)),
    }
    before = options.window - 1
    reference = readings["full, to its context"].losses[:before]
    for name, reading in readings.items():
        apart = float((reading.losses[:before] - reference).abs().max())
        if not apart <= AGREEMENT:
            refuse(f"{name}: {apart:.2g} nats from full attention before its window moves")

    rows, blocks = [], {name: [] for name in readings}  # type: ignore[var-annotated]
    for start in range(0, len(ids), options.block):
        cells = []
        for name, reading in readings.items():
            # losses[i] is of token i + 1
            part = reading.losses[max(start - 1, 0) : start + options.block - 1].double()
            complete = start + options.block <= len(reading.losses) + 1
            blocks[name].append(math.exp(part.mean()) if complete else None)
            cells.append(f"{blocks[name][-1]:.2f}" if complete else "–")
        rows.append([f"{start:,} to {start + options.block:,}", *cells])
    past = [reading.losses[full - 1 :].double() for reading in readings.values()]
    rows.append(
        ["past the context", *(f"{math.exp(part.mean()):.2f}" if len(part) else "–" for part in past)]
    )
    rows.append(["K/V held, MB", *(f"{reading.bytes_held / 1e6:.0f}" for reading in readings.values())])
    rows.append(["seconds", *(f"{reading.seconds:.0f}" for reading in readings.values())])
    print_table(["perplexity of tokens", *readings], rows)

    settings = {key: getattr(options, key) for key in ("tokens", "window", "sinks", "stride", "block")}
    results = {
        name: {
            "perplexity_by_block": blocks[name],
            "perplexity_past_context": math.exp(part.mean()) if len(part) else None,
            "bytes_held": reading.bytes_held,
            "seconds": reading.seconds,
        }
        for (name, reading), part in zip(readings.items(), past, strict=True)
    }
    document = {"settings": {**settings, "context": context, "text_sha256": digest}, "readings": results}
    print_json("streaming", document, options.out)


if __name__ == "__main__":
    main()
