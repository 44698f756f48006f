"""Loading a model in part: the text half of a wrapper, and layers whose weights are quantised."""
