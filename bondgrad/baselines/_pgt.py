"""PGT: all parameters are perturbed at once, by steps of different sizes."""

from collections.abc import Iterable

from torch import Tensor

from bondgrad.baselines._parameter_method import SimultaneousPerturbation


class PGT(SimultaneousPerturbation):
    """Perturbative Gradient Training: SPSA whose perturbations differ in size as well as in sign.

        |Δ_ki| = μ (1 + r u),   u ~ U[-1, 1]

    With plain signs there are only 2^P directions for P parameters; different sizes allow any number. It costs 2n
    evaluations of the loss.

    Args:
        params: The parameters whose gradient is wanted.
        mu: Mean size of the perturbation.
        r: Spread of the sizes, in [0, 1). At 0 this is SPSA.
        n: Number of random directions.
        seed: The seed of the random numbers. None: drawn from torch's global generator.
    """

    def __init__(
        self, params: Iterable[Tensor], mu: float = 1e-3, r: float = 0.5, n: int = 1, seed: int | None = None
    ) -> None:
        if not (isinstance(r, (int, float)) and 0 <= r < 1):
            raise ValueError(f"r must be in [0, 1), got {r!r}")
        super().__init__(params, mu, n, seed)
        self.r = r

    def sizes(self, at: Tensor) -> Tensor:
        """See `SimultaneousPerturbation.sizes`."""
        return self.mu * (1 + self.r * self.uniform(at))
