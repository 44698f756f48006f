"""Layers that keep a recurrent or a convolutional state: a file for each kind."""
