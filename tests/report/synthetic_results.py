"""Results as the experiments would leave them, made up: for tests of the report."""

import json
import math
from random import Random

import yaml

HOSTILE = '<script>alert("1")</script> & $x_$'


def run(name, seed=42, method="BOND", **other):
    epochs = other.get("epochs", 100)
    return {
        "run": name,
        "seed": seed,
        "method": method,
        "command": "bondgrad reproduce it",
        "bondgrad": "0.1.0",
        "torch": "2.13.0+cpu",
        "machine": "x86_64, 2 cores, 1 thread",
        "gpu": None,
        "epochs": epochs,
        "epochs_run": epochs,
        "steps_run": 258 * epochs,
        "steps_of_epoch": None,
        "batch": 64,
        "graph": False,
        "precision": "float32",
        "trainable": 22511,
        "frozen": 5505,
        "seconds": 61.2,
        "loop_ms": None,
        "evaluations_per_step": None,
        "sign_accuracy": None,
        "test_loss": None,
        "accuracy": None,
        "at": {},
        "curve": None,
        "trace": None,
        **other,
    }


def curve(epochs, start, end, seed):
    """Falls from start to end, not smoothly; accuracy was not measured, and once nothing was."""
    random = Random(seed)
    losses = [end + (start - end) * math.exp(-6 * i / epochs) * random.uniform(0.9, 1.1) for i in range(epochs)]
    test = [None if i == 1 and epochs > 2 else 1.1 * loss for i, loss in enumerate(losses)]
    return {"epoch": list(range(1, epochs + 1)), "train_loss": losses, "test_loss": test, "accuracy": None}


def trace(steps, seed, bounds=True):
    random = Random(seed)
    mean = [0.03 * math.exp(-2 * i / steps) * random.uniform(0.5, 2) for i in range(steps)]
    return {
        "step": list(range(steps)),
        "step_mean": mean,
        "step_max": [m * random.uniform(2, 30) for m in mean],
        "lower": [m / 1000 for m in mean] if bounds else None,
        "upper": [m * 100 for m in mean] if bounds else [None] * steps,
        "gradient_norm": [m * random.uniform(5, 20) for m in mean],
    }


def planned(runs, epochs, seeds):
    """What the experiment would be in full."""
    names = [run["run"] for run in runs]
    return {"seeds": list(seeds), "epochs": dict.fromkeys(names, epochs), "steps": dict.fromkeys(names)}


def calhouse():
    """Everything as in the paper."""
    methods = {"AD": (3.0, None, 2.0), "BOND": (3.02, 0.99995, 3.0), "BONDS": (3.4, 0.7, 3.1), "SPSA": (5, 0.5, 2.9)}
    runs = [
        run(
            f"{box} {method}",
            seed,
            method,
            test_loss=loss + 0.01 * (seed - 2),
            sign_accuracy=signs,
            loop_ms=ms * (8 if box == "NEN" else 1),
            curve=curve(100, 8.0, loss, f"{box} {method} {seed}"),
        )
        for box in ("NFN", "NEN")
        for method, (loss, signs, ms) in methods.items()
        for seed in (1, 2, 3)
    ]
    rows = [
        {"run": "NFN AD", "loop_ms": [2.37, 0.04]},
        {"run": "NFN BOND", "baseline": "NFN AD", "sign_accuracy": [99.95, 0.02], "loop_ms": [3.92, 0.01]},
        {"run": "NFN BONDS", "baseline": "NFN AD", "sign_accuracy": [76.13, 22.94], "loop_ms": [3.93, 0.02]},
        {"run": "NFN SPSA", "baseline": "NFN AD", "sign_accuracy": [50.03, 8.44], "loop_ms": [3.03, 0.04]},
        {"run": "NEN AD", "loop_ms": [16.57, 1.75]},
        {"run": "NEN BOND", "baseline": "NEN AD", "sign_accuracy": [79.86, 20.63], "loop_ms": [91.82, 12.41]},
    ]
    config = {
        "name": "calhouse",
        "title": "Sign accuracy and loop time on California Housing",
        "says": "BOND has nearly all signs right and learns as the exact gradient does; SPSA hardly learns at all.",
        "notes": "Seeds are ours, the paper does not name its own.",
        "paper": {"label": "Table calhouse", "gpu": "A10G"},
        "planned": planned(runs, 100, (1, 2, 3)),
        "tables": [{"columns": ["test_loss", "sign_accuracy", "loop_ms", "loop_ratio"], "rows": rows}],
        "figures": [
            {
                "kind": "curves",
                "title": f"{box}, test loss",
                "y": "test_loss",
                "runs": [f"{box} {method}" for method in methods],
            }
            for box in ("NFN", "NEN")
        ],
    }
    return config, {"name": "calhouse", "lines": None, "runs": runs}


def fashion():
    """Shortened, in part on another machine, in part not run."""
    gpu = {"gpu": "NVIDIA H200", "machine": "x86_64, 16 cores", "epochs": 8, "steps_of_epoch": 200, "graph": True}
    runs = [
        run("AD", method="AD", accuracy=0.9, loop_ms=10.0, **gpu),
        run("BOND", accuracy=0.9051, sign_accuracy=0.9991, loop_ms=15.0, evaluations_per_step=1001.0, **gpu),
        run("BONDS", method="BONDS", accuracy=0.81, sign_accuracy=0.52, loop_ms=90.0, **{**gpu, "gpu": None}),
    ]
    columns = ["accuracy", "gain", "loop_ratio", "evaluations_per_step"]
    rows = [
        {"run": "AD", "accuracy": [93.35, 0.21], "loop_ms": 56.18},
        {"run": "BOND", "baseline": "AD", "accuracy": [93.42, 0.1], "loop_ms": 73.57},
        {"run": "BONDS", "baseline": "AD", "accuracy": [83.25, 3.89], "gain": -10.1, "loop_ms": 73.58},
        {"run": "SPSA", "baseline": "AD", "accuracy": 26.82},
    ]
    config = {
        "name": "fashion",
        "title": "FashionMNIST",
        "paper": {"label": "Table fmnist_cifar10", "gpu": "A10G"},
        "planned": planned([*runs, run("SPSA")], 100, (42, 63, 14)),
        "tables": [{"title": "With ResNet before the box", "columns": columns, "rows": rows}],
        "figures": [{"kind": "curves", "title": "Accuracy", "y": "accuracy"}],
    }
    return config, {"name": "fashion", "lines": None, "runs": runs}


def sweep():
    """Fixed steps of many sizes under several noises, and BOND beside them."""
    runs = []
    for noise in (0, 1e-5, 1e-3):
        for exponent in range(-8, 4):
            worse = abs(exponent + 2 - math.log10(noise + 1e-7) / 4) / 10
            at = {"sigma": 10.0**exponent, "noise": noise}
            runs += [
                run(f"{at}", seed, "fixed", epochs=1, accuracy=0.4 - 0.03 * worse * seed, at=at) for seed in (1, 2)
            ]
        level = {"accuracy": 0.41 - noise * 50, "at": {"noise": noise}}
        runs += [run(f"BOND {noise}", seed, epochs=1, **level) for seed in (1, 2)]
    config = {
        "name": "sweep",
        "title": "Steps of fixed size",
        "paper": {"label": "Figure fixed_perturbation_sweep"},
        "planned": planned(runs, 1, (1, 2)),
        "figures": [{"kind": "sweep", "title": "Accuracy", "x": "sigma", "series": "noise", "y": "accuracy"}],
    }
    return config, {"name": "sweep", "lines": None, "runs": runs}


def steps():
    """Unfinished, and its names want to be markup."""
    runs = [
        run("as published", trace=trace(5000, 1), test_loss=3.2, curve=curve(40, 8, 3, 1), epochs_run=40),
        run("with root 6", trace=trace(5000, 2), test_loss=3.3, curve=curve(100, 8, 3, 2)),
        run(HOSTILE, trace=trace(5000, 3, bounds=False), test_loss=3.3, curve=curve(100, 8, 3, 3)),
    ]
    rows = [{"run": name, "test_loss": "3e0"} for name in ("as published", "with root 6", HOSTILE)]
    config = {
        "name": "steps",
        "title": f"Sizes of steps {HOSTILE}",
        "says": HOSTILE,
        "paper": {"label": HOSTILE},
        "planned": planned(runs, 100, (42,)),
        "tables": [{"title": HOSTILE, "columns": ["test_loss"], "rows": rows}],
        "figures": [
            {"kind": "bounds", "title": "Bounds of steps"},
            {"kind": "magnitudes", "title": "Steps by time"},
            {"kind": "curves", "title": HOSTILE, "y": "train_loss"},
        ],
    }
    return config, {"name": "steps", "lines": None, "runs": runs}


def device():
    """Nothing was trained."""
    x = [i / 500 for i in range(1000)]
    lines = [
        {"label": f"gate {gate}", "x": x, "y": [math.sin(gate * 3 * v) + (panel == "phase") for v in x], "panel": panel}
        for panel in ("current", "phase")
        for gate in (1, 2, 3)
    ]
    config = {
        "name": "device",
        "title": "Sweep of a gate",
        "paper": {"label": "Figure qr_sweep"},
        "planned": planned([], 0, (1,)),
        "figures": [{"kind": "lines", "title": "Readings", "x_label": "gate voltage, V", "y_label": "reading"}],
    }
    return config, {"name": "device", "lines": lines, "runs": []}


EXPERIMENTS = (calhouse, fashion, sweep, steps, device)


def write(results):
    """All of them, and three folders that are none: two that are broken and one of something else."""
    for make in EXPERIMENTS:
        put(results / make.__name__, *make())
    config, _ = calhouse()
    put(results / "broken", config, {})
    (results / "broken" / "results.json").write_text("{")
    put(results / "lacking", config, {"runs": [{"run": "AD", "seed": 1}]})
    (results / "demo").mkdir()
    (results / "demo" / "demo.json").write_text("{}")


def put(folder, config, found):
    """One folder of results."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / "results.json").write_text(json.dumps(found))
