"""Whole training steps as CUDA graphs."""

import warnings
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bondgrad._trace import Step
from bondgrad.box import BlackBox

T = TypeVar("T")
WARM_UP = 3  # steps that run before a capture, so that nothing in it happens for the first time
RECAPTURES = 20  # after which it is said that they cost more than they bring


class GraphedStep(Generic[T]):
    """A training step that is captured into a CUDA graph, and replayed without Python from then on.

    The first calls run as they are, then one is captured, and later ones are replays: the same kernels on the same
    numbers, so that training goes as it would have. A step runs as it is again when

    - a box asks for it (`BlackBox.due`),
    - the arguments have other shapes than those captured, as in the last batch of an epoch,
    - there is no CUDA device, or the step cannot be captured: then always, with a warning that says why.

    It is captured anew when something it depends on has changed: `BlackBox.version`, `train()` or `eval()` of a module,
    or a number in an optimizer's `param_groups`. (A learning rate that changes in every step should be a tensor, which
    the graph reads, and be changed in place; schedulers do so.)

    Whatever `step` does besides work on the GPU, such as appending to a list, happens only when it is captured.

    Args:
        step: Takes tensors, does everything from `zero_grad` to `optimizer.step`, and returns tensors (or None). Use an
            optimizer made with `capturable=True`, where it has that argument.
        parts: The modules and optimizers that the step uses.

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

    def __init__(self, step: Callable[..., T], *parts: nn.Module | Optimizer) -> None:
        if not parts or not all(isinstance(part, (nn.Module, Optimizer)) for part in parts):
            raise TypeError("GraphedStep(step, *parts) needs the modules and optimizers that the step uses")
        self.step = step
        self.modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
        self.boxes = [module for module in self.modules if isinstance(module, BlackBox)]
        self.optimizers = [part for part in parts if isinstance(part, Optimizer)]
        self.captures = self.replays = self.eager_steps = 0
        self._warm = 0  # steps that ran since something changed, at most WARM_UP
        self._version: Any = None
        self._captured: _Captured | None = None
        self._stream: torch.cuda.Stream | None = None
        self._impossible = False

    def __call__(self, *args: Tensor) -> T:
        """One training step."""
        if self._impossible or not all(isinstance(arg, Tensor) and arg.is_cuda for arg in args) or not args:
            return self._eagerly(args)
        if any(box.due() for box in self.boxes):
            return self._on_side_stream(args)
        version = self._current_version()
        if version != self._version:
            # One step first, in which whatever is new can settle; at the very beginning a few.
            self._warm = min(self._warm, WARM_UP - 1)
            self._version, self._captured = version, None
        if self._captured is None:
            if self._warm < WARM_UP:
                self._warm += 1
                return self._on_side_stream(args)
            if not self._capture(args):
                return self._on_side_stream(args)
        if self._captured is None or not self._captured.fits(args):
            return self._on_side_stream(args)
        self.replays += 1
        result: T = self._captured.replay(args)
        return result

    def _current_version(self) -> tuple[object, ...]:
        settings = tuple(
            value
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for key, value in group.items()
            if key != "params"
        )
        return (
            *(box.version for box in self.boxes),
            *(module.training for module in self.modules),
            # A tensor is read by the graph: only that it is the same one matters.
            *(id(value) if isinstance(value, Tensor) else value for value in settings),
        )

    def _eagerly(self, args: tuple[Tensor, ...]) -> T:
        self.eager_steps += 1
        return self.step(*args)

    def _on_side_stream(self, args: tuple[Tensor, ...]) -> T:
        """As it is, but on the stream that captures: gradients accumulate on the stream they were first made on."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(args[0].device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(args[0].device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = self._eagerly(args)
        current.wait_stream(self._stream)
        return result

    def _capture(self, args: tuple[Tensor, ...]) -> bool:
        self.captures += 1
        if self.captures == RECAPTURES:
            warnings.warn(
                f"a GraphedStep was captured {RECAPTURES} times, since what it depends on keeps changing. If that is a "
                "learning rate, make it a tensor: Adam(..., lr=torch.tensor(1e-3), capturable=True).",
                stacklevel=3,
            )
        states = [box.policy_state.random.state() for box in self.boxes]
        try:
            self._captured = _Captured(self.step, args, self.boxes, self._stream)
        except Exception as error:  # whatever it was, it need not end the training
            self._impossible = True
            for box, state in zip(self.boxes, states, strict=True):
                box.policy_state.random.load(state)  # new generators: the old ones were told of the capture
            torch.cuda.synchronize()
            cause: BaseException = error
            while cause.__context__ is not None:  # the capture's own complaint comes last, and says least
                cause = cause.__context__
            warnings.warn(
                f"this training step cannot be captured into a CUDA graph, so it runs as it is: "
                f"{type(cause).__name__}: {str(cause).splitlines()[0]}",
                stacklevel=3,
            )
            return False
        return True


class _Captured:
    """One capture of the step."""

    def __init__(
        self,
        step: Callable[..., Any],
        args: tuple[Tensor, ...],
        boxes: list[BlackBox],
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.args = tuple(arg.detach().clone() for arg in args)  # the graph reads these
        self.graph = torch.cuda.CUDAGraph()
        self.recordings = [_Recording(box, self.graph) for box in boxes]
        # Other threads, such as those that load data, may go on with what they do.
        try:
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.result = step(*self.args)
        finally:
            for recording in self.recordings:
                recording.stop()

    def fits(self, args: tuple[Tensor, ...]) -> bool:
        """Whether these arguments can be put in the place of those captured."""
        return len(args) == len(self.args) and all(
            a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
            for a, b in zip(args, self.args, strict=True)
        )

    def replay(self, args: tuple[Tensor, ...]) -> Any:  # noqa: ANN401
        """Run it on these arguments. What it returns is a copy, which the next replay leaves alone."""
        for mine, arg in zip(self.args, args, strict=True):
            mine.copy_(arg)
        self.graph.replay()
        for recording in self.recordings:
            recording.replayed()
        return torch.utils._pytree.tree_map_only(Tensor, torch.clone, self.result)


class _Recording:
    """What a captured step leaves in a box's counters and for its hooks, to be left again by every replay.

    Made before the capture, since the graph must be told of the box's random numbers; `stop` comes after it.
    """

    def __init__(self, box: BlackBox, graph: torch.cuda.CUDAGraph) -> None:
        for generator in box.policy_state.random.generators:
            if generator.device.type == "cuda":
                graph.register_generator_state(generator)
        self.box = box
        self.calls, self.evaluations = box._function.calls, box._function.evaluations
        box._trace.captured = []

    def stop(self) -> None:
        """The step is captured: it counts from its first replay on."""
        function, trace = self.box._function, self.box._trace
        self.calls, self.evaluations = function.calls - self.calls, function.evaluations - self.evaluations
        function.calls -= self.calls
        function.evaluations -= self.evaluations
        self.last, self.steps, trace.captured = trace.last, trace.captured, []

    def replayed(self) -> None:
        """Leave it. Hooks get copies, since the next replay overwrites what they may keep."""
        self.box._function.calls += self.calls
        self.box._function.evaluations += self.evaluations
        self.box._trace.last = self.last
        for step in self.steps:
            self.box._run_hooks(Step(*(t.clone() for t in step)))
