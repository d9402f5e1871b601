"""The user's function: its signature, its arrays, its memory, its limits, and checks of its answers."""
