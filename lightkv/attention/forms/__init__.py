"""How the sequences of a batch hold their tokens, a file for each way."""
