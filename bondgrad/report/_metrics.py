"""What can be in a table or on an axis, and how it is written."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One number of a run."""

    label: str
    digits: int  # of ours and of differences
    scale: float = 1.0  # from results.json to what is shown
    hardware: bool = False  # depends on the machine, so that a difference to the paper's says nothing
    lower_is_better: bool = False


METRICS = {
    "train_loss": Metric("training loss", 3, lower_is_better=True),
    "test_loss": Metric("test loss", 3, lower_is_better=True),
    "accuracy": Metric("accuracy, %", 2, 100.0),
    "gain": Metric("gain, points", 2, 100.0),
    "paired_difference": Metric("difference from the baseline, seed by seed", 3),
    "sign_accuracy": Metric("right signs at the box's inputs, %", 3, 100.0),
    "parameter_sign_accuracy": Metric("right signs at the parameters, %", 3, 100.0),
    "all_parameter_sign_accuracy": Metric("the same, two zeros counted as right, %", 3, 100.0),
    "bias_sign_accuracy": Metric("right signs at the last bias, %", 3, 100.0),
    "loop_ms": Metric("loop time, ms", 2, hardware=True, lower_is_better=True),
    "loop_ratio": Metric("loop time / baseline", 2, hardware=True, lower_is_better=True),
    "evaluations_per_step": Metric("evaluations a step", 0, lower_is_better=True),
}
COLUMNS = tuple(name for name in METRICS if name != "train_loss")
CURVES = ("train_loss", "test_loss", "accuracy", "sign_accuracy", "parameter_sign_accuracy")
# What a run ends with, as results.json calls it.
SIGNS = tuple(name for name in METRICS if name.endswith("sign_accuracy"))
FINALS = ("test_loss", "accuracy", *SIGNS, "loop_ms", "evaluations_per_step")
# The standard deviation over single training steps of what comes before the colon, as results.json calls it.
STEP_DEVIATIONS = {name: name.replace("accuracy", "deviation") for name in SIGNS}
