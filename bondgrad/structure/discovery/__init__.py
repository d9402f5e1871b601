"""Finding out which outputs depend on which inputs, and noticing when that changes."""
