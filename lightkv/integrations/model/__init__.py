"""A Hugging Face causal LM on lightkv's attention: what a layer computes, and the fused forms of it."""
