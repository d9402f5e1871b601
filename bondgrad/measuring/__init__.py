"""Tools to measure a box: evaluations within a budget, spread, noise, rounding, ladders of steps, statistics."""
