"""Speculative decoding by prompt look-up, compared with plain greedy decoding by the same loop and model.

    python -m bench.features.speculation --out bench/results/speculation-cpu.json
    python -m bench.features.speculation --passes --out bench/results/speculation-passes-h200.json

The answers of some prompts repeat the prompt (a letter to be rewritten with one change, or to be repeated), the
answers of others do not. The sides alternate in every round, and the cache is emptied before each run. If
they generate different tokens, no figures are reported. The floor of a pass is the time to read every weight
once at the bandwidth measured in the same run. `--verification` chooses by which kernels passes verify
(`prompt_lookup.Verification`).

With `--passes`, no text is generated: passes over a chain of guesses after a long context are timed, verified
in each of the ways, on a model of a published shape with random weights; so it needs no checkpoint. A pass's
time is that of the host's clock until the logits are there. The ways' choices after each guess are compared: of
them, 95 % have to be the same. The fastest way is what `prompt_lookup.VERIFICATION` should be.
"""

import random
import time
from functools import partial
from typing import Any, get_args

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.common.model_shapes import SHAPES, with_layers
from bench.common.random_model import random_model
from bench.common.report import Spread, alternate, parser, print_json, print_machine, print_table, refuse
from bench.features.generate import read_bandwidth
from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.guess_tree import GuessTree
from lightkv.integrations.prompt_lookup import VERIFICATION, Generated, Verification, generate, verify
from lightkv.router.model_files import DEFAULT_MODEL, resolve

SAME = 0.95  # of choices: with random weights many tokens have nearly the same logit
LETTER = (
    "Dear Mr Brown, thank you for your letter of Monday. We have looked at the three chairs that you sent back "
    "and found that the legs of two of them were broken on the way. We will repair both chairs in our workshop "
    "and send all three to your house in Green Street on Friday. If you are not at home on Friday, please call "
    "our office before noon, and we will find another day. Yours sincerely, Anna White"
)
PROMPTS = {
    "rewrite, one change": f"Rewrite this letter. Change Friday to Tuesday, and nothing else.\n\n{LETTER}",
    "say it again": f"Repeat this letter word for word.\n\n{LETTER}",
    "question": "Why is the sky blue during the day, and red in the evening?",
    "story": "Write a story about a lighthouse keeper who finds a map.",
}


def run(
    lm: CachedModel,
    prompt: list[int],
    max_new_tokens: int,
    num_proposed: int,
    verification: Verification = VERIFICATION,
) -> tuple[float, Generated]:
    """Generates from an empty cache. Returns the seconds, and the result."""
    lm.cache.evict(lm.cache.num_cached)
    start = time.perf_counter()
    found = generate(lm, prompt, max_new_tokens, num_proposed=num_proposed, verification=verification)
    return time.perf_counter() - start, found


def pass_times(lm: CachedModel, sequence: Any, tree: GuessTree, way: Verification, count: int) -> Any:
    """Verifies `tree` `count` times. Returns the milliseconds of each pass, and the choices after its nodes."""
    times, chosen = [], None
    for _ in range(count):
        start = time.perf_counter()
        chosen = verify(lm, sequence, tree, way).argmax(-1).cpu()  # waits for the device
        times.append((time.perf_counter() - start) * 1e3)
        lm.cache.shrink([sequence], [len(tree.tokens)])
    return times, chosen


def measure_passes(options: Any) -> None:
    """Times passes over chains of guesses, verified in each way, after each context."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    shape = SHAPES[options.shape]
    layers = options.layers or shape.num_hidden_layers
    model = random_model(with_layers(shape, layers), device, dtype)
    most = max(options.contexts) + max(options.guesses) + 1
    lm = CachedModel(model, most, max_sequences=1, max_entries=most, backend=options.backend)
    print_machine()
    ways, rng = get_args(Verification), random.Random(0)
    compared: dict[str, list[torch.Tensor]] = {way: [] for way in ways}
    rows, results = [], {}
    for context in options.contexts:
        sequence, _ = lm.prefill([rng.randrange(shape.vocab_size) for _ in range(context)])
        for guesses in options.guesses:
            line = [rng.randrange(shape.vocab_size) for _ in range(guesses + 1)]
            tree, name = GuessTree.of_lines(line[0], [line[1:]]), f"{guesses} guesses after {context:,}"
            found: dict[str, list[float]] = {way: [] for way in ways}
            sides = {way: partial(pass_times, lm, sequence, tree, way, options.steps) for way in ways}
            for one in alternate(options.rounds + 1, sides):  # the first round compiles
                for way, (times, chosen) in one.items():
                    found[way] += times
                    compared[way].append(chosen == one[ways[0]][1])
            medians = {way: Spread.of(times[options.steps :]) for way, times in found.items()}
            rows.append([name, *(medians[way].text(".3f") for way in ways)])
            print(*rows[-1], flush=True)
            results[name] = {way: spread._asdict() for way, spread in medians.items()}
        lm.cache.close(sequence, cache=False)
    lm.cache.check()
    for way, choices in compared.items():
        if (same := float(torch.cat(choices).float().mean())) < SAME:
            refuse(f"{same:.2%} of the choices by {way} are those by {ways[0]}; {SAME:.0%} are required")
    print_table(["pass, ms", *ways], rows)
    settings = {"shape": options.shape, "layers": layers, "dtype": str(dtype), "rounds": options.rounds}
    print_json("speculation-passes", {"settings": settings, "passes": results}, options.out)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default=DEFAULT_MODEL)
    arguments.add_argument("--new-tokens", type=int, default=96)
    arguments.add_argument("--proposed", type=int, default=10)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--verification", choices=get_args(Verification), default=VERIFICATION)
    arguments.add_argument("--passes", action="store_true", help="time the passes of each verification")
    arguments.add_argument("--shape", choices=SHAPES, default="llama-3-8b", help="of the model of --passes")
    arguments.add_argument("--layers", type=int, help="fewer than the shape has")
    arguments.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 32768])
    arguments.add_argument("--guesses", type=int, nargs="+", default=[1, 4, 10, 20])
    arguments.add_argument("--steps", type=int, default=10, help="passes of each verification in a round")
    arguments.add_argument("--backend", help="of attention, for --passes; the default is the device's")
    options = arguments.parse_args()
    if options.passes:
        measure_passes(options)
        return

    directory = resolve(options.model, print)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    lm = CachedModel(model, capacity=2048, max_sequences=1)
    print_machine()
    bandwidth = read_bandwidth()
    floor = num_bytes / bandwidth
    print(
        f"floor of a pass: {num_bytes / 1e6:.0f} MB of weights at {bandwidth / 1e9:.1f} GB/s: "
        f"{floor * 1e3:.1f} ms; {options.new_tokens} new tokens, up to {options.proposed} proposed\n"
    )

    header = [
        "prompt",
        "plain, tokens/s",
        "look-up, tokens/s",
        "speed-up",
        "tokens/pass",
        "right",
        "of floor",
    ]
    rows, results = [], {}
    for name, text in PROMPTS.items():
        message = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        run(lm, prompt, 8, options.proposed)
        plain, looked_up, ratios = [], [], []
        sides = {
            "plain": partial(run, lm, prompt, options.new_tokens, 0),
            "look-up": partial(run, lm, prompt, options.new_tokens, options.proposed, options.verification),
        }
        for round_idx, both in enumerate(alternate(options.rounds, sides)):
            (plain_seconds, greedy), (seconds, found) = both.values()
            plain.append(plain_seconds)
            looked_up.append(seconds)
            if found.token_ids != greedy.token_ids:
                refuse(f"{name}: speculation generates other tokens than greedy decoding")
            ratios.append(plain[-1] / looked_up[-1])
            print(f"{name}, round {round_idx + 1}: {plain[-1]:.2f} s, {looked_up[-1]:.2f} s", flush=True)
        lm.cache.check()
        speed = [Spread.of([options.new_tokens / seconds for seconds in side]) for side in (plain, looked_up)]
        ratio = Spread.of(ratios)
        share = found.num_accepted / max(found.num_proposed, 1)
        of_floor = Spread.of(looked_up).median / (found.num_forwards * floor)
        rows.append(
            [
                name,
                speed[0].text(".1f"),
                speed[1].text(".1f"),
                ratio.text(),
                f"{found.tokens_per_forward:.2f}",
                f"{share:.0%} of {found.num_proposed}",
                f"{of_floor:.1f} x",
            ]
        )
        results[name] = {
            "prompt_tokens": len(prompt),
            "new_tokens": options.new_tokens,
            "plain_tokens_per_s": speed[0]._asdict(),
            "lookup_tokens_per_s": speed[1]._asdict(),
            "speedup": ratio._asdict(),
            "passes": found.num_forwards,
            "tokens_per_pass": found.tokens_per_forward,
            "proposed": found.num_proposed,
            "accepted": found.num_accepted,
            "floor_of_a_pass_s": floor,
        }
    print_table(header, rows)
    print_json("speculation", results, options.out)


if __name__ == "__main__":
    main()
