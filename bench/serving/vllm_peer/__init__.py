"""vLLM and lightkv under the same load on one GPU."""
