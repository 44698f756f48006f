"""One model on several ranks, each a process with its own device: the group, its sums, and who holds which
weights."""
