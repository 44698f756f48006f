"""Hugging Face's generate with lightkv as its cache, against its own DynamicCache, in one run.

    python -m bench.features.embedding --out bench/results/embedding-cpu.json

The same `model.generate(...)` runs twice: with DynamicCache, and with LightKVCache, which gathers K/V for the
model's own attention. The cases are greedy decoding of one prompt and of a padded batch, four beams,
prompt look-up, and a prompt that lightkv has seen before. The sides alternate in every round. lightkv's cache
is emptied before each run, except in the last case. All sides have to generate the same tokens, else no figures
are reported. "Tokens held" is the most at any time; for DynamicCache it counts every column of every row.
"""

import time
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from bench.common.report import Spread, alternate, parser, print_json, print_machine, print_table, refuse
from bench.features.speculation import LETTER, PROMPTS
from lightkv.integrations.hf_cache import LightKVCache
from lightkv.router.model_files import DEFAULT_MODEL, resolve

DYNAMIC, GATHERED = "DynamicCache", "lightkv, own attention"


class Case(NamedTuple):
    """Texts, the options of `generate`, and whether lightkv has computed the prompts before."""

    texts: list[str]
    options: dict[str, Any]
    seen: bool = False


CASES = {
    "greedy": Case([PROMPTS["rewrite, one change"]], {}),
    "greedy, batch of 4": Case([*list(PROMPTS.values())[1:], LETTER[:100]], {}),
    "4 beams": Case([PROMPTS["rewrite, one change"]], {"num_beams": 4}),
    "assisted": Case([PROMPTS["rewrite, one change"]], {"prompt_lookup_num_tokens": 10}),
    "4 beams, prompt seen before": Case([PROMPTS["rewrite, one change"]], {"num_beams": 4}, seen=True),
}


class Side:
    """A model with one kind of cache, and the most tokens that it held during the last `run`."""

    def __init__(self, model: PreTrainedModel, cache: LightKVCache | None) -> None:
        self.model = model
        self.cache = cache
        self.most_held = 0
        if cache is None:
            model.register_forward_hook(
                lambda model, args, output: self._count_columns(output.past_key_values)
            )
        else:
            cache.kv.on_edits = lambda edits, kept: self._count(cache.kv.num_held)

    def run(self, inputs: dict[str, torch.Tensor], seen: bool, options: dict[str, Any]) -> tuple[float, Any]:
        """Returns the seconds, and the tokens."""
        cache: Any = DynamicCache() if self.cache is None else self.cache
        if self.cache is not None:
            self.cache.reset()
            if not seen:
                self.cache.kv.evict(self.cache.kv.num_cached)
        self.most_held = 0
        start = time.perf_counter()
        output = self.model.generate(  # type: ignore[operator]
            **inputs, past_key_values=cache, do_sample=False, eos_token_id=None, pad_token_id=0, **options
        )
        seconds = time.perf_counter() - start
        if self.cache is not None:
            self.cache.kv.check()
        return seconds, output.tolist()

    def _count_columns(self, cache: Any) -> None:
        rows, _, columns, _ = cache.layers[0].keys.shape if isinstance(cache, DynamicCache) else (0, 0, 0, 0)
        self._count(rows * columns)

    def _count(self, num_held: int) -> None:
        self.most_held = max(self.most_held, num_held)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default=DEFAULT_MODEL)
    arguments.add_argument("--new-tokens", type=int, default=64)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()

    directory = resolve(options.model, print)
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    sides = {
        DYNAMIC: Side(model, None),
        GATHERED: Side(model, LightKVCache(model, capacity=4096)),
    }
    print_machine()
    print(f"{options.new_tokens} new tokens each\n")

    rows, results = [], {}
    for name, case in CASES.items():
        inputs = dict(tokenizer(case.texts, padding=True, return_tensors="pt"))
        inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for side in sides.values():
            side.run(inputs, False, {**case.options, "max_new_tokens": 2})
        settings = {**case.options, "max_new_tokens": options.new_tokens}
        runs = {key: partial(side.run, inputs, case.seen, settings) for key, side in sides.items()}
        for round_idx, found in enumerate(alternate(options.rounds, runs)):
            for key, (taken, _) in found.items():
                seconds[key].append(taken)
            if found[GATHERED][1] != found[DYNAMIC][1]:
                refuse(f"{name}: {GATHERED} generates other tokens than {DYNAMIC}")
            shown = ", ".join(f"{seconds[side][-1]:.2f} s" for side in sides)
            print(f"{name}, round {round_idx + 1}: {shown}", flush=True)
        results[name] = {}
        for side, taken_by in seconds.items():
            ratio = Spread.of([base / own for base, own in zip(seconds[DYNAMIC], taken_by, strict=True)])
            held, of_all = sides[side].most_held, Spread.of(taken_by)
            rows.append([name, side, of_all.text(), ratio.text(), str(held)])
            results[name][side] = {
                "seconds": of_all._asdict(),
                "times_as_fast": ratio._asdict(),
                "most_tokens_held": held,
            }
        results[name]["prompt_tokens"] = int(inputs["attention_mask"].sum())
    print_table(["generate", "cache", "seconds", "times as fast", "tokens held"], rows)
    print_json("embedding", results, options.out)


if __name__ == "__main__":
    main()
