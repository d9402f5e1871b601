"""Whole training steps as CUDA graphs."""

import gc
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from bondgrad.baselines._parameter_method import ParameterMethod
from bondgrad.box import BlackBox
from bondgrad.torch_support._random import Generators

T = TypeVar("T")
Part = nn.Module | Optimizer | ParameterMethod | torch.amp.GradScaler
WARM_UP = 3  # eager steps of a kind before it is captured, so that all its memory and kernels exist
MOST_GRAPHS = 4  # kinds of arguments (shapes, dtypes, devices) that are captured, each with memory of its own
PLAIN = (int, float, str, type(None))  # types of settings that are compared by value
RECAPTURES = 20  # captures after which a warning says that something keeps changing


class GraphedStep(Generic[T]):
    """A training step that is captured into a CUDA graph, and replayed without Python from then on.

    The first calls run eagerly, then one is captured, and later ones are replays: the same kernels on the same numbers,
    so that the results of training are the same. A step still runs eagerly

    - when a box needs it (`BlackBox.due`);
    - when its arguments have shapes that came fewer than three times before, as in the last batch of an epoch;
    - always, where its arguments are not all tensors on a CUDA device that need no gradient;
    - always, after one warning that says why, if it cannot be captured.

    It is captured anew when something it depends on has changed: `BlackBox.version`, `train()` or `eval()` of a module,
    which parameters are trained and where they and the optimizer's state lie in memory, or a number in an optimizer's
    `param_groups`. (A learning rate that changes in every step should be a tensor, which the graph reads, and be
    changed in place; schedulers do so.)

    Whatever `step` does besides work on the GPU, such as appending to a list, happens only when it runs eagerly or is
    captured; and twice in one call if a capture fails half-way. This would break a `GradScaler`: give it as a part, and
    nothing is captured.

    Args:
        step: Takes tensors, does everything from `zero_grad` to `optimizer.step`, and returns tensors (or None). Use an
            optimizer made with `capturable=True`, where it has that argument.
        parts: The modules, optimizers, baselines (`bondgrad.baselines`) and scalers that the step uses.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 3), bondgrad.BlackBox(torch.sin, 3), nn.Linear(3, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step(x, y):
        ...     optimizer.zero_grad()
        ...     loss = nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss.detach()
        >>> graphed = bondgrad.GraphedStep(step, model, optimizer)
        >>> for x, y in [(torch.randn(16, 8), torch.randn(16, 1))] * 5:
        ...     loss = graphed(x, y)
    """

    def __init__(self, step: Callable[..., T], *parts: Part) -> None:
        if not parts or not all(isinstance(part, Part) for part in parts):
            raise TypeError("parts: GraphedStep needs the modules, optimizers, baselines and scalers of the step")
        self.step = step
        self.modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
        self.boxes = [module for module in self.modules if isinstance(module, BlackBox)]
        self.optimizers = [part for part in parts if isinstance(part, Optimizer)]
        self.baselines = [part for part in parts if isinstance(part, ParameterMethod)]
        self.captures = self.replays = self.eager_steps = 0
        self._runs: Counter[object] = Counter()  # steps of each kind of arguments, since the version changed
        self._version: list[object] = []
        self._captured: dict[object, _Captured] = {}
        self._stream: torch.cuda.Stream | None = None
        self._impossible = any(isinstance(part, torch.amp.GradScaler) for part in parts)

    def __call__(self, *args: Tensor) -> T:
        """Run one training step, eagerly or as a replay. Returns what `step` returns."""
        fit = bool(args) and all(isinstance(arg, Tensor) and arg.is_cuda and not arg.requires_grad for arg in args)
        if self._impossible or not fit:
            return self._eagerly(args)
        if any(box.due() for box in self.boxes):
            return self._on_side_stream(args)
        version = self._current_version()
        if version != self._version:
            # A kind that had its warm-up runs eagerly once more before it is captured again.
            self._runs = Counter({kind: min(runs, WARM_UP - 1) for kind, runs in self._runs.items()})
            self._version, self._captured = version, {}
        kind = tuple((arg.shape, arg.dtype, arg.device) for arg in args)
        if kind not in self._captured:
            self._runs[kind] += 1
            if self._runs[kind] <= WARM_UP or len(self._captured) >= MOST_GRAPHS or not self._capture(kind, args):
                return self._on_side_stream(args)
        self.replays += 1
        return self._captured[kind].replay(args)  # type: ignore[no-any-return]

    def _current_version(self) -> list[object]:
        """All values that a graph has fixed at its capture, and addresses of all tensors that it uses."""
        tensors = [t for m in self.modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        states = [list(state.values()) for optimizer in self.optimizers for state in optimizer.state.values()]
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        settings = [value for group in groups for name, value in group.items() if name != "params"]
        # Settings of baselines are the size of perturbations and their number.
        settings += [value for part in self.baselines for value in vars(part).values() if isinstance(value, PLAIN)]
        return [
            *[box.version for box in self.boxes],
            # Compared by identity: `load_state_dict` makes new generators.
            *[generator for random in self.random_numbers() for generator in random.generators("cuda")],
            *[module.training for module in self.modules],
            *[(_address(t), t.requires_grad) for t in tensors],
            *[_address(t) for values in states for t in tree_leaves(values) if isinstance(t, Tensor)],
            *[value if isinstance(value, PLAIN) else tree_map_only(Tensor, _address, value) for value in settings],
        ]

    def random_numbers(self) -> list[Generators]:
        """The `Generators` of boxes, noisy reservoirs and baselines, which must be registered with a graph."""
        own = (getattr(part, "random", None) for part in (*self.modules, *self.baselines))
        return [random for random in own if isinstance(random, Generators)]

    def _eagerly(self, args: tuple[Tensor, ...]) -> T:
        self.eager_steps += 1
        return self.step(*args)

    def _on_side_stream(self, args: tuple[Tensor, ...]) -> T:
        """Run the step eagerly, on the stream of captures: gradients accumulate on the stream where they were made."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(args[0].device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(args[0].device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return self._eagerly(args)
        finally:
            current.wait_stream(self._stream)

    def _capture(self, kind: object, args: tuple[Tensor, ...]) -> bool:
        """Capture the step for arguments of this kind. Returns whether that succeeded; a failure is a warning."""
        self.captures += 1
        if self.captures == RECAPTURES:
            warnings.warn(
                f"a GraphedStep was captured {RECAPTURES} times, since what it depends on keeps changing. If that is a "
                "learning rate, make it a tensor: Adam(..., lr=torch.tensor(1e-3), capturable=True).",
                stacklevel=3,
            )
        states = [(random, random.state()) for random in self.random_numbers()]
        assert self._stream is not None  # eager steps of the same kind ran on it before
        try:
            self._check_optimizers()
            self._captured[kind] = _Captured(self, args, self._stream)
        except Exception as error:  # no error of a capture need end the training
            self._impossible = True
            for random, state in states:
                random.load(state)  # makes new generators: the old ones are registered with the capture
            warnings.warn(
                f"this training step cannot be captured into a CUDA graph, so it runs as it is: {_reason(error)}",
                stacklevel=3,
            )
            torch.cuda.synchronize()
            return False
        return True

    def _check_optimizers(self) -> None:
        """Raise TypeError for optimizers with state on the CPU, which a replay would not change."""
        for optimizer in self.optimizers:
            for name, value in (item for state in optimizer.state.values() for item in state.items()):
                if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.device.type == "cpu"):
                    raise TypeError(
                        f"{type(optimizer).__name__} keeps its '{name}' on the CPU: make it with capturable=True, or "
                        "use another optimizer"
                    )


def _address(t: Tensor) -> int:
    """The address of the tensor; its id, if it has no single address."""
    try:
        return t.data_ptr()
    except (RuntimeError, ValueError, NotImplementedError):
        return id(t)


def _reason(error: BaseException) -> str:
    """Type and first line of the error that was raised first; the last one is that of the capture itself."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


class _Captured:
    """A CUDA graph of the step, with the tensors that it reads and writes."""

    def __init__(self, training: GraphedStep[Any], args: tuple[Tensor, ...], stream: torch.cuda.Stream) -> None:
        self.args = tuple(arg.detach().clone() for arg in args)  # the graph reads these
        self.graph = torch.cuda.CUDAGraph()
        for random in training.random_numbers():
            for generator in random.generators("cuda"):
                self.graph.register_generator_state(generator)
        for box in training.boxes:
            box.start_recording()
        device, collected = args[0].device, gc.isenabled()
        gc.disable()  # a capture fails if another graph is garbage-collected meanwhile
        try:
            # With this mode other threads, such as data loaders, may use CUDA during the capture.
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.result = training.step(*self.args)
        except BaseException:
            # Torch's global generator would stay registered with this capture until another one succeeds.
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
                torch.zeros(1, device=device)
            raise
        finally:
            if collected:
                gc.enable()
            self.recordings = [(box, box.stop_recording()) for box in training.boxes]
        # At the start of a capture, torch writes the offset of the random numbers on this stream; each replay writes it
        # again, on the current stream. Without an order of the two, the first replay used numbers of another step.
        torch.cuda.current_stream(device).wait_stream(stream)
        parameters = [p for module in training.modules for p in module._parameters.values() if p is not None]
        self.gradients = [(p, p.grad) for p in parameters if p.grad is not None]

    def replay(self, args: tuple[Tensor, ...]) -> Any:  # noqa: ANN401
        """Run the graph on these arguments. Returns a copy of its result, which the next replay does not overwrite."""
        for mine, arg in zip(self.args, args, strict=True):
            mine.copy_(arg)
        self.graph.replay()
        for parameter, gradient in self.gradients:  # an eager step may have set other tensors
            parameter.grad = gradient
        for box, recording in self.recordings:
            box.replay(recording)
        return tree_map_only(Tensor, torch.clone, self.result)
