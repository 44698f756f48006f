"""Perplexity of a long text in constant memory: with sinks, with the window alone, and with full attention.

    python -m bench.features.streaming --out bench/results/streaming-cpu.json

SmolLM2 reads the language reference that CPython includes (`pydoc_data.topics`, its topics in order of their
names), and each token is predicted from the tokens held. Full attention ends at the model's context. "Window
alone" truncates the oldest tokens, and holds as many tokens as window and sinks together.

A control tells a hard passage from a stream that drifts. In some of the text's strides, evenly spread, the last
tokens up to the window's size are computed again, as a text of their own. Its losses stand beside the stream's
for the same tokens. After the text the stream continues to generate, always the likeliest token.

No figures are reported unless all readings agree on the tokens before the window first moves, and the memory is
right at the end.
"""

import hashlib
import math
import time
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch

from bench.common.report import parser, print_json, print_machine, print_table, refuse
from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.streaming import Ring, Stream
from lightkv.router.model.loader import load_model
from lightkv.router.model_files import DEFAULT_MODEL, resolve
from lightkv.router.text.tokenizer import Tokenizer

AGREEMENT = 1e-3  # the most that two losses of one token may differ, in nats


class Reading(NamedTuple):
    """The losses of one text, in nats: one for each token but the first, NaN for tokens that were skipped."""

    losses: torch.Tensor
    seconds: float
    bytes_held: int


class Generation(NamedTuple):
    """Tokens generated after a text: their number, their last position, and how many tokens were held."""

    num_tokens: int
    last_position: int
    least_held: int
    most_held: int
    seconds: float


def long_text() -> str:
    """Returns the topics of the language reference, one after the other."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def token_losses(lm: CachedModel, ids: list[int], window: Ring) -> torch.Tensor:
    """Returns the negative log likelihood of every token but the first, in a stream: float32 `[n - 1]`."""
    flow = Stream(lm, window, ids[:1])
    try:
        return read_on(flow, ids, lm.model.device)
    finally:
        flow.close()


def read_on(flow: Stream, ids: list[int], device: torch.device) -> torch.Tensor:
    """Returns `token_losses` of a new stream, which has read all but the last token afterwards."""
    targets = torch.tensor(ids[1:], device=device)
    losses = []
    start = 0
    for logits in flow.feed(ids[:-1], all_logits=True):
        expected = targets[start : start + len(logits)]
        losses.append(torch.nn.functional.cross_entropy(logits.float(), expected, reduction="none"))
        start += len(logits)
    return torch.cat(losses)


def generate_on(lm: CachedModel, flow: Stream, token: int, count: int) -> Generation:
    """Generates the likeliest `count` tokens after `token`, one in each step."""
    held = []
    start = time.perf_counter()
    for _ in range(count):
        (logits,) = flow.feed([token])
        token = int(logits[-1].argmax())
        held.append(lm.cache.num_held)
    seconds = time.perf_counter() - start
    return Generation(count, flow.position - 1, min(held), max(held), seconds)


def read(
    model: Any, ids: list[int], window: Ring, num_generated: int = 0
) -> tuple[Reading, Generation | None]:
    """Reads `ids` in a pool of exactly the window's capacity, then generates `num_generated` tokens."""
    lm = CachedModel(model, window.capacity, max_sequences=1, exact_positions=True)
    flow = Stream(lm, window, ids[:1])
    start = time.perf_counter()
    losses = read_on(flow, ids, model.device)
    seconds = time.perf_counter() - start
    generation = generate_on(lm, flow, ids[-1], num_generated) if num_generated else None
    flow.close()
    lm.cache.check()
    if lm.cache.num_free != lm.cache.capacity:
        refuse(f"{window} left {lm.cache.num_held} tokens held")
    return Reading(losses, seconds, window.capacity * lm.cache.memory.pool.spec.bytes_per_token), generation


def recompute(model: Any, ids: list[int], num_held: int, stride: int, every: int) -> Reading:
    """Computes every `every`-th stride again, as a text of the `num_held` tokens up to the stride's end."""
    lm = CachedModel(model, num_held, max_sequences=1, exact_positions=True)
    window = Ring(0, num_held, num_held)  # never moves, since no text is longer
    losses = torch.full((len(ids) - 1,), torch.nan)
    start = time.perf_counter()
    for end in range(stride * every, len(ids), stride * every):
        own = token_losses(lm, ids[max(end - num_held, 0) : end + 1], window)
        losses[end - stride : end] = own[-stride:].cpu()
    seconds = time.perf_counter() - start
    return Reading(losses, seconds, num_held * lm.cache.memory.pool.spec.bytes_per_token)


def perplexity(losses: torch.Tensor) -> float | None:
    """Returns the perplexity of the losses that are not NaN, None if all are."""
    known = losses[~losses.isnan()].double()
    return math.exp(known.mean()) if len(known) else None


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default=DEFAULT_MODEL)
    arguments.add_argument("--tokens", type=int, default=16384)
    arguments.add_argument("--window", type=int, default=1024, help="tokens held, sinks included")
    arguments.add_argument("--sink-tokens", type=int, default=4)
    arguments.add_argument("--stride", type=int, default=256)
    arguments.add_argument("--block", type=int, default=2048, help="tokens in each line of the table")
    arguments.add_argument("--control", type=int, default=4, help="one of as many strides is computed again")
    arguments.add_argument(
        "--generate", type=int, default=256, help="tokens after the text; 16384 is twice SmolLM2's context"
    )
    options = arguments.parse_args()

    print_machine()
    directory = resolve(options.model, print)
    model = load_model(directory, torch.device("cpu"), torch.float32, print)
    context = model.config.max_position_embeddings
    text = long_text()
    ids = Tokenizer(directory).encode(text)[: options.tokens].tolist()
    if len(ids) < options.tokens:
        refuse(f"the text has only {len(ids)} tokens, and --tokens asks for {options.tokens}")
    digest = hashlib.sha256(text.encode()).hexdigest()
    print(f"{len(ids):,} tokens of a text of {len(text):,} characters, SHA-256 {digest[:16]}\n", flush=True)

    full = min(context, len(ids))
    streaming = Ring(options.sink_tokens, options.window - options.sink_tokens, options.stride)
    streamed, generation = read(model, ids, streaming, options.generate)
    recomputed = recompute(model, ids, options.window, options.stride, options.control)
    readings = {
        "sinks + window": streamed,
        "window alone": read(model, ids, Ring(0, options.window, options.stride))[0],
        "full, to its context": read(model, ids[:full], Ring(0, full, 1))[0],
        "recomputed, in part": recomputed,
        "sinks + window, that part": streamed._replace(
            losses=streamed.losses.masked_fill(recomputed.losses.isnan(), torch.nan)
        ),
    }
    before = options.window - 1
    reference = readings["full, to its context"].losses[:before]
    for name, reading in readings.items():
        apart = float((reading.losses[:before] - reference).abs().nan_to_num(0.0).max())
        if not apart <= AGREEMENT:
            refuse(f"{name}: {apart:.2g} nats from full attention before its window moves")
    if generation is not None and generation.most_held > streaming.capacity:
        refuse(f"{generation.most_held} tokens held while generating, in a window of {streaming.capacity}")

    rows, blocks = [], {name: [] for name in readings}  # type: ignore[var-annotated]
    for start in range(0, len(ids), options.block):
        for name, reading in readings.items():
            # losses[i] is of token i + 1
            part = reading.losses[max(start - 1, 0) : start + options.block - 1]
            complete = start + options.block <= len(reading.losses) + 1
            blocks[name].append(perplexity(part) if complete else None)
        cells = [shown(values[-1]) for values in blocks.values()]
        rows.append([f"{start:,} to {start + options.block:,}", *cells])
    past = {name: perplexity(reading.losses[full - 1 :]) for name, reading in readings.items()}
    rows.append(["past the context", *(shown(value) for value in past.values())])
    rows.append(["K/V held, MB", *(f"{reading.bytes_held / 1e6:.0f}" for reading in readings.values())])
    rows.append(["seconds", *(f"{reading.seconds:.0f}" for reading in readings.values())])
    print_table(["perplexity of tokens", *readings], rows)
    if generation is not None:
        print(
            f"\n{generation.num_tokens:,} tokens generated after it, to position {generation.last_position:,}: "
            f"{generation.least_held:,} to {generation.most_held:,} held, {generation.seconds:.0f} s"
        )

    names = ("tokens", "window", "sink_tokens", "stride", "block", "control")
    settings = {name: getattr(options, name) for name in names}
    results = {
        name: {
            "perplexity_by_block": blocks[name],
            "perplexity_past_context": past[name],
            "bytes_held": reading.bytes_held,
            "seconds": reading.seconds,
        }
        for name, reading in readings.items()
    }
    document = {
        "settings": {**settings, "context": context, "text_sha256": digest},
        "readings": results,
        "generation": None if generation is None else generation._asdict(),
    }
    print_json("streaming", document, options.out)


if __name__ == "__main__":
    main()
