"""Speculative decoding by prompt look-up, compared with plain greedy decoding by the same loop and model.

    python -m bench.features.speculation --out bench/results/speculation-cpu.json

The answers of some prompts repeat the prompt (a letter to be rewritten with one change, or to be repeated), the
answers of others do not. The sides alternate in every round, and the cache is emptied before each run. If
they generate different tokens, no figures are reported. The floor of a pass is the time to read every weight
once at the bandwidth measured in the same run.
"""

import time
from functools import partial

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.common.report import Spread, alternate, parser, print_json, print_machine, print_table, refuse
from bench.features.generate import read_bandwidth
from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.prompt_lookup import Generated, generate
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
    lm: CachedModel, prompt: list[int], max_new_tokens: int, num_proposed: int
) -> tuple[float, Generated]:
    """Generates from an empty cache. Returns the seconds, and the result."""
    lm.cache.evict(lm.cache.num_cached)
    start = time.perf_counter()
    found = generate(lm, prompt, max_new_tokens, num_proposed=num_proposed)
    return time.perf_counter() - start, found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default=DEFAULT_MODEL)
    arguments.add_argument("--new-tokens", type=int, default=96)
    arguments.add_argument("--proposed", type=int, default=10)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()

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
            "look-up": partial(run, lm, prompt, options.new_tokens, options.proposed),
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
