"""Kernels of layers that keep a recurrent or a convolutional state."""
