"""One worker process for each rank of a model, as one worker."""
