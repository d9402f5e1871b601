"""How benchmarks leave their numbers behind."""

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import bondgrad


def save(name: str, numbers: Any) -> None:
    """Write results/NAME.json: the numbers, and what they were measured with."""
    record = {
        "command": " ".join(["python", *sys.argv]),
        "bondgrad": bondgrad.__version__,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "numbers": numbers,
    }
    path = Path(__file__).parent.parent / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path.relative_to(path.parent.parent)}")
