"""Networks of the paper's experiments."""

from bondgrad.networks._densenet import densenet
from bondgrad.networks._ffnn import ffnn
from bondgrad.networks._resnet import resnet101

__all__ = ["densenet", "ffnn", "resnet101"]
