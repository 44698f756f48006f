"""Times the generation step of a stream, whose row is a ring with rotated sinks, against a plain sequence.

    python -m bench.features.stream_step --out bench/results/stream-step-h200.json

Both are CUDA graphs of one model's step: the stream's at several positions, up to a million tokens, the plain
sequence's at the window's length. They are replayed in turns until each is steady. "Whole steps" are those of
the host, from one token to the next, with the wait for its logits. The model has random weights.
"""

import statistics
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.common.device_clock import CapturedStep, Clock
from bench.common.report import parser, print_json, print_machine, refuse, save_json
from lightkv.attention import Batch, BatchShape, StaticStep
from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.model.attention_call import compute
from lightkv.integrations.model.hf_model import PackedStep
from lightkv.integrations.streaming import Ring, Stream

SHAPE = {  # Llama-3.2-1B's layers
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "vocab_size": 32_000,
}
WINDOWS = (Ring(4, 2044, 64), Ring(4, 4092, 1))
POSITIONS = (10_000, 100_000, 1_000_000)
TOKEN = 7


def measure(model: Any, window: Ring, clock: Clock, steps: int) -> dict[str, Any]:
    """Returns the times of a plain step, of the stream's steps at each position, and of its whole steps."""
    lm = CachedModel(
        model, 3 * window.capacity, max_sequences=2, max_entries=window.capacity, exact_positions=True
    )
    stream = Stream(lm, window, [1])
    for _ in stream.feed([TOKEN] * (window.capacity + 1)):
        pass
    (ring_graph,) = lm._ring_graphs.values()
    plain = lm.cache.open([1])
    lm.forward([plain], [[TOKEN] * window.capacity])
    static = StaticStep(BatchShape.of_decodes(1), lm.cache.memory)
    loaded = static.load(Batch.of([plain.row], [window.capacity - 1], [1], 0))
    ids = torch.full((1,), TOKEN, device="cuda")

    def plain_step() -> None:
        compute(model, ids, loaded.position_ids, PackedStep(loaded, lm.backends), None)

    with torch.no_grad():
        plain_step()
        plain_graph = CapturedStep(plain_step)
    found: dict[str, Any] = {"positions": {}}
    for position in (window.capacity + 1, *POSITIONS):
        ring_graph.load([stream.sequence.row], [position])  # the stream's next step loads its own again
        times = clock.replay_in_turns({"plain": plain_graph, "stream": ring_graph._graph})
        found["positions"][position] = times = {name: timing._asdict() for name, timing in times.items()}
        times["ratio"] = times["stream"]["median"] / times["plain"]["median"]
    whole = []
    for _ in range(steps):
        begin = time.perf_counter()
        for logits in stream.feed([TOKEN]):
            int(logits[0, 0] > 0)  # waits for the device
        whole.append((time.perf_counter() - begin) * 1e6)
    found["whole_step_us"] = statistics.median(whole)
    stream.close()
    lm.cache.close(plain)
    lm.cache.check()
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=20, help="replays whose median counts")
    arguments.add_argument("--steps", type=int, default=200, help="whole steps")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        refuse("this replays CUDA graphs, and needs a CUDA device")
    print_machine()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).eval()
    clock = Clock(options.repeats)
    results: dict[str, Any] = {"settings": SHAPE | {"repeats": options.repeats}, "windows": {}}
    for window in WINDOWS:
        name = f"{window.size} tokens, {window.sinks} sinks, stride {window.stride}"
        results["windows"][name] = found = measure(model, window, clock, options.steps)
        for position, times in found["positions"].items():
            print(
                f"{name}, at {position:,}: plain {times['plain']['median']:.0f} µs, stream "
                f"{times['stream']['median']:.0f} µs ({times['ratio']:.3f})",
                flush=True,
            )
        print(f"{name}: {found['whole_step_us']:.0f} µs a whole step", flush=True)
        save_json("stream-step", results, options.out)
    print_json("stream-step", results, options.out)


if __name__ == "__main__":
    main()
