"""The arithmetic around a box by itself: gradients, autocast and shortcuts of float32, and all as before afterwards."""

import contextlib
import threading

import pytest
import torch

from bondgrad.torch_support._precision import arithmetic, autocast_dtype

CPU = torch.device("cpu")


def now():
    return torch.is_grad_enabled(), autocast_dtype(torch.zeros(1))


@pytest.mark.parametrize("graded", [True, False])
@pytest.mark.parametrize("around", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("full", "asked", "inside"),
    [(True, None, None), (True, torch.bfloat16, None), (False, None, None), (False, torch.bfloat16, torch.bfloat16)],
)
def test_gradients_are_off_and_autocast_is_as_asked(graded, around, full, asked, inside):
    with torch.set_grad_enabled(graded), torch.autocast("cpu", dtype=around, enabled=around is not None):
        for _ in range(2):
            with arithmetic(full, CPU, asked):
                assert now() == (False, inside)
            assert now() == (graded, around)


def test_autocast_of_other_devices_is_off_in_full_precision_only():
    with torch.autocast("cuda", dtype=torch.bfloat16) if torch.cuda.is_available() else contextlib.nullcontext():
        with arithmetic(True, CPU, None):
            assert not torch.is_autocast_enabled("cuda")
        with arithmetic(False, CPU, None):
            assert torch.is_autocast_enabled("cuda") == torch.cuda.is_available()


def set_defaults():
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")  # which writes to the settings below
    torch.backends.mkldnn.fp32_precision = "none"
    for kind in (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv, torch.backends.mkldnn.rnn):
        kind.fp32_precision = "none"


@pytest.fixture
def settings():
    """The settings of the process, which have their defaults before and after the test."""
    set_defaults()
    yield torch.backends.mkldnn
    set_defaults()


def test_a_setting_that_was_inherited_is_inherited_again(settings):
    settings.fp32_precision = "bf16"
    settings.conv.fp32_precision = "tf32"
    with arithmetic(True, CPU, None):
        assert settings.matmul.fp32_precision == settings.conv.fp32_precision == "ieee"
    assert (settings.matmul.fp32_precision, settings.conv.fp32_precision) == ("bf16", "tf32")
    settings.fp32_precision = "ieee"
    assert (settings.matmul.fp32_precision, settings.conv.fp32_precision) == ("ieee", "tf32")


def test_the_older_switch_is_off_inside(settings):
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    with arithmetic(True, CPU, None):
        assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "high"


def test_the_last_one_out_puts_them_back(settings):
    torch.set_float32_matmul_precision("high")
    seen = []
    entered, left = threading.Event(), threading.Event()

    def another():
        with arithmetic(True, CPU, None):
            entered.set()
            assert left.wait(30)
            seen.append(torch.get_float32_matmul_precision())

    thread = threading.Thread(target=another)
    with arithmetic(True, CPU, None):
        thread.start()
        assert entered.wait(30)
    seen.append(torch.get_float32_matmul_precision())
    left.set()
    thread.join()
    assert seen == ["highest", "highest"]
    assert torch.get_float32_matmul_precision() == "high"
    with arithmetic(True, CPU, None):  # and it goes on like this
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "high"
