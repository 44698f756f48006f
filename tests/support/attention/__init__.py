"""What the tests of the attention kernels, and of the steps around them, share."""
