"""What can be in a table or on an axis, and how it is written."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One number of a run."""

    label: str
    digits: int  # of ours and of differences
    scale: float = 1.0  # from results.json to what is shown
    hardware: bool = False  # depends on the machine, so that a difference to the paper's says nothing


METRICS = {
    "train_loss": Metric("training loss", 3),
    "test_loss": Metric("test loss", 3),
    "accuracy": Metric("accuracy, %", 2, 100.0),
    "gain": Metric("gain, points", 2, 100.0),
    "sign_accuracy": Metric("right signs, %", 3, 100.0),
    "loop_ms": Metric("loop time, ms", 2, hardware=True),
    "loop_ratio": Metric("loop time / baseline", 2),
    "evaluations_per_step": Metric("evaluations a step", 0),
}
COLUMNS = tuple(name for name in METRICS if name != "train_loss")
CURVES = ("train_loss", "test_loss", "accuracy", "sign_accuracy")
