"""Text and token ids: the tokenizer, and an answer's text as it grows."""
