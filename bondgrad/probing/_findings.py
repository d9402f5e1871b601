"""The measurements, in their order, and what each of them has found."""

from dataclasses import dataclass, field

from bondgrad.probing._dependence import Dependence, measure_dependence
from bondgrad.probing._history import History, measure_memory
from bondgrad.probing._randomness import Randomness, measure_randomness
from bondgrad.probing._ranges import Ranges, measure_ranges
from bondgrad.probing._rounding import Rounding, measure_rounding
from bondgrad.probing._row_coupling import RowCoupling, measure_row_coupling
from bondgrad.probing._sensitivity import Sensitivity, measure_sensitivity
from bondgrad.probing._smoothness import Smoothness, measure_smoothness
from bondgrad.probing._speed import Speed, measure_speed
from bondgrad.probing._steps import StepLadder, measure_steps


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What has been found out about a box; None: it was left out, or has not been measured yet.

    Measurements are made in this order, the most useful first, and each after those whose findings it reads. `History`
    is completed at the end, by what was seen of drift until then.
    """

    randomness: Randomness | None = field(default=None, metadata={"title": "The same again", "by": measure_randomness})
    speed: Speed | None = field(default=None, metadata={"title": "Speed", "by": measure_speed})
    history: History | None = field(default=None, metadata={"title": "History", "by": measure_memory})
    rounding: Rounding | None = field(default=None, metadata={"title": "Rounding", "by": measure_rounding})
    steps: StepLadder | None = field(default=None, metadata={"title": "Steps", "by": measure_steps})
    company: RowCoupling | None = field(default=None, metadata={"title": "Rows together", "by": measure_row_coupling})
    smoothness: Smoothness | None = field(default=None, metadata={"title": "Smoothness", "by": measure_smoothness})
    ranges: Ranges | None = field(default=None, metadata={"title": "Ranges", "by": measure_ranges})
    dependence: Dependence | None = field(default=None, metadata={"title": "Structure", "by": measure_dependence})
    sensitivity: Sensitivity | None = field(default=None, metadata={"title": "Inputs", "by": measure_sensitivity})
