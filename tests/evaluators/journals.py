"""What tests of journals need: a look into the file, a box that fails, a training that can be resumed."""

import io
import sqlite3
import warnings

import torch
from torch import nn

from bondgrad import BlackBox
from tests.evaluators.boxes import sine


def rows_of(path, columns, where="1", *values):
    connection = sqlite3.connect(path)
    found = connection.execute(f"SELECT {columns} FROM evaluations WHERE {where} ORDER BY rowid", values).fetchall()
    connection.close()
    return found


def unsure(x: torch.Tensor):
    """Raises for about 5 % of all rows, by their digits, and has no finite output for as many others."""
    digits = (x[:, 0] * 1000).abs().floor() % 20
    if bool((digits == 0).any()):
        raise RuntimeError("laser is off")
    return torch.sin(x).masked_fill(digits[:, None] == 1, torch.nan)


class Training:
    """A small training that can be saved and resumed."""

    def __init__(self, evaluator, fn=sine, **options):
        torch.manual_seed(0)
        self.box = BlackBox(fn, 3, evaluator=evaluator, seed=0, **options)
        self.model = nn.Sequential(nn.Linear(4, 3), self.box, nn.Linear(3, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)

    def run(self, steps, batch=8):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* rows? (was|were) asked again|.* rows? got no finite output")
            for _ in range(steps):
                x = torch.randn(batch, 4)
                self.optimizer.zero_grad()
                self.model(x).square().mean().backward()
                self.optimizer.step()
        return self

    def state(self):
        file = io.BytesIO()
        torch.save((self.model.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()), file)
        return file.getvalue()

    def load(self, state):
        model, optimizer, rng = torch.load(io.BytesIO(state), weights_only=False)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        torch.set_rng_state(rng)
        return self

    @property
    def parameters(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])
