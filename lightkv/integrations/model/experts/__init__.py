"""Mixtures of experts on lightkv: how routers choose, and how the rows of the experts are ordered and summed."""
