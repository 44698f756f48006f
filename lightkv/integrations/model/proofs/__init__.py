"""Finds out what parts of a model compute, from runs of their own code on noise, before it is replaced."""
