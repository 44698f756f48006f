"""Writes a checkpoint with random weights, and a tokenizer that has a text for every id.

    python -m bench.common.random_checkpoint /var/tmp/llama-3-8b --shape llama-3-8b
    python -m bench.common.random_checkpoint /var/tmp/llama-3-8b-fp8 --shape llama-3-8b --format fp8

It is for benchmarks that start from a directory, such as those of `lightkv serve`. A checkpoint of Llama-3-8B's
shape takes 16 GB, and less with fewer --layers.
"""

import argparse
import json
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from bench.common.random_model import random_model

from .model_shapes import SHAPES, with_layers
from .quantised_checkpoint import FORMATS, save_in

NAMES = (*FORMATS, "mxfp4")


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Writes a byte-level tokenizer: the 256 single bytes, then the words " 256", " 257" and so on."""
    words = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(f"Ġ{number}" for number in range(256, vocab_size)),
    ]
    tokenizer = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    # vLLM does not load a tokenizer without the name of its class.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config) + "\n")


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("directory", type=Path)
    made.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    made.add_argument("--layers", type=int, help="fewer layers than the shape has")
    made.add_argument("--max-length", type=int, help="most tokens of a sequence; default: the shape's own")
    made.add_argument(
        "--format", choices=NAMES, help="8 or 4 bits for the weights of the layers; default: bf16"
    )
    options = made.parse_args()
    options.directory.mkdir(parents=True)
    shape = SHAPES[options.shape]
    config = with_layers(shape, options.layers or shape.num_hidden_layers)
    config.max_position_embeddings = options.max_length or shape.max_position_embeddings
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(config, device, torch.bfloat16)
    if options.format:
        save_in(options.format, model, options.directory)
    else:
        model.save_pretrained(options.directory)
    save_tokenizer(options.directory, config.vocab_size)
    num_bytes = sum(file.stat().st_size for file in options.directory.iterdir())
    print(f"{options.directory}: {num_bytes / 1e9:.1f} GB, {config.num_hidden_layers} layers")


if __name__ == "__main__":
    main()
