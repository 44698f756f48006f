"""The model's side of a step: loading, sampling, CUDA graphs and the runner. All of it needs torch."""
