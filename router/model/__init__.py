"""The model's side of a step: loading, sampling, CUDA graphs and the runner. What needs torch stands here."""
