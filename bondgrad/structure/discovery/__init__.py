"""Finding out the structure of a box from evaluations: its pattern of dependencies, or the length of its memory."""
