"""How often is the first call of a vectorised function in a process wrong in its last digits?

    python benchmarks/first_calls.py --as-intel --label "Intel's code"
    python benchmarks/first_calls.py --as-intel --after-one-element --label "Intel's code, after one element"

torch computes tanh, exp, sqrt and others with oneMKL, and divides large tensors among its threads. oneMKL 2024.2
chooses the code of these functions in their first call. If two threads make that call at the same time, one of them may
run code of low accuracy for its part of the tensor (https://github.com/pytorch/pytorch/issues/188792). The second call
is right. Here each first call is made in a forked process of its own and compared with the second one.

`--after-one-element` calls tanh with one element before, whatever the function: one element is never divided among
threads. `bondgrad.experiments.trainer` does the same. `--as-intel` has MKL use Intel's code on another processor.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bit_identity import busy_since, environment, intel_library, save_campaign

# Functions for which torch calls MKL, as far as a first call was seen to differ.
VECTORISED = ("tanh", "exp", "sqrt", "log", "log10", "sin", "cos", "erf", "erfc", "erfinv", "asin", "acos")


def first_call(name: str, after_one_element: bool) -> float:
    """The largest difference between first and second call, in a process forked for it.

    The process that forks must not have used torch's threads or MKL: the forked one has what it has.
    """
    read, write = os.pipe()
    if (forked := os.fork()) == 0:
        x = torch.linspace(0.1, 0.9, 32_000).view(64, 500)  # as many as the demo's box has, in two parts
        x @ x.T  # starts the threads, as the layers before the box do
        if after_one_element:
            torch.tanh(torch.zeros(1))
        function = getattr(torch, name)
        first, second = function(x), function(x)
        os.write(write, float((first - second).abs().max()).hex().encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        difference = float.fromhex(answer.read())
    os.waitpid(forked, 0)
    return difference


def count(calls: int, after_one_element: bool) -> dict[str, Any]:
    """By function: so many first calls, how many of them differ from the second, and by how much at most."""
    errors = {name: [first_call(name, after_one_element) for _ in range(calls)] for name in VECTORISED}
    return {
        name: {"first calls": calls, "differing": sum(error > 0 for error in found), "largest error": max(found)}
        for name, found in errors.items()
    }


def campaign(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Count in a fresh process, which has used neither threads nor MKL, and add what it ran in."""
    begun = time.monotonic()
    file = folder / "counts.json"
    command = [sys.executable, __file__, "--child", str(file), "--calls", str(options.calls)]
    command += ["--after-one-element"] if options.after_one_element else []
    variables = os.environ | ({"LD_PRELOAD": str(intel_library(folder))} if options.as_intel else {})
    subprocess.run(command, env=variables, check=True)
    return {
        "command": shlex.join(["python", *sys.argv]),
        "as Intel": options.as_intel,
        "after one element": options.after_one_element,
        **busy_since(begun),
        "functions": json.loads(file.read_text()),
        "environment": environment(torch.device("cpu")),
    }


def main() -> None:
    """Parent or child."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200, help="of each function, each in a process of its own")
    parser.add_argument("--after-one-element", action="store_true", help="call tanh with one element before")
    parser.add_argument("--as-intel", action="store_true", help="have MKL use Intel's code (needs cc)")
    parser.add_argument("--label", default=" ".join(sys.argv[1:]) or "default", help="name in the results")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the file to which a child writes
    options = parser.parse_args()
    if options.child:
        Path(options.child).write_text(json.dumps(count(options.calls, options.after_one_element)))
        return
    with tempfile.TemporaryDirectory() as folder:
        numbers = campaign(options, Path(folder))
    print(json.dumps(numbers, indent=1))
    save_campaign("first_calls", options.label, numbers)


if __name__ == "__main__":
    main()
