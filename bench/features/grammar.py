"""Compares libraries of constrained decoding on the default model's tokenizer: compiling, masks, memory.

    python -m bench.features.grammar --out bench/results/grammar-cpu.json

Every library compiles each grammar several times, and follows one text of it: a mask for each token, then the
token. A run is refused if a library does not accept the text. xgrammar is measured where it is installed.
"""

import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from bench.common.report import parser, print_json, print_machine, print_table, refuse
from lightkv.router.config import EngineConfig
from lightkv.router.model_files import resolve
from lightkv.router.sampling_params import Grammar
from lightkv.router.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 80},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON}
ANNA = {"name": "Anna Example", "age": 41, "email": "anna@example.org", "tags": ["red", "blue"]}
CASES = {
    "one object": (Grammar("json_schema", json.dumps(PERSON)), json.dumps(ANNA)),
    "a list of objects": (Grammar("json_schema", json.dumps(PEOPLE)), json.dumps([ANNA] * 6)),
    "regex": (Grammar("regex", r"[a-z]{2,8}(-[a-z]{2,8}){3}"), "abc-def-gh-ijklm"),
}
COMPILATIONS = 9


class Library:
    """One library: how it compiles a grammar to a matcher, makes a mask, and takes a token."""

    def __init__(
        self,
        compile_grammar: Callable[[Grammar], Any],
        mask: Callable[[Any], None],
        take: Callable[[Any, int], bool],
    ) -> None:
        self.compile = compile_grammar
        self.mask = mask
        self.take = take


def llguidance_library(directory: Path, vocab_size: int, end_id: int) -> Library:
    """Returns llguidance with the service's limits and a mask in memory."""
    from lightkv.router.text.grammars import ModelTokens

    tokens = ModelTokens.load(directory, vocab_size)
    words = np.zeros((vocab_size + 31) // 32, np.int32)
    return Library(
        tokens.compile,
        lambda matcher: matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes),
        lambda matcher, token: matcher.consume_token(token),
    )


def xgrammar_library(directory: Path, vocab_size: int, end_id: int) -> Library:
    """Returns xgrammar without its cache of compiled grammars."""
    import xgrammar
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    info = xgrammar.TokenizerInfo.from_huggingface(fast, vocab_size=vocab_size, stop_token_ids=[end_id])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    bits = xgrammar.allocate_token_bitmask(1, vocab_size)

    def compiled(grammar: Grammar) -> Any:
        if grammar.kind == "regex":
            return xgrammar.GrammarMatcher(compiler.compile_regex(grammar.text))
        return xgrammar.GrammarMatcher(compiler.compile_json_schema(grammar.text, any_whitespace=True))

    return Library(
        compiled,
        lambda matcher: matcher.fill_next_token_bitmask(bits),
        lambda matcher, token: matcher.accept_token(token),
    )


def measure(library: Library, grammar: Grammar, ids: list[int]) -> dict[str, float]:
    """Returns the milliseconds of a compilation, and of the masks along a text. Refuses a text that the library
    does not accept."""
    compiling, first, masks = [], [], []
    for _ in range(COMPILATIONS):
        begun = time.perf_counter()
        matcher = library.compile(grammar)
        compiling.append(1e3 * (time.perf_counter() - begun))
        for place, token in enumerate(ids):
            begun = time.perf_counter()
            library.mask(matcher)
            (masks if place else first).append(1e3 * (time.perf_counter() - begun))
            if not library.take(matcher, token):
                refuse(f"token {place} of the text is not accepted")
    masks.sort()
    return {
        "compile_ms": statistics.median(compiling),
        "first_mask_ms": statistics.median(first),
        "mask_ms": statistics.median(masks),
        "mask_p99_ms": masks[int(0.99 * len(masks))],
    }


def resident() -> float:
    """Returns this process's resident memory in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def main() -> None:
    """Runs the benchmark from the command line."""
    args = parser(__doc__).parse_args()
    directory = resolve(EngineConfig.model, print)
    tokenizer = Tokenizer(directory)
    end_id = min(tokenizer.eos_ids)
    print_machine()
    makers = {"llguidance": llguidance_library, "xgrammar": xgrammar_library}
    encoder = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    results, rows = [], []
    for name, make in makers.items():
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed")
            continue
        before, begun = resident(), time.perf_counter()
        library = make(directory, tokenizer.vocab_size, end_id)
        ready, memory = time.perf_counter() - begun, resident() - before
        for case, (grammar, text) in CASES.items():
            ids = encoder.encode(text, add_special_tokens=False).ids
            found = measure(library, grammar, ids)
            result = {
                "library": name,
                "version": version(name),
                "grammar": case,
                "ready_s": ready,
                "memory_mib": memory,
                **found,
            }
            results.append(result)
            rows.append([name, case, *(f"{value:.3f}" for value in (ready, memory, *found.values()))])
    header = (
        "library",
        "grammar",
        "ready s",
        "memory MiB",
        "compile ms",
        "first mask ms",
        "mask ms",
        "p99 ms",
    )
    print_table(header, rows)
    print_json("grammar", results, args.out)


if __name__ == "__main__":
    main()
