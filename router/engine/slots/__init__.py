"""How many slots requests hold, and will hold, where some layers see a window or a chunk only."""
