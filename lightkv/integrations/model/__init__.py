"""A Hugging Face causal LM on lightkv's attention: probing it, binding it, and its fused forward passes."""
