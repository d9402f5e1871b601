"""Random numbers that belong to one object, on whichever device they are needed."""

from typing import Any

import torch


class Generators:
    """One generator per device, all from one seed, made when first asked for.

    Args:
        seed: None: drawn from torch's own random numbers, so that `torch.manual_seed` decides.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = int(torch.randint(2**63 - 1, ())) if seed is None else seed
        self._by_device: dict[torch.device, torch.Generator] = {}

    def on(self, device: torch.device) -> torch.Generator:
        """The generator of a device."""
        if device not in self._by_device:
            self._by_device[device] = torch.Generator(device).manual_seed(self.seed)
        return self._by_device[device]

    def fork(self, device: torch.device) -> torch.Generator:
        """A copy of a device's generator, to draw from without a trace."""
        known = self._by_device.get(device)
        return torch.Generator(device).manual_seed(self.seed) if known is None else known.clone_state()

    def join(self, device: torch.device, generator: torch.Generator) -> None:
        """Go on from where a copy has got to."""
        self._by_device[device] = generator

    def state(self) -> dict[str, Any]:
        """All there is to save: numbers and tensors only."""
        return {"seed": self.seed, "devices": {str(device): g.get_state() for device, g in self._by_device.items()}}

    def load(self, state: dict[str, Any]) -> None:
        """The counterpart of `state`."""
        self.seed = state["seed"]
        self._by_device = {torch.device(name): torch.Generator(name) for name in state["devices"]}
        for device, generator in self._by_device.items():
            generator.set_state(state["devices"][str(device)].cpu())
