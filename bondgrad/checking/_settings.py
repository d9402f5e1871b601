"""The numbers that a check goes by."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckSettings:
    """How much is measured, how, and from when on something is believed.

    The values were found on the boxes of `tests/checking` and with `benchmarks/check_power.py`.
    """

    # Rows of x.
    rows: int = 16  # at which slopes are measured
    finite_rows: int = 256  # at which the gradient is at least to be finite
    finite_part: int = 8  # that may cost one evaluation in so many of the budget
    suspects: int = 4  # of these rows, if they have none that is finite, at which slopes are measured too
    margin: float = 0.05  # of the spread: rows closer to a limit are moved away from it, to have room on both sides
    # Steps.
    factor: int = 4  # between neighbouring steps of the ladder, and from steps that were too long to shorter ones
    least_ulps: int = 64  # a step shorter than so many units of rounding of x is mostly rounding itself
    jitter: float = 0.3  # the part of a step that is drawn anew for every sample, so that roughness acts as noise
    usual_weight: float = 10.0  # of the disagreement of most rows, beside that of a row itself
    # Copies, over which means are taken.
    copies: int = 4  # of every slope, to begin with
    gradients: int = 8  # copies to begin with; those of forward differences may scatter between two values
    minor: float = 1 / 8  # a part of the variance that is not worth more evaluations
    # Evidence.
    noise_gain: float = 4.5  # standard deviation of a slope times its step, in units of that of the loss
    kink_gain: float = 16.0  # variance that rounding adds to a kink, in units of what it adds to a slope
    kink_z: float = 4.0  # standard deviations from which a kink at a row is believed
    kinks_part: float = 0.01  # of all entries that may seem to have one by chance
    weak: float = 0.01  # errors are measured by at least this part of the typical slope, unless an input's own is clear
    clear: float = 25.0  # a slope is clear if its square is so many times its variance
    safety: float = 4.0  # the error left by extrapolation is at most this part of the change; in theory a fifteenth
    scatter: float = 10.0  # slopes that scatter by so many times the variance due to noise are aliased
    scatter_part: float = 0.1  # if they scatter by at least this part of their size
    rounding_margin: float = 30.0  # times below the square of the tolerated error, rounding does not matter
    levels: float = 4.0  # of rounding that drawn steps have to lead over for it to be random
    seen: float = 10.0  # times the noise, from which the remainder of Taylor's series is believed
    # Words.
    named_inputs: int = 8  # that are named one by one
    huge_error: float = 10.0  # relative error, from which its size does not matter
    close: float = 0.2  # relative difference of a gradient from another one that it looks like


SETTINGS = CheckSettings()
