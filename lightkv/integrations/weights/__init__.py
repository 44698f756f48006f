"""The weights of a model's products, a file for each kind: load, join, shard, bytes, and the product itself."""
