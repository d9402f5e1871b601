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
WARM_UP = 3  # steps of a kind that run before it is captured, so that nothing in it happens for the first time
MOST_GRAPHS = 4  # kinds of arguments that are captured, each with memory of its own
PLAIN = (int, float, str, type(None))  # settings that are what they are
RECAPTURES = 20  # after which it is said that they cost more than they bring


class GraphedStep(Generic[T]):
    """A training step that is captured into a CUDA graph, and replayed without Python from then on.

    The first calls run as they are, then one is captured, and later ones are replays: the same kernels on the same
    numbers, so that training goes as it would have. A step still runs as it is

    - when a box asks for it (`BlackBox.due`);
    - when its arguments have shapes that came fewer than three times before, as in the last batch of an epoch;
    - always, where its arguments are not all tensors on a CUDA device that need no gradient;
    - always, after one warning that says why, if it cannot be captured.

    It is captured anew when something it depends on has changed: `BlackBox.version`, `train()` or `eval()` of a module,
    which parameters are trained and where they and the optimizer's state lie in memory, or a number in an optimizer's
    `param_groups`. (A learning rate that changes in every step should be a tensor, which the graph reads, and be
    changed in place; schedulers do so.)

    Whatever `step` does besides work on the GPU, such as appending to a list, happens only when it runs as it is or is
    captured; and twice in one call if a capture fails half-way. A `GradScaler` cannot bear that: give it as a part, and
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
        self._runs: Counter[object] = Counter()  # of each kind of arguments, since something changed
        self._version: list[object] = []
        self._captured: dict[object, _Captured] = {}
        self._stream: torch.cuda.Stream | None = None
        self._impossible = any(isinstance(part, torch.amp.GradScaler) for part in parts)

    def __call__(self, *args: Tensor) -> T:
        """One training step."""
        fit = bool(args) and all(isinstance(arg, Tensor) and arg.is_cuda and not arg.requires_grad for arg in args)
        if self._impossible or not fit:
            return self._eagerly(args)
        if any(box.due() for box in self.boxes):
            return self._on_side_stream(args)
        version = self._current_version()
        if version != self._version:
            # One step first, in which whatever is new can settle; at the very beginning three.
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
        """All that a graph has read or written down, or where it finds it."""
        tensors = [t for m in self.modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        states = [list(state.values()) for optimizer in self.optimizers for state in optimizer.state.values()]
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        settings = [value for group in groups for name, value in group.items() if name != "params"]
        # Of baselines: the size of perturbations, and how many there are.
        settings += [value for part in self.baselines for value in vars(part).values() if isinstance(value, PLAIN)]
        return [
            *[box.version for box in self.boxes],
            # By identity: there are other generators after `load_state_dict`.
            *[generator for random in self.random_numbers() for generator in random.generators("cuda")],
            *[module.training for module in self.modules],
            *[(_address(t), t.requires_grad) for t in tensors],
            *[_address(t) for values in states for t in tree_leaves(values) if isinstance(t, Tensor)],
            *[value if isinstance(value, PLAIN) else tree_map_only(Tensor, _address, value) for value in settings],
        ]

    def random_numbers(self) -> list[Generators]:
        """The random numbers of boxes, noisy reservoirs and baselines, which draw their own: a graph must know them."""
        own = (getattr(part, "random", None) for part in (*self.modules, *self.baselines))
        return [random for random in own if isinstance(random, Generators)]

    def _eagerly(self, args: tuple[Tensor, ...]) -> T:
        self.eager_steps += 1
        return self.step(*args)

    def _on_side_stream(self, args: tuple[Tensor, ...]) -> T:
        """As it is, but on the stream that captures: gradients accumulate on the stream they were first made on."""
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
        self.captures += 1
        if self.captures == RECAPTURES:
            warnings.warn(
                f"a GraphedStep was captured {RECAPTURES} times, since what it depends on keeps changing. If that is a "
                "learning rate, make it a tensor: Adam(..., lr=torch.tensor(1e-3), capturable=True).",
                stacklevel=3,
            )
        states = [(random, random.state()) for random in self.random_numbers()]
        assert self._stream is not None  # steps of the same kind ran on it before
        try:
            self._check_optimizers()
            self._captured[kind] = _Captured(self, args, self._stream)
        except Exception as error:  # whatever it was, it need not end the training
            self._impossible = True
            for random, state in states:
                random.load(state)  # new generators: the old ones were told of the capture
            warnings.warn(
                f"this training step cannot be captured into a CUDA graph, so it runs as it is: {_reason(error)}",
                stacklevel=3,
            )
            torch.cuda.synchronize()
            return False
        return True

    def _check_optimizers(self) -> None:
        """Refuse those that count on the CPU: a graph would not."""
        for optimizer in self.optimizers:
            for name, value in (item for state in optimizer.state.values() for item in state.items()):
                if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.device.type == "cpu"):
                    raise TypeError(
                        f"{type(optimizer).__name__} keeps its '{name}' on the CPU: make it with capturable=True, or "
                        "use another optimizer"
                    )


def _address(t: Tensor) -> int:
    """Where a graph finds the tensor; or which one it is, if it has no single place in memory."""
    try:
        return t.data_ptr()
    except (RuntimeError, ValueError, NotImplementedError):
        return id(t)


def _reason(error: BaseException) -> str:
    """What went wrong first: the capture's own complaint comes last, and says least."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


class _Captured:
    """One capture of the step."""

    def __init__(self, training: GraphedStep[Any], args: tuple[Tensor, ...], stream: torch.cuda.Stream) -> None:
        self.args = tuple(arg.detach().clone() for arg in args)  # the graph reads these
        self.graph = torch.cuda.CUDAGraph()
        for random in training.random_numbers():
            for generator in random.generators("cuda"):
                self.graph.register_generator_state(generator)
        for box in training.boxes:
            box.start_recording()
        device, collected = args[0].device, gc.isenabled()
        gc.disable()  # were another graph, long forgotten, to be collected during a capture, that would fail
        try:
            # Other threads, such as those that load data, may go on with what they do.
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.result = training.step(*self.args)
        except BaseException:
            # Torch's own random numbers would stay part of this capture until another one ends well.
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
                torch.zeros(1, device=device)
            raise
        finally:
            if collected:
                gc.enable()
            self.recordings = [(box, box.stop_recording()) for box in training.boxes]
        # When a capture begins, torch sets the place where the graph finds the offset of its random numbers, on this
        # stream; each replay sets it anew, on the current one. Unordered, the first replay had numbers of another step.
        torch.cuda.current_stream(device).wait_stream(stream)
        parameters = [p for module in training.modules for p in module._parameters.values() if p is not None]
        self.gradients = [(p, p.grad) for p in parameters if p.grad is not None]

    def replay(self, args: tuple[Tensor, ...]) -> Any:  # noqa: ANN401
        """Run it on these arguments. What it returns is a copy, which the next replay leaves alone."""
        for mine, arg in zip(self.args, args, strict=True):
            mine.copy_(arg)
        self.graph.replay()
        for parameter, gradient in self.gradients:  # a step that ran as it is has put others there
            parameter.grad = gradient
        for box, recording in self.recordings:
            box.replay(recording)
        return tree_map_only(Tensor, torch.clone, self.result)
