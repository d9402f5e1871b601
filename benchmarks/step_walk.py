"""The way of one default training step through the package: which files, how many frames, how often back and forth.

    python benchmarks/step_walk.py [--show]

A step in the middle of training, without a trial: forward and backward pass of a `BlackBox` with its defaults. A frame
is a call of a function of bondgrad. A switch is a call from one file into another. `--show` prints every call.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from record import save
from torch import nn

import bondgrad

PACKAGE = Path(bondgrad.__file__).parent


class Walk:
    """Calls of functions of the package, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str, str]] = []  # depth, file, function
        self._stack: list[str] = []
        self.switches = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """For `sys.setprofile`."""
        path = Path(frame.f_code.co_filename)
        if PACKAGE not in path.parents:
            return
        file = str(path.relative_to(PACKAGE))
        if event == "call":
            self.calls.append((len(self._stack), file, frame.f_code.co_name))
            self.switches += bool(self._stack) and self._stack[-1] != file
            self._stack.append(file)
        elif event == "return" and self._stack:
            self._stack.pop()


def walk_of(step: Callable[[], Any]) -> Walk:
    """What a call goes through."""
    walk = Walk()
    sys.setprofile(walk)
    torch.autograd.set_multithreading_enabled(False)
    try:
        step()
    finally:
        sys.setprofile(None)
    return walk


def main() -> None:
    """Walk, print, save."""
    torch.manual_seed(0)
    box = bondgrad.BlackBox(nn.Sequential(nn.Linear(5, 100), nn.Tanh(), nn.Linear(100, 5)), 5, seed=0)
    model = nn.Sequential(nn.Linear(8, 5), box, nn.Linear(5, 1))

    def step() -> None:
        model(torch.randn(64, 8)).square().mean().backward()

    evaluations = 0
    while True:
        walked = walk_of(step)
        before, evaluations = evaluations, box.stats.evaluations
        if evaluations - before == 64 * 11 and evaluations > 64 * 11 * 100:  # no trial, and well after the start
            break
    files = sorted({file for _, file, _ in walked.calls})
    if "--show" in sys.argv:
        for depth, file, name in walked.calls:
            print(f"{'  ' * depth}{file}: {name}")
    numbers = {"files": len(files), "frames": len(walked.calls), "switches": walked.switches, "names": files}
    print(numbers)
    if "--show" not in sys.argv:
        save("step_walk", numbers)


if __name__ == "__main__":
    main()
