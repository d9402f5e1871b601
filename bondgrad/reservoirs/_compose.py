"""Reservoirs made of others."""

from typing import Any

import torch
from torch import Tensor

from bondgrad._arguments import positive_float, positive_int
from bondgrad._random import Generators
from bondgrad.reservoirs._reservoir import Reservoir
from bondgrad.structure import Blocks, Structure


class Tile(Reservoir):
    """One reservoir for consecutive groups of inputs, one after the other, as if there were many of it.

    Args:
        box: A reservoir [N, n_in] -> [N, n_out].
        groups: How often it is used for a row.

    Example:
        >>> from bondgrad.reservoirs import Fixed
        >>> Tile(Fixed(10, 50, 2), groups=60)(torch.randn(3, 600)).shape
        torch.Size([3, 120])
    """

    def __init__(self, box: Reservoir, groups: int) -> None:
        groups = positive_int("groups", groups)
        super().__init__(groups * box.in_features, groups * box.out_features)
        self.groups, self.box, self.structure = groups, box, Blocks(box.in_features, box.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """[N, groups·n_in] -> [N, groups·n_out]."""
        y: Tensor = self.box(x.reshape(len(x) * self.groups, -1))
        return y.view(len(x), -1)

    def extra_repr(self) -> str:
        """See `nn.Module`."""
        return f"groups={self.groups}"


class Noisy(Reservoir):
    """A reservoir that answers differently each time: the paper's ε(X), uniform on [0, X], on every output.

    Args:
        box: The reservoir.
        half_width: X.
        symmetric: Uniform on [-X, X] instead.
        seed: Of the noise. None: drawn from torch's own random numbers.
    """

    def __init__(self, box: Reservoir, half_width: float, *, symmetric: bool = False, seed: int | None = None) -> None:
        super().__init__(box.in_features, box.out_features)
        self.box, self.symmetric = box, symmetric
        self.half_width = positive_float("half_width", half_width)
        self.random = Generators(seed)

    @property
    def structure(self) -> "Structure | str":  # type: ignore[override]
        """That of the reservoir."""
        return self.box.structure

    def forward(self, x: Tensor, *state: Tensor) -> Any:  # noqa: ANN401
        """As the reservoir's."""
        answer = self.box(x, *state)
        y, rest = (answer[0], answer[1:]) if isinstance(answer, tuple) else (answer, ())
        noise = torch.rand(y.shape, generator=self.random.on(y.device), dtype=y.dtype, device=y.device)
        y = y + self.half_width * (2 * noise - 1 if self.symmetric else noise)
        return (y, *rest) if rest else y

    def get_extra_state(self) -> dict[str, Any]:
        """The random numbers, for `state_dict`: a run that is resumed hears the same noise."""
        return self.random.state()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The counterpart of `get_extra_state`."""
        self.random.load(state)

    def extra_repr(self) -> str:
        """See `nn.Module`."""
        return f"{self.half_width:g}, symmetric={self.symmetric}"
