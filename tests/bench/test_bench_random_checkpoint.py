"""The tokenizer of a checkpoint with random weights."""

from pathlib import Path

from bench.common import random_checkpoint
from lightkv.router.text.tokenizer import Tokenizer


def test_every_id_of_the_random_checkpoint_has_a_text_of_its_own(tmp_path: Path) -> None:
    random_checkpoint.save_tokenizer(tmp_path, 1000)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64, "vocab_size": 1000}')
    tokenizer = Tokenizer(tmp_path)
    pieces = {tokenizer.token_bytes(token_id) for token_id in range(1000)}
    assert len(pieces) == 1000
    assert b"" not in pieces
    assert tokenizer.decode([300, 999]) == " 300 999"
