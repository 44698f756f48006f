"""The memory on the device: the allocator, the token table and the K/V pool."""
