"""Training: one run, that is one set of settings with one seed."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bondgrad.baselines import SPSA
from bondgrad.experiments.comparison import LOOK, SIGNS, Comparison, column, deviation, mean, thinned
from bondgrad.experiments.compilation import compiled
from bondgrad.experiments.model import Parts, build, made_policy
from bondgrad.experiments.repeatability import choose_vector_code, deterministic_convolutions
from bondgrad.experiments.settings import Settings
from bondgrad.experiments.task import Task
from bondgrad.torch_support._graphs import GraphedStep


class Run:
    """One method, one seed: trains, measures, and can be saved and resumed in the middle of an epoch, bit for bit.

    The clock stands still while the gradient is compared with the exact one. On a GPU, where steps are only queued, it
    runs in turns of their own (`turn(timed=True)`), in which nothing is compared.

    Args:
        settings: What to do.
        seed: Of data, weights, order and perturbations.
        folder: Of the pictures.
        device: Where.
    """

    def __init__(self, settings: Settings, seed: int, folder: Path, device: torch.device) -> None:
        choose_vector_code()
        self.settings, self.seed, self.device = settings, seed, device
        self.task = Task(settings, seed, folder, device)
        self.parts: Parts = build(settings, seed, device)
        read_in, read_out = self.parts.read_in, self.parts.read_out
        self._networks = tuple(map(compiled, (read_in, read_out))) if settings.compile else (read_in, read_out)
        self.optimizer = _optimizer(settings, self.parts, device)
        self.order = torch.Generator().manual_seed(seed)
        self.crops = torch.Generator(device).manual_seed(seed)
        self.spsa: SPSA | None = None
        if settings.gradient.method == "SPSA":
            self.spsa = SPSA(read_in.parameters(), mu=settings.gradient.mu, n=settings.gradient.n, seed=seed)
        used = (read_in, read_out, self.parts.through, self.parts.black_box, self.optimizer, self.spsa)
        graphed = GraphedStep(self._step, *[part for part in used if part is not None])
        on_a_bench = (settings.box or {}).get("bench") is not None  # whose voltages are looked at in Python
        self.take_step = graphed if settings.graph and device.type == "cuda" and not on_a_bench else self._step
        self.replayed = False  # by a process before this one
        self.comparison = Comparison(self.parts, self._behind, self._precision, device)
        self._rows = self._shuffled()
        self.epoch = self.batch = self.steps = 0  # that come next
        self.loss_sum = torch.zeros((), device=device)  # of this epoch
        self.looks: list[Tensor] = []  # [len(LOOK)] each, of this epoch
        self.trace: list[list[float]] = []  # of the epochs before
        self.history: list[dict[str, Any]] = []  # one entry for each epoch
        self.milliseconds: list[float] = []  # of steps
        self.evaluations = 0  # of the box, before this process; its own are in `stats`
        self.seconds = 0.0  # of all the work
        self.failed: str | None = None  # why it cannot go on

    @property
    def steps_of_epoch(self) -> int:
        """Whole batches in the data, or fewer if it is so set. What remains comes in another epoch's order."""
        whole = len(self.task.x_train) // self.settings.batch
        return min(whole, self.settings.steps or whole)

    @property
    def done(self) -> bool:
        """Whether all epochs are over, or there is no point in going on."""
        return self.epoch >= self.settings.epochs or self.failed is not None

    # ---- training

    def turn(self, steps: int, timed: bool = False, stopped: Callable[[], bool] = lambda: False) -> int:
        """Take up to so many steps, but not beyond the end of the epoch, nor when stopped; returns how many."""
        begun = time.perf_counter()
        on_gpu = self.device.type == "cuda"
        n, taken = min(steps, self.steps_of_epoch - self.batch), 0
        if timed and on_gpu:
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        with deterministic_convolutions():
            while taken < n and not (taken and stopped()):
                self._one(timed, compare=not (timed and on_gpu))
                taken += 1
        if timed and on_gpu:
            torch.cuda.synchronize(self.device)
            self.milliseconds.append(1e3 * (time.perf_counter() - start) / taken)
        if self.batch == self.steps_of_epoch:
            self._end_epoch()
        self.seconds += time.perf_counter() - begun
        return taken

    def _one(self, timed: bool, compare: bool) -> None:
        """One step, and a look at it if that is due."""
        clock = time.perf_counter()
        rows = self._rows[self.batch]
        x, y = self.task.batch(rows, self.crops)
        if self.device.type == "cuda" and x.ndim == 4:
            x = x.to(memory_format=torch.channels_last)
        spent = time.perf_counter() - clock
        every = self.settings.measure_every
        compare = compare and every > 0 and self.steps % every == 0 and self.settings.gradient.method != "AD"
        before = self.comparison.before(x, y) if compare else None
        clock = time.perf_counter()
        loss = self.take_step(x, y)
        if timed and self.device.type == "cpu":
            self.milliseconds.append(1e3 * (spent + time.perf_counter() - clock))
        self.loss_sum += loss
        if before is not None:
            self.looks.append(self.comparison.look(self.steps, loss, before))
        self.batch += 1
        self.steps += 1

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        """From batch to new weights."""
        self.optimizer.zero_grad()
        if self.spsa is not None:
            loss = self._by_spsa(self.spsa, x, y)
        elif self.settings.gradient.graphs == 2:
            a = self._read_in(x)
            z = a.detach().requires_grad_()
            loss = self._behind(self._box(z), y)
            loss.backward()  # type: ignore[no-untyped-call]
            a.backward(z.grad)  # type: ignore[no-untyped-call]
        else:
            loss = self._behind(self._box(self._read_in(x)), y)
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def _read_in(self, x: Tensor) -> Tensor:
        with self._precision():
            a: Tensor = self._networks[0](x)
        return a

    def _box(self, a: Tensor) -> Tensor:
        box = self.parts.through if self.parts.black_box is None else self.parts.black_box
        return a if box is None else box(a)

    def _behind(self, a: Tensor, y: Tensor) -> Tensor:
        """The loss, from the box's outputs on."""
        with self._precision():
            answer = self._networks[1](a)
        loss: Tensor = self.task.loss(answer.float(), y)
        return loss

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        # Casts are not kept from one use to the next, which a captured graph could not do either.
        half = self.settings.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=half, cache_enabled=False)

    def _by_spsa(self, spsa: SPSA, x: Tensor, y: Tensor) -> Tensor:
        """The read-out's gradient exactly, the read-in's by SPSA, each time with what the box remembers now."""
        through = self.parts.through
        assert through is not None
        through.still = True
        spsa.estimate(lambda: self._behind(through(self._read_in(x)), y))
        through.still = False
        with torch.no_grad():
            a = through(self._read_in(x))
        loss = self._behind(a, y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    # ---- measuring

    def _end_epoch(self) -> None:
        looks = torch.stack(self.looks).tolist() if self.looks else []
        loss = float(self.loss_sum) / self.steps_of_epoch
        test_loss, accuracy = self.test()
        if not (math.isfinite(loss) and math.isfinite(test_loss)):
            self.failed = f"the loss was {loss:g} in epoch {self.epoch + 1}, and {test_loss:g} on the test set"
            return
        rate = self.optimizer.param_groups[0]["lr"]
        self.history.append(
            {
                "epoch": self.epoch + 1,
                "step": self.steps,
                "train_loss": loss,
                "test_loss": test_loss,
                "accuracy": accuracy,
                **{name: mean(column(looks, name)) for name in SIGNS},
                "rate": float(rate),
            }
        )
        self.trace += looks
        self.looks, self.batch = [], 0
        self.loss_sum.zero_()
        self.epoch += 1
        factor = self.settings.schedule(self.epoch, self.settings.epochs)
        for group in self.optimizer.param_groups:
            group["lr"] = factor * group["initial"]
        self._renew_policy()
        self._rows = self._shuffled()

    def _renew_policy(self) -> None:
        """Give the box the policy of this epoch, if its bounds follow the learning rate's schedule."""
        box = self.parts.black_box
        if box is None or self.settings.gradient.reading.eta != "scheduled":
            return
        policy = made_policy(self.settings, self.epoch)
        if repr(policy) != repr(box.policy):  # a step that was captured is captured anew for another one
            box.policy = policy

    def test(self) -> tuple[float, float | None]:
        """Loss and accuracy on the test set."""
        modules = [module for module in self.parts if module is not None]
        for module in modules:
            module.eval()
        try:
            return self.task.test(self._answer)
        finally:
            for module in modules:
                module.train()

    def _answer(self, x: Tensor) -> Tensor:
        # Not by the compiled networks, which would be compiled once more for evaluation.
        with self._precision():
            a = self.parts.read_in(x)
            answer: Tensor = self.parts.read_out(a if self.parts.through is None else self.parts.through(a))
        return answer.float()

    def _shuffled(self) -> tuple[Tensor, ...]:
        self._order_before = self.order.get_state()
        rows = torch.randperm(len(self.task.x_train), generator=self.order)
        return torch.split(rows.to(self.device), self.settings.batch)

    # ---- saving

    def state(self) -> dict[str, Any]:
        """All that a process needs to go on as if it were this one."""
        return {
            "settings": self.settings.as_dict(),
            "seed": self.seed,
            "device": self.device.type,
            "modules": [None if part is None else part.state_dict() for part in self.parts],
            "optimizer": self.optimizer.state_dict(),
            "order": self._order_before,
            "crops": self.crops.get_state(),
            "spsa": None if self.spsa is None else self.spsa.random.state(),
            "at": (self.epoch, self.batch, self.steps),
            "loss_sum": self.loss_sum,
            "columns": list(LOOK),
            "looks": torch.stack(self.looks) if self.looks else None,
            "written": (self.trace, self.history, self.milliseconds, self.asked, self.seconds),
            "captured": self.captured,
        }

    def load(self, state: dict[str, Any]) -> None:
        """The counterpart of `state`, for a run with the same settings and seed."""
        for part, saved in zip(self.parts, state["modules"], strict=True):
            if part is not None:
                part.load_state_dict(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.order.set_state(state["order"].cpu())
        self._rows = self._shuffled()
        self.crops.set_state(state["crops"].cpu())
        if self.spsa is not None:
            self.spsa.random.load(state["spsa"])
        self.epoch, self.batch, self.steps = state["at"]
        self._renew_policy()
        self.loss_sum = state["loss_sum"]
        self.looks = [] if state["looks"] is None else list(state["looks"].unbind())
        self.trace, self.history, self.milliseconds, self.evaluations, self.seconds = state["written"]
        self.replayed = state["captured"]

    # ---- results

    @property
    def captured(self) -> bool:
        """Whether steps were replays of a CUDA graph."""
        return self.replayed or (isinstance(self.take_step, GraphedStep) and self.take_step.replays > 0)

    @property
    def asked(self) -> int:
        """Rows, or sequences, sent to the box so far, in training."""
        if self.parts.black_box is not None:
            stats = self.parts.black_box.stats  # what a journal answered was sent by a process before this one
            return self.evaluations + stats.evaluations + stats.recorded
        through = self.parts.through
        passes = 0 if through is None else 1 if self.spsa is None else 1 + 2 * self.spsa.n
        rows = 1 if through is not None and through.state is not None else self.settings.batch  # a sequence counts once
        return passes * self.steps * rows

    def record(self) -> dict[str, Any]:
        """What the run has brought so far."""
        signs = {name: column(self.trace, name) for name in SIGNS}
        last = self.history[-1] if self.history else {}
        names = ("epoch", "train_loss", "test_loss", "accuracy", "sign_accuracy", "parameter_sign_accuracy", "rate")
        return {
            "run": self.settings.run,
            "seed": self.seed,
            "method": self.settings.gradient.method,
            "epochs": self.settings.epochs,
            "epochs_run": self.epoch,
            "steps_run": self.steps,
            "failed": self.failed,
            "steps_of_epoch": self.settings.steps if self.settings.cut else None,
            "batch": self.settings.batch,
            "graph": self.captured,
            "compiled": self.settings.compile,
            "precision": self.settings.precision,
            "trainable": _count(self.parts.read_in) + _count(self.parts.read_out),
            "frozen": 0 if self.parts.exact is None else _count(self.parts.exact),
            "seconds": round(self.seconds, 1),
            "loop_ms": statistics.median(self.milliseconds) if self.milliseconds else None,
            "loop_quartiles": _quartiles(self.milliseconds),
            "loop_samples": len(self.milliseconds),
            "evaluations_per_step": self.asked / self.steps if self.steps and self.parts.through is not None else None,
            **{name: mean(shares) for name, shares in signs.items()},
            **{name.replace("accuracy", "deviation"): deviation(shares) for name, shares in signs.items()},
            "measured_every": self.settings.measure_every,
            "test_loss": last.get("test_loss"),
            "accuracy": last.get("accuracy"),
            "at": self.settings.at,
            "curve": {name: [entry[name] for entry in self.history] for name in names},
            "trace": thinned(self.trace) if self.trace else None,
        }


def _quartiles(values: list[float]) -> list[float] | None:
    return statistics.quantiles(values, method="inclusive")[::2] if len(values) > 1 else None


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _optimizer(settings: Settings, parts: Parts, device: torch.device) -> torch.optim.Optimizer:
    """One group for each network, each with the rate that it begins with."""
    how = settings.optimizer
    behind = how.rate if how.read_out_rate is None else how.read_out_rate
    factor = settings.schedule(0, settings.epochs)
    groups = [
        {"params": list(network.parameters()), "lr": factor * rate, "initial": rate}
        for network, rate in ((parts.read_in, how.rate), (parts.read_out, behind))
    ]
    fast = device.type == "cuda"
    if how.kind == "sgd":
        return torch.optim.SGD(groups, fused=fast)
    return torch.optim.Adam(groups, capturable=fast, fused=fast)
