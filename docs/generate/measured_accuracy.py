"""Makes the tables of how right gradients are by scale, batch reduction, TF32 and number of processes."""

import statistics

from results_markdown import load, source, source_cpu, spread, table


def scales() -> str:
    """Return the tables of sign accuracy by scale of output and loss."""
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
    """Return the table of sign accuracy by batch reduction."""
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


def tf32() -> str:
    """Return the table of sign accuracy with and without TF32."""
    result = load("gpu_step")
    signs = result["numbers"]["signs"]
    rows = [[f"{row['d']} inputs", *(f"{100 * row[key]:.2f}" for key in list(row)[1:])] for row in signs]
    return table(["", *list(signs[0])[1:]], rows) + "\n\n" + source(result)


def processes() -> str:
    """Return the table of the largest differences between several processes and one."""
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
