"""Calling the user's function: its signature, array types, state and limits, and checks of its inputs and outputs."""
