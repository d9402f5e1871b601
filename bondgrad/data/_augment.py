"""Pictures as networks take them, on whichever device they are."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


class Augmentation:
    """Normalises pictures, and for training moves and mirrors them; a whole batch at a time, each picture by itself.

    Args:
        mean: Of every channel, where white is 1.
        deviation: Of every channel.
        flip: Whether to mirror every other picture, left to right.
        crop: By how many pixels a picture may be moved, at most, in each direction. What is uncovered has the mean's
            colour, 0 once it is normalised: black would be a signal, as strong as any in the picture.

    Example:
        >>> x = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8)
        >>> augmentation = Augmentation((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), flip=True, crop=4)
        >>> augmentation.augment(x, torch.Generator().manual_seed(0)).shape
        torch.Size([8, 3, 32, 32])
        >>> augmentation.prepare(x).abs().max() <= 2
        tensor(True)
    """

    def __init__(self, mean: Sequence[float], deviation: Sequence[float], *, flip: bool, crop: int) -> None:
        if len(mean) != len(deviation):
            raise ValueError(f"mean and deviation must be of the same channels, got {len(mean)} and {len(deviation)}")
        if crop < 0:
            raise ValueError(f"crop must be zero or a positive integer, got {crop}")
        self.mean, self.deviation, self.flip, self.crop = tuple(mean), tuple(deviation), flip, crop
        # Kept per device: a copy to the device at every call would wait, and could not be captured in a graph.
        self._made: dict[torch.device, Tensor] = {}

    def prepare(self, x: Tensor) -> Tensor:
        """Normalised: uint8 [N, C, H, W] -> float32 [N, C, H, W]."""
        if x.dtype != torch.uint8 or x.ndim != 4 or x.shape[1] != len(self.mean):
            raise ValueError(f"x must be uint8 [N, {len(self.mean)}, H, W], got {x.dtype} {list(x.shape)}")
        mean, deviation = self._constants(x.device)
        y: Tensor = (x - mean) / deviation
        return y

    def augment(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Moved, mirrored and normalised: uint8 [N, C, H, W] -> float32 [N, C, H, W].

        Args:
            x: Pictures.
            generator: On x's device. The result depends on its state, and on no other random numbers.
        """
        n, channels, height, width = x.shape
        row, column = (torch.arange(size, device=x.device).expand(n, -1) for size in (height, width))  # [N, H], [N, W]
        if self.flip:
            mirrored = torch.randint(2, (n, 1), generator=generator, device=x.device, dtype=torch.bool)
            column = torch.where(mirrored, width - 1 - column, column)
        if self.crop:
            down, right = torch.randint(2 * self.crop + 1, (2, n, 1), generator=generator, device=x.device)
            row, column = row + down, column + right
        padded = pad(self.prepare(x), 4 * (self.crop,))
        picture = torch.arange(n, device=x.device)[:, None, None, None]
        channel = torch.arange(channels, device=x.device)[:, None, None]
        return padded[picture, channel, row[:, None, :, None], column[:, None, None, :]]

    def _constants(self, device: torch.device) -> Tensor:
        """Mean and deviation in units of a byte, float32 [2, C, 1, 1]."""
        if device not in self._made:
            numbers = torch.tensor([self.mean, self.deviation], dtype=torch.float64) * 255
            self._made[device] = numbers.float()[..., None, None].to(device)
        return self._made[device]
