"""The paper's learnt reservoir: a network that knows what a quantum-dot device does."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from bondgrad.networks import ffnn
from bondgrad.reservoirs._compose import Tile
from bondgrad.reservoirs._reservoir import Reservoir, random_numbers

SIZES = (10, 500, 500, 500, 500, 2)
SHIPPED = Path(__file__).parent / "rockmelon.safetensors"


class Rockmelon(Tile):
    """A smooth copy of a quantum-dot device, used for consecutive groups of ten inputs, with two outputs for each.

    One network, 10-500-500-500-500-2 with tanh, has learnt from a million readings of a `QuantumDotArray`; how, and how
    well, its `card` says. Make another one by `bondgrad pretrain rockmelon`.

    Args:
        groups: Of ten inputs.
        weights: A file that `bondgrad pretrain` has written. None: the one that comes with the package.

    Example:
        >>> box = bondgrad.BlackBox(Rockmelon(60), in_features=600)
        >>> box(torch.randn(8, 600)).shape
        torch.Size([8, 120])
    """

    def __init__(self, groups: int, weights: Path | str | None = None) -> None:
        copy = Learnt()
        card = copy.load(SHIPPED if weights is None else Path(weights))
        super().__init__(copy, groups)
        self.card = card


class Learnt(Reservoir):
    """The network of `Rockmelon`, for one group; with weights that have learnt nothing yet.

    Args:
        seed: Of the weights.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(SIZES[0], SIZES[-1])
        with random_numbers(seed):
            self.network = ffnn(SIZES).requires_grad_(False)

    def answer(self, x: Tensor) -> Tensor:
        """Voltages [N, 10] -> readings [N, 2]."""
        y: Tensor = self.network(x)
        return y

    def save(self, path: Path, card: dict[str, Any]) -> None:
        """The weights, and how they were made."""
        _need_safetensors()
        from safetensors.torch import save_file

        weights = {name: t.detach().cpu().contiguous() for name, t in self.network.state_dict().items()}
        save_file(weights, path, {"card": json.dumps(card)})

    def load(self, path: Path) -> dict[str, Any]:
        """Take over weights from a file, and return its card."""
        _need_safetensors()
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            self.network.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            card: dict[str, Any] = json.loads((file.metadata() or {}).get("card", "{}"))
        return card


def _need_safetensors() -> None:
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise ImportError("the weights of Rockmelon are files of safetensors: pip install safetensors") from error
