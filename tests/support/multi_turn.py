"""A small trace of conversations whose turns each continue all of the turns before."""

import json
import random
from pathlib import Path

BLOCK = 64  # tokens of a block


def write_conversations(path: Path, seed: int = 0, num: int = 40, turns: int = 8) -> str:
    """Writes a trace with blocks of `BLOCK` tokens: a system prompt that all share, then 4 to 12 blocks a turn.
    Returns its path."""
    rng = random.Random(seed)
    new_blocks = iter(range(100, 1_000_000))
    requests = []
    for conversation in range(num):
        blocks, at = [1, 2], conversation * 1.5
        for _ in range(turns):
            blocks = blocks + [next(new_blocks) for _ in range(rng.randint(4, 12))]
            requests.append((at, len(blocks) * BLOCK, rng.randint(5, 40), blocks))
            at += rng.uniform(3, 9)
    names = ("arrival_seconds", "prompt_tokens", "output_tokens", "hash_ids")
    lines = [json.dumps(dict(zip(names, request, strict=True))) for request in sorted(requests)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)
