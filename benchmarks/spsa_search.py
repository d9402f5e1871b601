"""Which learning rate and perturbation does SPSA want in the demo?

    python benchmarks/spsa_search.py

Ten epochs, two seeds, every pair of the values that the paper searched in its appendix.
"""

import statistics

from record import save

from bondgrad.experiments.housing import HousingRun

EPOCHS, SEEDS = 10, (42, 63)


def main() -> None:
    """All pairs."""
    numbers = []
    for rate in (1e-2, 1e-3, 1e-4):
        for mu in (1e-2, 1e-3, 1e-4):
            runs = [HousingRun("SPSA", seed, EPOCHS, rate=rate, spsa_mu=mu) for seed in SEEDS]
            for run in runs:
                for _ in range(EPOCHS):
                    list(run.epoch())
            losses = [run.test_loss[-1] for run in runs]
            numbers.append({"rate": rate, "mu": mu, "test_loss": losses})
            print(f"rate {rate:.0e}, mu {mu:.0e}: test loss {statistics.fmean(losses):.3f}", flush=True)
    save("spsa_search", numbers)


if __name__ == "__main__":
    main()
