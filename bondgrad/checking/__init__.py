"""Checking whether a gradient is right.

The loss is L(x) = gy · box(x), with a random gy. At up to sixteen rows of x and along every input, its slope is
measured by symmetric differences, over a ladder of steps that leads from the spread of x down to rounding; the step
that is used is, at every row, where neighbouring rungs agree best, and the error in its square is removed by Richardson
extrapolation. Slopes and gradients are measured several times, and their scatter gives their standard error. Noise of
the box, roughness of its outputs, or a gradient that is itself an estimate only make more measurements necessary, which
are made until all inputs are decided or the budget is spent.

An input is wrong if its gradient differs from the slope, over the rows, by certainly more than a tolerance. Rows near
kinks and poles, where the slope depends on the step, are left out; and unless the box shows no kinks and one factor
explains the error, it has to be seen again with shorter steps. An input is also wrong if its gradient is not finite
where the box is, at any of up to 256 rows. All others are right, if twice the tolerance would have been seen. The
chance of a false alarm is below one in a hundred.

A box that is piecewise constant, such as an ensemble of trees, has no slope: the check says so, and calls nothing
wrong there but a gradient that is not finite. This is found out for each input and output, since one integer among the
inputs, or one class among the outputs, leaves slopes along the others; an input is not judged if any of its outputs is
piecewise constant along it, unless these are rounded, which is a kind of noise. At a jump the gradient of a layer is
the mean slope over its step. Where jumps, located by bisection, explain the error at a row, and the input is right at
other rows, the row is left out. Where a layer moves an input as far as it varies, since the box jumps on that scale,
its gradient is like slopes over such steps, and is not called wrong.

The error of an input is relative to its own slope, however weak, if that exceeds the noise. If it does not, the error
is relative to a hundredth of the typical slope.
"""

from bondgrad.checking._check import check
from bondgrad.checking._progress import CheckProgress
from bondgrad.checking._report import Check

__all__ = ["Check", "CheckProgress", "check"]
