"""Prefill on compute capability 9, in Gluon: a skeleton, and kinds of K and V that are its hooks."""
