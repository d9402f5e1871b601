"""Several instruments that differ: which they are, and what that means for a gradient."""

import pickle

import pytest
import torch

from bondgrad import BlackBox
from bondgrad.evaluators import Answer, Evaluator, Local, Processes, Threads
from bondgrad.metrics import exact_vjp, sign_accuracy
from bondgrad.policies import Fixed
from bondgrad.reservoirs import Farm, QuantumDotArray
from tests.helpers import gradient
from tests.reservoirs.test_instrument import Wires

DOTS = QuantumDotArray()
N = 4  # instruments


class Dividing(Evaluator):
    """Sends one row after the other to the next instrument: the two ends of a pair go to different ones."""

    def __init__(self, farm):
        super().__init__(max_rows=1)
        self.instruments = [farm(number) for number in range(N)]

    def evaluate(self, request):
        rows = request.points.split(1)
        return Answer(torch.cat([self.instruments[i % N](row) for i, row in enumerate(rows)]))


def example():
    """Inputs, a gradient of the loss, and the exact gradient of a device without offsets."""
    generator = torch.Generator().manual_seed(0)
    x, gy = 4 * torch.rand(16, 10, generator=generator) - 2, torch.randn(16, 2, generator=generator)
    return x, gy, exact_vjp(DOTS, x, gy)


def measured(fn, evaluator, step):
    x, gy, _ = example()
    with evaluator:
        return gradient(BlackBox(fn, 10, 2, policy=Fixed(step), evaluator=evaluator, seed=0), x, gy)


def cosine(g, exact):
    return float(torch.cosine_similarity(g.flatten(), exact.flatten(), 0))


def test_instruments_differ_in_their_offsets():
    farm = Farm(Wires(2000), spread=0.3, seed=0)
    one, other = (farm(number)(torch.zeros(1, 2000))[0] for number in (0, 1))
    assert float(one.std()) == pytest.approx(0.3, rel=0.1)
    assert abs(float(torch.corrcoef(torch.stack((one, other)))[0, 1])) < 0.1


def test_an_offset_stays():
    instrument = Farm(Wires(), spread=0.3, seed=0)(0)
    first, second = (instrument(torch.full((1, 2), volts)) - volts for volts in (0.0, 1.0))
    assert torch.allclose(first, second, atol=1e-6)


def test_they_have_noise_and_drift_of_their_own():
    for trouble in ("noise", "drift"):
        farm = Farm(Wires(), seed=0, **{trouble: 0.1})
        assert not torch.equal(farm(0)(torch.zeros(3, 2)), farm(1)(torch.zeros(3, 2)))


@pytest.mark.parametrize("number", [0, 3])
def test_seed_and_number_say_which_it_is(number):
    """Also in another process."""
    settings = {"spread": 0.1, "noise": 0.1, "drift": 0.1, "seed": 5}
    farm, x = Farm(DOTS, **settings), torch.zeros(4, 10)
    expected = farm(number)(x)
    for same in (farm, Farm(DOTS, **settings), pickle.loads(pickle.dumps(farm))):
        assert torch.equal(same(number)(x), expected)
    assert not torch.equal(Farm(DOTS, **settings | {"seed": 6})(number)(x), expected)


def test_without_a_seed_torch_decides():
    torch.manual_seed(0)
    first = Farm(Wires(), spread=0.1)
    torch.manual_seed(0)
    assert torch.equal(Farm(Wires(), spread=0.1)(1).offset, first(1).offset)
    assert not torch.equal(Farm(Wires(), spread=0.1)(1).offset, first(1).offset)


def test_what_an_instrument_would_refuse_is_refused_at_once():
    with pytest.raises(ValueError, match="spread must be zero or a positive finite number"):
        Farm(DOTS, spread=-0.1)
    with pytest.raises(TypeError, match="sprad"):
        Farm(DOTS, sprad=0.1)


def test_pairs_that_stay_together_are_as_good_as_on_one_instrument():
    """Offsets cancel in the differences of a farm; divided between two instruments, they drown them."""
    farm, (_, _, exact) = Farm(DOTS, spread=0.05, noise=1e-4, drift=1e-4, seed=0), example()
    one = measured(farm(0), Local(max_rows=1), 0.02)
    together = measured(None, Threads(N, farm, max_rows=1), 0.02)
    divided = measured(DOTS, Dividing(farm), 0.02)
    assert min(cosine(one, exact), cosine(together, exact)) > 0.98
    assert min(sign_accuracy(one, exact), sign_accuracy(together, exact)) > 0.94
    assert cosine(divided, exact) < 0.5
    assert sign_accuracy(divided, exact) < 0.7


def test_the_error_of_divided_pairs_is_an_offset_over_twice_the_step():
    farm, (_, _, exact) = Farm(DOTS, spread=0.05, seed=0), example()
    short, longer = (float((measured(DOTS, Dividing(farm), step) - exact).norm()) for step in (0.01, 0.02))
    assert short / longer == pytest.approx(2, rel=0.05)


def test_every_process_has_its_own_instrument():
    farm, x = Farm(Wires(), spread=0.1, seed=0), torch.rand(6, 2)
    with Processes(2, farm, max_rows=1) as evaluator:
        layer = BlackBox(None, 2, 2, policy=Fixed(0.02), evaluator=evaluator)
        offsets = layer(x) - x
        g = gradient(layer, x, torch.ones(6, 2))
    known = torch.stack([farm(number).offset for number in range(2)])
    assert (torch.cdist(offsets, known).amin(1) < 1e-6).all()
    assert torch.allclose(g, torch.ones(6, 2), atol=1e-4)
