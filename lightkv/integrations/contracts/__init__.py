"""The interfaces of other inference engines, to the letter, over lightkv's kernels."""
