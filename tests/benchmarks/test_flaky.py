"""Training through a box that fails now and then stays finite, and costs a few evaluations."""

import pytest
import torch
from flaky import BOUND, KINDS, FlakyBox, train

from bondgrad import BlackBox, BoxError
from bondgrad.evaluators import Local


def test_faults_are_as_frequent_as_they_should_be():
    box, x = FlakyBox(KINDS["5 % NaN"])(), torch.randn(4000, 5)
    assert 0.04 < box(x).isnan().all(1).double().mean() < 0.06
    failed = 0
    box = FlakyBox(KINDS["5 % errors"])()
    for row in x.split(1):
        try:
            assert box(row).isfinite().all()
        except RuntimeError:
            failed += 1
    assert 140 < failed < 260
    assert torch.equal(FlakyBox(KINDS["a region of NaN"])()(x).isnan().all(1), x[:, 0] > BOUND)


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on(kind):
    clean, found = train("Local", KINDS["none"], steps=6), train("Local", KINDS[kind], steps=6)
    assert found["finite"]
    assert found["signs, %"] > 99
    assert found["test loss without faults"] == pytest.approx(clean["test loss without faults"], rel=0.02)
    assert found["asked again"] > 0 or KINDS[kind].region or kind == "none"
    assert bool(found["warnings"]) == (found["asked again"] > 0)


def test_a_box_that_fails_for_all_rows_ends_training():
    box = FlakyBox(KINDS["5 % errors"]._replace(error=1.0))()
    layer = BlackBox(box, 5, evaluator=Local(retries=0))
    with pytest.raises(BoxError, match="did not converge"):
        layer(torch.randn(4, 5))
