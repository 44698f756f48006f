"""Helpers of several tests: models of the memory, tiny models, a whole service."""
