"""Kernels of layers with a state per sequence: short convolutions and the gated delta rule. States lie in
pools, by slot: a sequence reads one slot, and writes the same one or another. Slot 0 is never written."""
