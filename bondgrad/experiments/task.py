"""What is to be learnt: data where the work is done, batches of them, and how well a network does."""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from bondgrad.data import Augmentation, Images, california_housing, cifar10, cifar100, fashion_mnist
from bondgrad.experiments.settings import Settings

PICTURES = {"fashion_mnist": fashion_mnist, "cifar10": cifar10, "cifar100": cifar100}
CROP = {"fashion_mnist": 2, "cifar10": 4, "cifar100": 4}  # pixels by which a training picture is moved at most
AT_ONCE = 1000  # test pictures


class Task:
    """Data and loss of a run.

    Args:
        settings: Which.
        seed: Of the split of California Housing; pictures come split.
        folder: Of the pictures.
        device: Where the work is done.
    """

    def __init__(self, settings: Settings, seed: int, folder: Path, device: torch.device) -> None:
        self.device = device
        self.loss: nn.Module = nn.HuberLoss() if settings.loss == "huber" else nn.CrossEntropyLoss()
        self.augmentation: Augmentation | None = None
        if settings.data == "california_housing":
            parts = tuple(california_housing(seed))
            self.outputs = parts[1].shape[1]  # to predict
        else:
            images = pictures(settings.data, folder)
            parts = (images.x_train, images.y_train, images.x_test, images.y_test)
            self.outputs = images.classes
            self.augmentation = Augmentation(images.mean, images.deviation, flip=True, crop=CROP[settings.data])
        self.x_train, self.y_train, self.x_test, self.y_test = (part.to(device) for part in parts)
        if len(self.x_train) < settings.batch:
            raise ValueError(f"batch must be at most {len(self.x_train)}, the rows there are, got {settings.batch}")

    def batch(self, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these training rows; pictures are augmented with random numbers of the generator."""
        x, y = self.x_train[rows], self.y_train[rows]
        if self.augmentation is None:
            return x, y
        return self.augmentation.augment(x, generator), y

    @torch.no_grad()
    def test(self, network: Callable[[Tensor], Tensor]) -> tuple[float, float | None]:
        """Loss on the test set and, of classes, the share that is right."""
        if self.augmentation is None:  # in one call: to a box that remembers, the rows are one sequence
            return float(self.loss(network(self.x_test), self.y_test)), None
        loss, right = torch.zeros(2, dtype=torch.float64, device=self.device)
        for x, y in zip(torch.split(self.x_test, AT_ONCE), torch.split(self.y_test, AT_ONCE), strict=True):
            answer = network(self.augmentation.prepare(x)).float()
            loss += self.loss(answer, y) * len(y)
            right += (answer.argmax(1) == y).sum()
        return float(loss) / len(self.y_test), float(right) / len(self.y_test)


@functools.lru_cache(maxsize=len(PICTURES))
def pictures(name: str, folder: Path) -> Images:
    """A data set, read once: they are large, and the same for all runs."""
    return PICTURES[name](folder)
