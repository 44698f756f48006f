"""The tests, in a folder for each room of the product; what several of them use is in `support`."""
