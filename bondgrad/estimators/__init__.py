"""Estimators: how evaluations of the box become the gradient at its inputs.

`Central` (BOND), `Forward` and `Simultaneous` (BONDS) are subclasses of `Estimator`, and users can write others. A
subclass says in class attributes what its differences are like, and in two methods what they cost and how they are
taken. Where each input, or each group of inputs, is moved by itself, `column_vjp` does the work: groups, chunks, limits
and failed evaluations. An example is Richardson's extrapolation of central differences, whose error falls with the
fourth power of the step:

    >>> class Richardson(Estimator):
    ...     order = 4
    ...
    ...     def evaluations(self, groups):
    ...         return 4 * groups
    ...
    ...     def vjp(self, site, evaluate, max_rows):
    ...         twice = site._replace(delta=2 * site.delta)
    ...         near, far = (column_vjp(s, evaluate, max_rows, signs=(1, -1)) for s in (site, twice))
    ...         return (4 * near - far) / 3

    >>> layer = bondgrad.BlackBox(torch.sin, 2, estimator=Richardson(), policy=bondgrad.policies.Fixed(0.1))
    >>> x = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    >>> layer(x).sum().backward()
    >>> x.grad  # central differences alone would be 2e-3 off
    tensor([[1.0000, 1.0000]], dtype=torch.float64)

An estimator that needs other points is made of the same pieces:

- `Site`: what `vjp` is given about one backward pass: rows, answers, gradient, perturbations, limits, groups.
- `Evaluate`: the type of the function that evaluates the box.
- `within_limits`: moves points back inside the limits, and to values that can be set. Differences are then divided by
  what is left of the move.
- `chunks`: the rows and moves of each request, so that no more than `max_rows` points exist at a time.
- `output_difference`, `loss_change`, `input_difference`: y⁺ - y⁻, gy·(y⁺ - y⁻) and x⁺ - x⁻, where evaluations may have
  failed.
- `structure.Groups`, in `Site.groups`: which inputs may move together, and which outputs depend on each of them.

`bondgrad.testing.CHECKS` are the checks that every estimator must pass.
"""

from bondgrad.estimators._central import Central
from bondgrad.estimators._differences import chunks, column_vjp, input_difference, loss_change, output_difference
from bondgrad.estimators._estimator import Estimator, Evaluate, Site, within_limits
from bondgrad.estimators._forward import Forward
from bondgrad.estimators._simultaneous import Simultaneous

__all__ = ["Central", "Estimator", "Evaluate", "Forward", "Simultaneous", "Site"]
# For estimators that users write.
__all__ += ["chunks", "column_vjp", "input_difference", "loss_change", "output_difference", "within_limits"]
