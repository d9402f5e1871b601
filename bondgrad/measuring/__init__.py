"""Measuring a box: within a budget, without a trace; spread, noise, rounding, ladders of steps, statistics."""
