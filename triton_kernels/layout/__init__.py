"""Where tokens and heads lie: entries of rows, flags of slots, names of formats, strides. Its files import
nothing of lightkv and no torch, because processes without torch need them."""
