"""The routes, a file each with its body, and what they share on the way to a GenerationSpec."""
