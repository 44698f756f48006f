"""Writes a model of Llama-3-8B's shape with random weights, and a tokenizer that has a text for every id.

    python -m bench.common.random_checkpoint /var/tmp/llama-3-8b

For benchmarks of what starts from a directory: `lightkv serve`, and others. Some 16 GB; with --layers less.
"""

import argparse
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from bench.serving.decode_step import LLAMA_3_8B
from lightkv.router.model.loader import random_model


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level tokenizer: the 256 bytes, and then the words " 256", " 257" …"""
    words = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(f"Ġ{number}" for number in range(256, vocab_size)),
    ]
    tokenizer = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("directory", type=Path)
    made.add_argument("--layers", type=int, default=LLAMA_3_8B.num_hidden_layers)
    options = made.parse_args()
    options.directory.mkdir(parents=True)
    LLAMA_3_8B.num_hidden_layers = options.layers
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(LLAMA_3_8B, device, torch.bfloat16)
    model.save_pretrained(options.directory)
    save_tokenizer(options.directory, LLAMA_3_8B.vocab_size)
    num_bytes = sum(file.stat().st_size for file in options.directory.iterdir())
    print(f"{options.directory}: {num_bytes / 1e9:.1f} GB, {options.layers} layers")


if __name__ == "__main__":
    main()
