"""Mixtures of experts on lightkv: how routers choose, and how rows are ordered and summed."""
