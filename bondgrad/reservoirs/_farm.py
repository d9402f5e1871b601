"""Several devices of the same make."""

import copy
from typing import Any

import numpy as np

from bondgrad.reservoirs._instrument import Instrument
from bondgrad.torch_support._random import Generators


class Farm:
    """Several instruments that measure copies of one device: makes the box of each worker of an evaluator.

    Called with a number, it returns the instrument of that number, always the same one for the same seed. Instruments
    have offsets, drift and noise of their own. An offset cancels in a difference if both ends of it are measured by one
    instrument, as evaluators see to; estimator="forward" compares with the forward pass, which may have been measured
    by another one.

    Args:
        device: What is measured, see `Instrument`. Each instrument has a copy of it.
        seed: Of all instruments. None: drawn from torch's own random numbers.
        settings: Of every instrument, such as `spread`, `drift` and `noise`: see `Instrument`.

    Example:
        >>> import bondgrad, torch
        >>> from bondgrad.reservoirs import QuantumDotArray
        >>> farm = Farm(QuantumDotArray(), spread=0.1, noise=0.01, seed=0)
        >>> evaluator = bondgrad.evaluators.Threads(4, farm, max_rows=1)
        >>> box = bondgrad.BlackBox(None, in_features=10, evaluator=evaluator)
        >>> box(torch.zeros(8, 10)).shape
        torch.Size([8, 2])
        >>> evaluator.close()
    """

    def __init__(self, device: Any, *, seed: int | None = None, **settings: Any) -> None:  # noqa: ANN401
        self.device, self.settings = device, settings
        self.seed = Generators(seed).seed
        self(0)  # lest settings are refused in a worker only

    def __call__(self, number: int) -> Instrument:
        """The instrument of that number, from 0 on, as it is when it is switched on."""
        seed = int(np.random.SeedSequence((self.seed, number)).generate_state(1)[0])
        return Instrument(copy.deepcopy(self.device), seed=seed, **self.settings)
