"""Small tokenizers of the kinds that models have, by what their decoders do with spaces and bytes."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from lightkv.router.text.tokenizer import Tokenizer

from .tiny_files import byte_tokenizer

_WORDS = [
    "The",
    "capital",
    "of",
    "France",
    "is",
    "Paris",
    "A",
    "house",
    "a",
    "home",
    "def",
    "main",
    "one",
    "two",
]
_WORDS += ["return"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SPECIAL = ["<unk>", "<s>", "</s>"]
_REPLACE, _FUSE, _STRIP = decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)
# The decoders of pieces whose spaces are ▁, and whether a text gets one at its beginning.
DECODERS = {
    "llama": (decoders.Sequence([_REPLACE, decoders.ByteFallback(), _FUSE, _STRIP]), True),
    "gemma": (decoders.Sequence([_REPLACE, decoders.ByteFallback(), _FUSE]), False),
    "metaspace": (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "always")]), True),
    "first": (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "first")]), True),
}


def _of_pieces(kind: str) -> tokenizers.Tokenizer:
    decoder, begins_with_space = DECODERS[kind]
    pieces = [
        "▁",
        "▁▁▁▁",
        ".",
        ",",
        "é",
        "A",
        *(f"▁{word}" for word in _WORDS),
        *"abcdefghijklmnopqrstuvwxyz():",
    ]
    scores = [(token, 0.0) for token in [*_SPECIAL, *_BYTES]]
    scores += [(piece, -1.0 if len(piece) > 1 else -9.0) for piece in dict.fromkeys(pieces)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(scores, 0, byte_fallback=True))
    before = [normalizers.Prepend("▁")] if begins_with_space else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(_SPECIAL)
    return tokenizer


def _of_word_parts() -> tokenizers.Tokenizer:
    pieces = ["[UNK]", *_WORDS, ".", "##s", "##e", "##d"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece(dict(zip(pieces, range(99), strict=False))))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _of_words() -> tokenizers.Tokenizer:
    """Without a decoder: the words are joined by spaces."""
    words = dict(zip(["<unk>", *_WORDS], range(99), strict=False))
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def save_pieces(directory: Path, kind: str) -> Path:
    """Saves the tokenizer of a kind: one of DECODERS, "words", "word parts" or "bytes"."""
    made = {"words": _of_words, "word parts": _of_word_parts, "bytes": byte_tokenizer}
    tokenizer = _of_pieces(kind) if kind in DECODERS else made[kind]()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 1024, "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def piece_tokenizer(directory: Path, kind: str) -> Tokenizer:
    """Returns the tokenizer that `save_pieces` saves."""
    return Tokenizer(save_pieces(directory, kind))
