"""Training through a box that fails now and then stays finite, and costs a few evaluations."""

import pytest
import torch
from flaky import KINDS, FlakyBox, train

from bondgrad import BoxError


def test_faults_are_as_frequent_as_they_should_be():
    box, x = FlakyBox(KINDS["5 % NaN"], 0.0)(), torch.randn(4000, 5)
    assert 0.04 < box(x).isnan().all(1).double().mean() < 0.06
    failed = 0
    box = FlakyBox(KINDS["5 % errors"], 0.0)()
    for row in x.split(1):
        try:
            assert box(row).isfinite().all()
        except RuntimeError:
            failed += 1
    assert 140 < failed < 260
    assert torch.equal(FlakyBox(KINDS["a region of NaN"], 0.5)()(x).isnan().all(1), x[:, 0] > 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on(kind):
    clean, found = train("Local", KINDS["none"], steps=6), train("Local", KINDS[kind], steps=6)
    assert found["finite"]
    assert found["signs, %"] > 99
    tolerance = 0.02 if KINDS[kind].region is None else 0.1
    assert found["test loss without faults"] == pytest.approx(clean["test loss without faults"], rel=tolerance)
    assert bool(found["warnings"]) == (kind != "none")
    assert found["asked again"] > 0 or kind == "none"


def test_a_box_that_always_fails_ends_training():
    with pytest.raises(BoxError, match="did not converge"):
        train("Local", KINDS["5 % errors"]._replace(error=1.0), steps=1)
