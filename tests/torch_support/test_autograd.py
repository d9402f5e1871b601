"""Where autograd meets estimation: what the gradient is made of, and what is refused."""

import pytest
import torch

from bondgrad import BoxError
from bondgrad.torch_support._autograd import Bridge, check_tangent


def told(x, y, gy, *context):
    """What a vector-Jacobian product was given, as numbers."""
    return 100 * x + 10 * y + gy + sum(context)


def test_the_gradient_is_what_it_is_said_to_be():
    x, y = torch.tensor([[1.0, 2.0]], requires_grad=True), torch.tensor([[3.0, 4.0]])
    out = Bridge.apply(x, y, told, torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.25]]))
    assert out.tolist() == y.tolist()
    (g,) = torch.autograd.grad(out, x, torch.tensor([[5.0, 6.0]]))
    assert g.tolist() == [[100 + 30 + 5.75, 200 + 40 + 6.75]]


def test_the_answer_is_a_copy_in_the_dtype_of_x():
    x, y = torch.zeros(1, 2, requires_grad=True), torch.ones(1, 2)
    out = Bridge.apply(x, y, told)
    with torch.no_grad():
        out.fill_(7)
    assert y.tolist() == [[1, 1]]
    assert Bridge.apply(x, y.double(), told).dtype == torch.float32


def test_second_derivatives_are_refused():
    x = torch.ones(1, 2, requires_grad=True)
    out = Bridge.apply(x, torch.ones(1, 2), told)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert g.tolist() == [[111, 111]]
    with pytest.raises(BoxError, match="second derivatives"):
        g.sum().backward()


def test_tangents_are_refused():
    check_tangent(torch.zeros(2))
    with torch.autograd.forward_ad.dual_level():
        check_tangent(torch.zeros(2))
        with pytest.raises(BoxError, match="forward-mode"):
            check_tangent(torch.autograd.forward_ad.make_dual(torch.zeros(2), torch.ones(2)))
