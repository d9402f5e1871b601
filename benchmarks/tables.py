"""Puts what is in results/ into the documentation, so that no figure is typed by hand.

python benchmarks/tables.py            # writes docs/measured.md, docs/reproduced.md, and tables elsewhere
python benchmarks/tables.py --check    # only says whether they are up to date
"""

import re
import statistics
import sys
from pathlib import Path
from typing import Any

from calibrated_tables import check_power, extra, gaps, gaps_elsewhere, losses, probes
from experiment_tables import reproduced
from identity_tables import identity
from markdown import ROOT, load, source, source_cpu, spread, table
from reservoir_tables import card, in_the_loop, readings, reservoirs
from structure_tables import found, late, modular, nen
from what_works import what_works


def demo() -> str:
    """The demo's four methods."""
    result = load("demo/demo")
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in result["runs"]:
        runs.setdefault(run["method"], []).append(run)
    exact_ms = statistics.fmean(run["ms_per_step"] for run in runs["AD"])
    rows = [
        [
            method,
            spread([run["test_loss"][-1] for run in same], 3),
            "exact" if method == "AD" else f"{spread([100 * run['sign_accuracy'] for run in same], 3)} %",
            f"{statistics.fmean(run['ms_per_step'] for run in same) / exact_ms:.2f}",
            f"{same[0]['evaluations_per_step']:.0f}",
        ]
        for method, same in runs.items()
    ]
    seeds = " ".join(f"--seed {seed}" for seed in dict.fromkeys(run["seed"] for run in result["runs"]))
    return (
        table(["", "test loss", "right signs", "time of a step / AD", "evaluations a step"], rows)
        + f"\n\n{result['epochs']} epochs (the paper: 100), batch {result['batch']}, mean ± deviation over seeds; "
        f"`bondgrad demo --epochs {result['epochs']} {seeds}`, bondgrad {result['bondgrad']}, torch {result['torch']}, "
        f"{result['machine']}."
    )


def spsa_search() -> str:
    """SPSA's test loss by learning rate and perturbation."""
    result = load("spsa_search")
    cells = {(n["rate"], n["mu"]): statistics.fmean(n["test_loss"]) for n in result["numbers"]}
    rates, mus = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    rows = [[f"rate {rate:.0e}", *(f"{cells[rate, mu]:.2f}" for mu in mus)] for rate in rates]
    return table(["", *(f"mu {mu:.0e}" for mu in mus)], rows) + "\n\n" + source(result)


def scales() -> str:
    """Sign accuracy by scale of output and loss."""
    result = load("scales")
    parts = []
    for policy, title in (("default", "By default"), ("to the letter", "The paper's formulas to the letter")):
        cells = {(n["output_scale"], n["loss_scale"]): n for n in result["numbers"] if n["policy"] == policy}
        outputs, losses = (sorted({key[i] for key in cells}) for i in (0, 1))
        rows = [
            [f"output x {o:.0e}", *(f"{100 * cells[o, loss]['sign_accuracy']:.2f}" for loss in losses)] for o in outputs
        ]
        parts.append(f"{title}:\n\n" + table(["", *(f"loss x {loss:.0e}" for loss in losses)], rows))
        lost = sum(not cell["finite"] for cell in cells.values())
        largest = max(cell["largest_step"] for cell in cells.values())
        parts.append(
            f"Runs with a gradient that was not finite: {lost} of {len(cells)}. Largest mean step: {largest:.0e}."
        )
    return "\n\n".join([*parts, source(result)])


def reductions() -> str:
    """Sign accuracy by batch reduction."""
    result = load("reductions_cuda")
    cells = {(n["d"], n["reduce"], n["step"]): n for n in result["numbers"]}
    rows = [
        [
            f"{d} inputs, {reduce}",
            f"{spread([100 * s for s in cells[d, reduce, 'default']['signs']], 2)}",
            f"{spread([100 * s for s in cells[d, reduce, 'to the letter']['signs']], 2)}",
            f"{100 * statistics.fmean(cells[d, reduce, 'to the letter']['crossed']):.0f} %",
        ]
        for d, reduce, step in cells
        if step == "default"
    ]
    return table(["", "by default", "to the letter", "lower > upper"], rows) + "\n\n" + source(result)


def step_time() -> str:
    """Step time over AD's, on every machine where it was measured."""
    results = [load(path.stem) for path in sorted((ROOT / "results").glob("step_time_*.json"))]
    headings = [""]
    columns = []
    for result in results:
        headings += [f"{result['machine'].split(', ')[1]}: ms", "over AD"]
        runs = result["numbers"]["ms"]
        columns.append({name: (runs, sorted(run[name] / run["AD"] for run in runs)) for name in runs[0]})
    rows = []
    for name in dict.fromkeys(name for column in columns[::-1] for name in column):
        row = [name]
        for column in columns:
            if name not in column:
                row += ["-", "-"]
                continue
            runs, ratios = column[name]
            row.append(f"{statistics.median(run[name] for run in runs):.2f}")
            row.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        rows.append(row)
    return table(headings, rows) + "\n\n" + "\n".join(map(source_cpu, results))


def gradient_500() -> str:
    """One gradient at 500 inputs."""
    results = [load(f"gradient_500_{device}") for device in ("cpu", "cuda")]
    rows = [
        [
            n["device"],
            f"{n['ms']:.1f} ms",
            f"{n['captured_ms']:.1f} ms" if "captured_ms" in n else "-",
            f"{n['plain_loop_ms']:.0f} ms",
            f"{n['extra_MiB']:.0f} MiB",
            f"{100 * n['sign_accuracy']:.2f} %",
        ]
        for n in (result["numbers"] for result in results)
    ]
    headings = ["", "one gradient", "captured", "plain loop over inputs", "extra memory", "right signs"]
    return table(headings, rows) + "\n\n" + "\n".join(map(source, results))


def gpu_step() -> str:
    """The demo's step on a GPU, eager and captured."""
    result = load("gpu_step")
    ms = result["numbers"]["ms"]
    rows = [[name, f"{value:.2f}", f"{value / ms['AD, ' + name.split(', ')[1]]:.2f}"] for name, value in ms.items()]
    return table(["", "ms", "over AD, run alike"], rows) + "\n\n" + source(result)


def tf32() -> str:
    """Sign accuracy with TF32."""
    result = load("gpu_step")
    signs = result["numbers"]["signs"]
    rows = [[f"{row['d']} inputs", *(f"{100 * row[key]:.2f}" for key in list(row)[1:])] for row in signs]
    return table(["", *list(signs[0])[1:]], rows) + "\n\n" + source(result)


def processes() -> str:
    """Largest differences between several processes and one."""
    result = load("processes")
    runs = {(run["wrapper"], run["processes"], run["dtype"]): run for run in result["numbers"]["runs"]}
    columns = [(dtype, of) for dtype in ("torch.float32", "torch.float64") for of in ("parameters", "moments")]
    rows = [
        [f"{wrapper}, {ranks} process{'es' * (ranks > 1)}"]
        + [f"{runs[wrapper, ranks, column][of]:.0e}" for column, of in columns]
        for wrapper, ranks in dict.fromkeys(key[:2] for key in runs)
    ]
    headings = [f"{of}, {dtype.removeprefix('torch.')}" for dtype, of in columns]
    return table(["", *headings], rows) + "\n\n" + source_cpu(result)


MEASURED = """# What was measured

Every number here was put here by `python benchmarks/tables.py` from the files in `results/`, and those were written by
the commands named below each table. Times to be compared were taken side by side in one run: medians for training
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

{identity}

## How close are steps to the best?

California Housing in a closed loop under noise, uniform on [0, X] on every output; 3 epochs, three seeds; right signs
in the last epoch, in %. `Calibrated` is told nothing, "told" is `Bond` with `noise=X`, "auto" is `Bond` with
`noise="auto"`, and `Bond` alone believes in rounding. The gap is what the best of 20 fixed steps from 1e-6 to 10,
picked afterwards on the same trajectory, has more than `Calibrated`: negative means that no single step does as well.
Nothing was tuned on the interferometer, the enzymes and the oscillators. Of the latter one run has three points less at
1e-1 than it might: all slopes shrink as steps get longer, and that is allowed to be a tenth, not more.

{gaps}

More evaluations than `Bond` over these three epochs: {extra}.

Scales of inputs and loss, rounded outputs, and weak spots. Where a function is monotonic in an input (exp(5x), and the
pendulum, whose pushes saturate), the longest steps have the most right signs, however wrong their slopes: such are
not taken. With one decimal, noise falls more slowly with the step than noise should, and steps stay too short.

{gaps_elsewhere}

Test losses after these three epochs, mean and deviation over seeds, beside those of the exact gradient (of the box
without its noise, at the same noisy outputs). Up to 1e-2 `Calibrated` ends where the exact gradient does; at 1e-1 it
ends higher with three boxes, hardly beyond the spread over seeds. Where `Bond`, told or "auto", ends lower, as with 50
inputs at 1e-3, it is lower than the exact gradient too: what its steps leave of the noise helps a little in so few
epochs. At 1e-1 with 50 inputs it ends lower with fewer right signs: there, seeds differ by more than methods do. Where
noise is not told and signs are lost, losses are higher.

{losses}

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


def rendered() -> dict[Path, str]:
    """The files as they should be."""
    makers = (demo, spsa_search, scales, reductions, step_time, gpu_step, gradient_500, tf32, processes)
    makers += (identity, card, in_the_loop, readings, reservoirs)
    makers += (modular, found, late, nen, gaps, gaps_elsewhere, losses, extra, check_power, probes)
    parts = {maker.__name__: maker() for maker in makers}
    return {
        ROOT / "README.md": with_table(ROOT / "README.md", parts["demo"]),
        ROOT / "docs" / "reproduced.md": reproduced(),
        ROOT / "docs" / "pytorch.md": with_table(ROOT / "docs" / "pytorch.md", what_works()),
        ROOT / "docs" / "measured.md": MEASURED.format(**parts, steps=load("processes")["numbers"]["steps"]),
    }


def with_table(path: Path, text: str) -> str:
    """The document, with this between its marks."""
    between = re.compile(r"(<!-- table.*? -->\n).*?(<!-- end -->)", re.DOTALL)
    return between.sub(lambda match: match[1] + "\n" + text + "\n\n" + match[2], path.read_text())


def main(check: bool) -> None:
    """Write or compare."""
    for path, text in rendered().items():
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"{path.relative_to(ROOT)} is not what results/ says: run python benchmarks/tables.py")


if __name__ == "__main__":
    main("--check" in sys.argv)
