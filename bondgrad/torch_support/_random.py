"""Random number generators that belong to one object, one for each device."""

from typing import Any

import torch
from torch import Tensor

from bondgrad.errors import checked_seed


class Generators:
    """One generator per device, all from one seed, made when first needed.

    Args:
        seed: The seed. None: drawn from torch's global generator, so that `torch.manual_seed` decides.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = int(torch.randint(2**63 - 1, (), device="cpu")) if seed is None else checked_seed(seed)
        self._by_device: dict[torch.device, torch.Generator] = {}
        self._loaded: dict[str, Tensor] = {}  # saved states by the name of the device, which may not exist here

    def on(self, device: torch.device) -> torch.Generator:
        """The generator of a device."""
        if device not in self._by_device:
            self._by_device[device] = self.fork(device)
        return self._by_device[device]

    def fork(self, device: torch.device) -> torch.Generator:
        """A copy of a device's generator: draws from it do not advance the original."""
        known = self._by_device.get(device)
        if known is not None:
            return known.clone_state()
        generator = torch.Generator(device).manual_seed(self.seed)
        if str(device) in self._loaded:
            generator.set_state(self._loaded[str(device)].cpu())
        return generator

    def join(self, device: torch.device, fork: torch.Generator) -> None:
        """Continue a device's random numbers after those that were drawn from a copy made by `fork`."""
        known = self._by_device.get(device)
        if known is None or device.type == "cpu":
            self._by_device[device] = fork
        elif known is not fork:  # in place, since a captured graph may draw from this generator
            known.set_state(fork.get_state())

    def generators(self, kind: str) -> tuple[torch.Generator, ...]:
        """The generators that were made so far on devices of this kind."""
        return tuple(generator for device, generator in self._by_device.items() if device.type == kind)

    def state(self) -> dict[str, Any]:
        """The seed and the states of all generators, as numbers and tensors."""
        known = {str(device): generator.get_state() for device, generator in self._by_device.items()}
        return {"seed": self.seed, "devices": self._loaded | known}

    def load(self, state: dict[str, Any]) -> None:
        """Set the seed and the states that `state` returned. Generators are made anew when they are needed."""
        self.seed = state["seed"]
        self._loaded, self._by_device = dict(state["devices"]), {}
