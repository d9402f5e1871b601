"""Random numbers that belong to one object: a generator for each device, all from one seed."""

import pytest
import torch

from bondgrad.torch_support._random import Generators

CPU = torch.device("cpu")


def drawn(generator):
    return torch.rand(3, generator=generator).tolist()


def test_the_seed_decides():
    expected = drawn(torch.Generator().manual_seed(5))
    random = Generators(5)
    assert random.seed == 5
    assert drawn(random.on(CPU)) == expected
    assert drawn(random.on(CPU)) != expected  # it goes on
    with pytest.raises(ValueError, match="seed must be"):
        Generators(-1)


def test_without_one_it_is_drawn_from_torchs_own():
    torch.manual_seed(0)
    first, second = Generators(None), Generators(None)
    torch.manual_seed(0)
    assert Generators(None).seed == first.seed != second.seed
    assert max(first.seed, second.seed) > 2**32  # from all there are
    assert min(first.seed, second.seed) >= 0


def test_a_copy_leaves_no_trace_until_it_is_joined():
    random, expected = Generators(5), drawn(torch.Generator().manual_seed(5))
    copied = random.fork(CPU)
    assert drawn(copied) == expected
    assert drawn(random.on(CPU)) == expected
    copied = random.fork(CPU)
    after = drawn(copied)
    assert drawn(random.fork(CPU)) == after
    random.join(CPU, copied)
    assert drawn(random.on(CPU)) not in (expected, after)


def test_a_copy_is_joined_where_nothing_was_drawn_before():
    random, twin = Generators(5), torch.Generator().manual_seed(5)
    copied = random.fork(CPU)
    drawn(copied), drawn(twin)
    random.join(CPU, copied)
    assert drawn(random.on(CPU)) == drawn(twin)


def test_generators_of_a_kind_of_device():
    random = Generators(5)
    assert random.generators("cpu") == ()
    generator = random.on(CPU)
    assert random.generators("cpu") == (generator,)
    assert random.generators("cuda") == ()


def test_saving_and_loading():
    random, other = Generators(5), Generators(6)
    drawn(random.on(CPU)), drawn(other.on(CPU))
    other.load(random.state())
    assert other.seed == 5
    assert drawn(other.on(CPU)) == drawn(random.on(CPU))
    assert torch.equal(other.state()["devices"]["cpu"], random.state()["devices"]["cpu"])  # as they are by now


def test_states_of_devices_that_are_not_here_are_kept():
    elsewhere = torch.arange(16, dtype=torch.uint8)
    random = Generators(5)
    random.load({"seed": 7, "devices": {"cuda:7": elsewhere}})
    assert drawn(random.on(CPU)) == drawn(torch.Generator().manual_seed(7))
    assert set(random.state()["devices"]) == {"cuda:7", "cpu"}
    assert torch.equal(random.state()["devices"]["cuda:7"], elsewhere)
