"""Which learning rate and perturbation does SPSA want in the demo?

    python benchmarks/spsa_search.py

Ten epochs, two seeds, every pair of the values that the paper searched in its appendix.
"""

import statistics
from dataclasses import replace
from pathlib import Path

import torch
from record import save

from bondgrad.experiments import config
from bondgrad.experiments.trainer import Run

EPOCHS, SEEDS = 10, (42, 63)


def main() -> None:
    """All pairs."""
    (paper,) = config.load(config.PAPER / "calhouse.yaml").only(["NFN SPSA"]).runs
    numbers = []
    for rate in (1e-2, 1e-3, 1e-4):
        for mu in (1e-2, 1e-3, 1e-4):
            how = replace(paper.gradient, mu=mu), replace(paper.optimizer, rate=rate)
            settings = replace(paper, gradient=how[0], optimizer=how[1], epochs=EPOCHS, measure_every=0)
            runs = [Run(settings, seed, Path(), torch.device("cpu")) for seed in SEEDS]
            for run in runs:
                while not run.done:
                    run.turn(100)
            losses = [run.history[-1]["test_loss"] for run in runs]
            numbers.append({"rate": rate, "mu": mu, "test_loss": losses})
            print(f"rate {rate:.0e}, mu {mu:.0e}: test loss {statistics.fmean(losses):.3f}", flush=True)
    save("spsa_search", numbers)


if __name__ == "__main__":
    main()
