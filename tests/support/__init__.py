"""What several tests use: models of the memory, tiny models, a whole service."""
