"""Makes the tables of how often `check` is right, and of what `probe` says about some boxes."""

from results_markdown import load, source, table


def probes() -> str:
    """Return the table of the verdicts of `probe`."""
    result = load("probe_gallery")
    rows = [[n["box"], n["verdict"]] for n in result["numbers"]]
    lines = ["| box | verdict |", "| --- | --- |", *(f"| {box} | {verdict} |" for box, verdict in rows)]
    return "\n".join(lines) + "\n\n" + source(result)


def check_power() -> str:
    """Return the table of how often `check` is right."""
    result = load("check_power")
    rows = [
        [
            ", ".join(key),
            *(
                f"{n['right']} / {n['wrong']} / {n['undecided']}"
                + (f" / {n['beyond tolerance']}" if n["beyond tolerance"] else "")
                for n in result["numbers"]
                if (n["gradient"], n["mistake"]) == key
            ),
        ]
        for key in dict.fromkeys((n["gradient"], n["mistake"]) for n in result["numbers"])
    ]
    noises = list(dict.fromkeys(n["noise"] for n in result["numbers"]))
    headings = ["gradient, mistake", *(f"noise {noise:g}" for noise in noises)]
    return table(headings, rows) + "\n\n" + source(result)
