"""The device's half of the memory manager: the allocator, the token table and the K/V pool."""
