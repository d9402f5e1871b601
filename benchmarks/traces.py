"""What a training run computed, as checksums in the order of computing, and where two such traces differ first."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bondgrad.experiments.trainer import Run
from bondgrad.torch_support._graphs import GraphedStep

Layout = tuple[str, ...]  # names of what a step computed, in order


@dataclass
class Trace:
    """What one run left behind, step by step.

    Attributes:
        layouts: Every sequence of names that occurred.
        steps: For each step, the index of its layout, and one checksum per name.
        losses: For each step, the loss as `float.hex` writes it.
        evaluations: For each epoch, the losses on training and test set, likewise.
    """

    layouts: list[Layout] = field(default_factory=list)
    steps: list[tuple[int, list[int]]] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    evaluations: list[tuple[str, str]] = field(default_factory=list)

    def add(self, names: Layout, checksums: list[int], loss: float) -> None:
        """Append a step."""
        if names not in self.layouts:
            self.layouts.append(names)
        self.steps.append((self.layouts.index(names), checksums))
        self.losses.append(loss.hex())

    def checksums(self, step: int) -> dict[str, int]:
        """The checksums of a step by name, in order."""
        layout, checksums = self.steps[step]
        return dict(zip(self.layouts[layout], checksums, strict=True))


def first_difference(reference: Trace, other: Trace) -> dict[str, Any] | None:
    """The first step in which two traces differ, and the first operation in it; None if they are the same.

    Operations are compared by name, where both traces have that name, and listed in the order of `other`: a captured
    step may see the gradients at the outputs of layers in another order than an eager one. Batch, loss, gradients and
    parameters are in every trace. Steps are counted from 0, epochs from 1.
    """
    if len(reference.steps) != len(other.steps):
        raise ValueError(f"traces of {len(reference.steps)} and {len(other.steps)} steps cannot be compared")
    for step in range(len(other.steps)):
        expected, found = reference.checksums(step), other.checksums(step)
        names = [name for name in found if name in expected]
        different = [name for name in names if expected[name] != found[name]]
        if different:
            first = names.index(different[0])
            return {
                "step": step,
                "operation": names[first],
                "the one before, still the same": names[first - 1] if first else None,
                "operations that differ": f"{len(different)} of {len(names)}",
                "loss": {"reference": reference.losses[step], "here": other.losses[step]},
            }
    for epoch, (a, b) in enumerate(zip(reference.evaluations, other.evaluations, strict=True), start=1):
        if a != b:
            return {"epoch": epoch, "operation": "evaluation after the epoch, all steps being the same"}
    return None


def differences(reference: dict[str, Trace], other: dict[str, Trace]) -> dict[str, dict[str, Any]]:
    """By run, where it differs first from the run of the same name in another process."""
    found = {name: first_difference(reference[name], trace) for name, trace in other.items()}
    return {name: difference for name, difference in found.items() if difference is not None}


def captured_against_eager(traces: dict[str, Trace]) -> dict[str, dict[str, Any]]:
    """By captured run, where it differs first from its eager twin in the same process."""
    twins = {name: name.replace(", captured", ", eager") for name in traces if name.endswith(", captured")}
    return differences({name: traces[eager] for name, eager in twins.items()}, {name: traces[name] for name in twins})


class Recorder:
    """Stands in for a run's training step, takes it, and writes down checksums of all that it computed.

    Outputs of layers and gradients at them are seen by hooks, which do not fire when a captured step is replayed. What
    they saw during the capture are then the tensors that every replay writes to. As long as they are referred to here,
    the graph does not reuse their memory, so they can be read after each replay.

    On a GPU, checksums are computed there and read at the end, so that streams overlap as they do without them.

    Args:
        run: Whose step it is.
        light: Leave the layers out, so that no tensor lives longer than it would without a recorder.
    """

    def __init__(self, run: Run, light: bool = False) -> None:
        self.run, self.take = run, run.take_step
        self.trace = Trace()
        self._on_device: list[tuple[Layout, Tensor, Tensor]] = []  # checksums and loss of each step, to be read later
        self._weights: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._within = False  # a step, and not the comparison with the exact gradient around it
        self._seen: dict[str, Tensor] = {}
        self._captured: dict[str, Tensor] = {}
        if not light:
            self._watch()
        run.take_step = self

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """One training step."""
        self._seen, self._within = {}, True
        before = self.replays
        loss: Tensor = self.take(x, y)
        self._within = False
        if self.replays > before:
            self._captured = self._seen or self._captured  # hooks fire in a call that captures, not in later ones
            self._seen = self._captured
        kept = {"batch, inputs": x, "batch, targets": y} | self._seen | {"loss": loss} | self._state()
        if loss.is_cuda:
            self._on_device.append((tuple(kept), self._checksums_on_device(list(kept.values())), loss.clone()))
        else:
            self.trace.add(tuple(kept), [checksum(t) for t in kept.values()], float(loss))
        return loss

    @property
    def replays(self) -> int:
        """How many steps were replays of a captured one."""
        return self.take.replays if isinstance(self.take, GraphedStep) else 0

    def finished(self) -> Trace:
        """The whole trace; waits for the GPU."""
        for names, checksums, loss in self._on_device:
            self.trace.add(names, checksums.tolist(), float(loss))
        self._on_device = []
        self.trace.evaluations = [(e["train_loss"].hex(), e["test_loss"].hex()) for e in self.run.history]
        return self.trace

    def _state(self) -> dict[str, Tensor]:
        """Gradient, value and the optimizer's state of each parameter, after the step."""
        parameters = dict(self._parameters())
        kept = {f"gradient of {name}": p.grad for name, p in parameters.items() if p.grad is not None}
        kept |= {f"{name} after the step": p.detach() for name, p in parameters.items()}
        for name, p in parameters.items():
            state = self.run.optimizer.state[p].items()
            kept |= {f"{key} of {name}": value for key, value in state if isinstance(value, Tensor)}
        return kept

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for network in ("read_in", "read_out"):
            for name, p in getattr(self.run.parts, network).named_parameters():
                yield f"{network}.{name}", p

    def _watch(self) -> None:
        """Register hooks on all layers of read-in, box and read-out."""
        watched: set[nn.Module] = set()
        for part in ("read_in", "read_out", "black_box", "through"):
            module = getattr(self.run.parts, part)
            for name, layer in () if module is None else module.named_modules():
                if layer not in watched:
                    watched.add(layer)
                    layer.register_forward_hook(self._hook(f"{part}.{name}".rstrip(".")))

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(layer: nn.Module, _: Any, output: Any) -> None:
            if self._within and isinstance(output, Tensor):
                kind = f"{name} ({type(layer).__name__})"
                self._keep(f"{kind}, output", output)
                if output.requires_grad:
                    at_output = f"{kind}, gradient at its output"
                    output.register_hook(lambda g: self._keep(at_output, g))  # type: ignore[no-untyped-call]

        return hook

    def _keep(self, name: str, tensor: Tensor) -> None:
        while name in self._seen:  # a layer may be called several times in a step
            name += "'"
        self._seen[name] = tensor.detach()

    def _checksums_on_device(self, tensors: list[Tensor]) -> Tensor:
        """One integer for each tensor: the sum of its bits, weighted by place. Exact, whatever the order of adding."""
        flat = [t.detach().float().contiguous().view(torch.int32).flatten() for t in tensors]
        sizes = tuple(len(t) for t in flat)
        if sizes not in self._weights:
            here = flat[0].device
            places = torch.arange(sum(sizes), device=here) * 2 + 1
            self._weights[sizes] = places, torch.tensor(sizes, device=here).cumsum(0) - 1
        places, ends = self._weights[sizes]
        sums = (torch.cat(flat).long() * places).cumsum(0)[ends]
        return torch.diff(sums, prepend=sums.new_zeros(1))


def checksum(t: Tensor) -> int:
    """A checksum of the tensor's bytes, computed without torch."""
    return zlib.crc32(t.detach().contiguous().numpy().data)
