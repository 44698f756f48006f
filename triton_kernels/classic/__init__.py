"""PagedAttention v1 and v2, with their published signatures."""
