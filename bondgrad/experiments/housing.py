"""California Housing through a frozen network, trained with and without the box's gradient."""

import time
from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from bondgrad._trace import Step
from bondgrad.baselines import SPSA
from bondgrad.box import BlackBox
from bondgrad.data import california_housing
from bondgrad.metrics import exact_vjp, sign_accuracy
from bondgrad.networks import ffnn
from bondgrad.policies import Policy

Method = Literal["AD", "BOND", "BONDS", "SPSA"]
METHODS: tuple[Method, ...] = get_args(Method)
BATCH = 64
SPSA_MU = 1e-3


class HousingRun:
    """One method, one seed: read-in 8-100-100-5, frozen box 5-500-5, read-out 5-100-100-1.

    Weights, the split and the order of the batches depend on the seed alone, so that methods differ in nothing but the
    gradient. The learning rate is the paper's: 1e-3, a tenth of it from half of the epochs on, a hundredth in the last
    quarter. SPSA, for which the paper has 1e-2, hardly leaves the start with that here; its rate and perturbation are
    as good as any that `benchmarks/spsa_search.py` tried.
    """

    def __init__(
        self,
        method: Method,
        seed: int,
        epochs: int,
        policy: str | Policy = "bond",
        rate: float = 1e-3,
        spsa_mu: float = SPSA_MU,
    ) -> None:
        self.method, self.seed, self.epochs = method, seed, epochs
        self.data = california_housing(seed)
        torch.manual_seed(seed)
        self.read_in = ffnn([8, 100, 100, 5], nn.ReLU)
        self.exact_box = ffnn([5, 500, 5]).requires_grad_(False)
        self.read_out = ffnn([5, 100, 100, 1])
        estimator = "simultaneous" if method == "BONDS" else "central"
        self.black_box = BlackBox(self.exact_box, 5, 5, estimator=estimator, policy=policy, seed=seed)
        self.loss = nn.HuberLoss()
        self.optimizer = torch.optim.Adam([*self.read_in.parameters(), *self.read_out.parameters()], lr=rate)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.order = torch.Generator().manual_seed(seed)
        self.test_loss: list[float] = []  # after each epoch
        self.signs: list[float] = []  # sign accuracy of each step; none for AD
        self.seconds: list[float] = []  # of each step, without the measuring
        self._seen: list[Step] = []
        self.black_box.register_step_hook(lambda _, step: self._seen.append(step))
        self.spsa = SPSA(self.read_in.parameters(), mu=spsa_mu, seed=seed)

    def _rate(self, epoch: int) -> float:
        if epoch < self.epochs / 2:
            return 1.0
        return 0.1 if epoch <= 0.75 * self.epochs else 0.01

    def epoch(self) -> Iterator[float]:
        """Train for one epoch, yielding after every step the part of it that is done; then test."""
        x, y = self.data.x_train, self.data.y_train
        batches = torch.randperm(len(x), generator=self.order).split(BATCH)  # type: ignore[no-untyped-call]
        for i, batch in enumerate(batches):
            self._step(x[batch], y[batch])
            yield (i + 1) / len(batches)
        self.schedule.step()
        with torch.no_grad():
            predicted = self.read_out(self.exact_box(self.read_in(self.data.x_test)))
            self.test_loss.append(float(self.loss(predicted, self.data.y_test)))

    def _step(self, x: Tensor, y: Tensor) -> None:
        """One optimizer step. The clock stands still while the gradient is compared with the exact one."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        if self.method == "SPSA":
            self._gradient_by_spsa(x, y)
        else:
            box = self.exact_box if self.method == "AD" else self.black_box
            self.loss(self.read_out(box(self.read_in(x))), y).backward()
        seconds = time.perf_counter() - start
        if self.method != "AD":
            self.signs.append(float(self._sign_accuracy(x, y)))
        start = time.perf_counter()
        self.optimizer.step()
        self.seconds.append(seconds + time.perf_counter() - start)

    def _gradient_by_spsa(self, x: Tensor, y: Tensor) -> None:
        """The read-out's gradient exactly, the read-in's by SPSA."""

        def through_box() -> Tensor:
            with torch.no_grad():
                return self.black_box(self.read_in(x))  # type: ignore[no-any-return]

        self.loss(self.read_out(through_box()), y).backward()
        self.spsa.estimate(lambda: self.loss(self.read_out(through_box()), y))

    def _sign_accuracy(self, x: Tensor, y: Tensor) -> Tensor:
        """Of the gradient at the box's inputs; for SPSA, of the read-in's parameters."""
        if self.method == "SPSA":
            parameters = list(self.read_in.parameters())
            loss = self.loss(self.read_out(self.exact_box(self.read_in(x))), y)
            exact = torch.autograd.grad(loss, parameters)
            estimated = [p.grad for p in parameters if p.grad is not None]
            return sign_accuracy(torch.cat([g.flatten() for g in estimated]), torch.cat([g.flatten() for g in exact]))
        step = self._seen.pop()
        return sign_accuracy(step.g, exact_vjp(self.exact_box, step.x, step.gy))

    @property
    def evaluations_per_step(self) -> float:
        """Rows sent to the box for one optimizer step."""
        return BATCH if self.method == "AD" else self.black_box.stats.evaluations / max(1, len(self.seconds))
