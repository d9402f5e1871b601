"""Properties of a device that decide which code runs."""

import torch


def reading_is_free(device: torch.device) -> bool:
    """Whether a value on this device can be read without waiting for the work queued before it."""
    return device.type == "cpu"


def is_capturing(device: torch.device) -> bool:
    """Whether work on this device is being captured into a CUDA graph instead of executed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
