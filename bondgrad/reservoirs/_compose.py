"""Reservoirs made of others."""

from typing import Any

import torch
from torch import Tensor

from bondgrad.errors import positive_float, positive_int
from bondgrad.reservoirs._reservoir import Reservoir, part
from bondgrad.structure import Blocks
from bondgrad.torch_support._random import Generators


class Tile(Reservoir):
    """One reservoir for consecutive groups of inputs, one after the other, as if there were many of it.

    Args:
        box: A reservoir [N, n_in] -> [N, n_out], or any module of rows that has `in_features` and `out_features`.
        groups: How often it is used for a row.

    Example:
        >>> from bondgrad.reservoirs import Fixed
        >>> Tile(Fixed(10, 50, 2), groups=60)(torch.randn(3, 600)).shape
        torch.Size([3, 120])
    """

    def __init__(self, box: Any, groups: int) -> None:  # noqa: ANN401
        structure = part(box)
        super().__init__(positive_int("groups", groups) * box.in_features, groups * box.out_features)
        self.groups, self.box = groups, box
        self.structure = structure if isinstance(structure, Blocks) else Blocks(box.in_features, box.out_features)

    def answer(self, x: Tensor) -> Tensor:
        """[N, groups·n_in] -> [N, groups·n_out]."""
        rows = x.reshape(len(x) * self.groups, self.box.in_features)
        one_by_one = len(rows) > 1 and getattr(self.box, "one_at_a_time", False)
        y: Tensor = torch.cat([self.box(row) for row in torch.split(rows, 1)]) if one_by_one else self.box(rows)
        return y.view(len(x), self.out_features)

    def extra_repr(self) -> str:
        """See `nn.Module`."""
        return f"groups={self.groups}"


class Noisy(Reservoir):
    """A reservoir that answers differently each time: the paper's ε(X), uniform on [0, X], on every output.

    Args:
        box: A reservoir, or any module that has `in_features` and `out_features`.
        half_width: X. `BlackBox(noise=b)` means ± b: for that, b is X with `symmetric`, and X / 2 without.
        symmetric: Uniform on [-X, X] instead.
        seed: Of the noise. None: drawn from torch's own random numbers.
    """

    def __init__(
        self,
        box: Any,  # noqa: ANN401
        half_width: float,
        *,
        symmetric: bool = False,
        seed: int | None = None,
    ) -> None:
        structure = part(box, in_time=True)
        super().__init__(box.in_features, box.out_features)
        self.box, self.structure, self.symmetric = box, structure, symmetric
        self.half_width = positive_float("half_width", half_width)
        self.random = Generators(seed)

    def answer(self, x: Tensor, *state: Tensor) -> Any:  # noqa: ANN401
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
