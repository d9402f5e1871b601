"""Data sets."""

from bondgrad.data._augment import Augmentation
from bondgrad.data._california import CaliforniaHousing, california_housing
from bondgrad.data._cifar import cifar10, cifar100
from bondgrad.data._fashion_mnist import fashion_mnist
from bondgrad.data._images import Images

__all__ = [
    "Augmentation",
    "CaliforniaHousing",
    "Images",
    "california_housing",
    "cifar10",
    "cifar100",
    "fashion_mnist",
]
