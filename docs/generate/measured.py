"""Makes docs/measured.md: this file has its text, the files measured_*.py have its tables."""

from measured_accuracy import processes, reductions, scales, tf32
from measured_check_and_probe import check_power, probes
from measured_demo import demo, spsa_search
from measured_gallery import choosers_at_known_functions, choosers_in_the_gallery, choosers_of_every_row
from measured_repeatability import repeatability
from measured_reservoirs import card, in_the_loop, readings, reservoirs
from measured_steps import extra, gaps, gaps_elsewhere, losses
from measured_structure import found, late, modular, nen
from measured_times import gpu_step, gradient_500, step_time
from results_markdown import load

MEASURED = """# What was measured

Every number here was put here by `python docs/generate/tables.py` from the files in `results/`, and those were written
by the commands named below each table. Times to be compared were taken side by side in one run: medians for training
steps, the best of several for single gradients. The machines were shared.

## California Housing through a frozen network

Read-in 8-100-100-5, box 5-500-5 (tanh), read-out 5-100-100-1.

{demo}

SPSA's test loss after ten epochs, two seeds, by learning rate and perturbation; the demo takes 1e-3 and 1e-3:

{spsa_search}

## Does the scale of outputs or loss matter?

Right signs in %, 300 steps. The bounds of BOND depend on both scales; the range they are kept to makes them safe.

{scales}

## How a batch becomes one gradient per input

Right signs in %, one epoch, three seeds, box d-500-d. The range makes the choice unimportant. Without it the mean of
magnitudes, `reduce="mean-abs"`, does best, and so it is the default.

{reductions}

## Time of a training step

The demo's networks, batch 64. The bare batch makes the same 640 evaluations in one call and does nothing else: no
policy, no checks. What BOND adds to it is Python and operations on small tensors, whatever the box costs; with a box
this cheap, on two cores, the plain loop is as fast. Median and range over seven processes, of means over steps
but the longest 2 % (on 16 cores of medians over steps: an earlier measurement).

{step_time}

On a GPU the same step, as it is and captured by `GraphedStep`:

{gpu_step}

## One gradient at 500 inputs

Batch 128, box 500-500-500 (tanh): 128,000 evaluations.

{gradient_500}

## TF32

Right signs in %, one epoch, box d-500-d, one seed. TF32 around the box does no harm, since it is switched off inside.
In the last column it is not (`full_precision=False`).

{tf32}

## Several processes

Largest difference from one process on the joint batch, after {steps} steps with Adam, 24 rows and now and then 10. In
float64 nothing but rounding is left. Moments are relative to their value. Without an exchange, which is
DistributedDataParallel alone, they are something else.

{processes}

{repeatability}

## How close are steps to the best?

California Housing in a closed loop under noise, uniform on [0, X] on every output; 3 epochs, three seeds; right signs
in the last epoch, in %. `Calibrated` is told nothing, "told" is `Bond` with `noise=X`, "auto" is `Bond` with
`noise="auto"`, and `Bond` alone believes in rounding. The gap is what the best of 20 fixed steps from 1e-6 to 10,
picked afterwards on the same trajectory, has more than `Calibrated`: negative means that no single step does as well.
The interferometer, the enzymes and the oscillators are other people's models; no constant was chosen for them.

{gaps}

More evaluations than `Bond` over these three epochs: {extra}.

Scales of inputs and loss, rounded outputs, and weak spots. Where a function is monotonic in an input (exp(5x), and the
pendulum, whose pushes saturate), the longest steps have the most right signs, however wrong their slopes: such are
not taken. With one decimal, the first batches lie within a single level of the outputs.

{gaps_elsewhere}

Test losses after these three epochs, mean and deviation over seeds, beside those of the exact gradient (of the box
without its noise, at the same noisy outputs). `Calibrated` ends where the exact gradient does, within the spread of
seeds, at all noises; the oscillators alone differ by more, to either side, where all signs are right. Where `Bond`,
told or "auto", ends lower, as with 50 inputs at 1e-3, it is lower than the exact gradient too: what its steps leave of
the noise helps a little in so few epochs. Where noise is not told and signs are lost, losses are higher.

{losses}

## Beside the step choosers of the field

Boxes that other people wrote, and the 16 functions of PyPI's numericalderivative at 32 rows drawn evenly from their
intervals, without noise and with normal noise of 1e-4, in float64; of these, slopes count that change the function over
the spread of the inputs by ten times the noise. Nobody is told the noise: methods other than ours have it from ECnoise
(Moré and Wild 2011). The methods are Moré and Wild's steps (2012), Shi, Xie, Xuan and Nocedal's adaptive interval
(2022), that of Gill, Murray, Saunders and Wright (1983), and Stepleman and Winarsky's search (1979).

All cost the same: the default layer trains for 160 steps, and what it spends on trials is what each other method may
spend on searches at rows of the first batch; the median over these rows is the step of an input from then on. Forward
differences cost half, and two of them are averaged. The best fixed step is that of another seed, and costs no search.
Boxes with jumps are compared with their smoothed slopes. Right signs in %, and the mean cosine over rows:

{choosers_in_the_gallery}

Right signs in %, and the median relative error:

{choosers_at_known_functions}

As their authors mean them, these methods search at every row and input anew. Right signs in %, median relative error,
and evaluations a row, beside the default layer with five gradients averaged, and beside DerivKit's polynomial fit:

{choosers_of_every_row}

## Is this gradient right?

`bondgrad.check` on 200 random boxes of each kind: called right / wrong / undecided / wrong with good reason, since the
gradient of that `BlackBox` is off by more than the tolerance of 1 %, as the exact one shows.

{check_power}

## What is this box like?

{probes}

## Structure

One gradient. "Found out with" is how many evaluations `structure="auto"` spends once, at the first training step.

{modular}

What `structure.detect` finds of y = tanh(A x), 500 inputs and outputs, from 64 rows. The lower bound is the most inputs
that one output depends on. Errors of a gradient are relative to the exact one, with the structure found and without.

{found}

![The patterns as they were found; inputs of one colour move together](../results/structures.png)

A dependency that wakes late. California Housing through ten modules of five, which begin to hear one another when the
inputs have grown in the course of training; what `structure="auto"` makes of it, and for comparison what fixed blocks
would. Right signs in %.

{late}

![Right signs by step of training](../results/structures_late.png)

## Echo state network

Read-in 8-100-100-5, echo state network 5-200-5 with its state carried from batch to batch, read-out 5-100-100-1; the 64
rows of a batch are read as time. A horizon of 1 moves a column of all time steps at once; the paper reports 79.86 % for
that. "Box time steps" is what the network itself is asked to do in one step of training.

{nen}

## Reservoirs

One gradient through each, with the structure that it declares; batch 64, of the echo state network one sequence of 64
time steps, where an evaluation is a sequence. Signs and evaluations with `Calibrated`, including its trials in so few
steps, and with `Bond`; times with `Calibrated`, beside those of the exact gradient.

{reservoirs}

{readings}

## Rockmelon

How well the network that comes with the package knows the device it was learnt from:

{card}

![Sweeps of gates: the device and its copy](../results/rockmelon_sweeps.png)

## A quantum-dot device in the loop

California Housing, read-in 8-100-100-40, one device used for four groups of ten gates, read-out 8-100-100-1. On the
bench the device is noisy, drifts, lags behind, and takes its time; networks learn from such readings and are tested
with them. Without a reservoir the read-in has eight outputs. The exact gradient ends at the limits of the gates, while
`BlackBox` passes it on from there.

{in_the_loop}
"""


def measured() -> str:
    """Return the whole document."""
    makers = (demo, spsa_search, scales, reductions, step_time, gpu_step, gradient_500, tf32, processes)
    makers += (repeatability, gaps, gaps_elsewhere, losses, extra, check_power, probes, modular, found, late, nen)
    makers += (reservoirs, readings, card, in_the_loop)
    makers += (choosers_in_the_gallery, choosers_at_known_functions, choosers_of_every_row)
    parts = {maker.__name__: maker() for maker in makers}
    return MEASURED.format(**parts, steps=load("processes")["numbers"]["steps"])
