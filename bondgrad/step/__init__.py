"""One training step: forward, backward, trials, state and counters."""
