"""Attention over per-token indices: decode, prefill, both in one call, and what they share."""
