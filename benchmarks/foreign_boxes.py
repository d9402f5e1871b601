"""Boxes that other people wrote: circuits, engines, trees and solvers from PyPI and Debian.

Each needs its package (`pip install 'bondgrad[gallery]'`) or program (`apt-get install ngspice`); making a box raises
ImportError or FileNotFoundError where it is missing.

Which slope is right? For a smooth box, that of the box without its noise and rounding, over a short step. A box that is
piecewise constant has slope zero nearly everywhere, and the slopes of one with jumps hold over so short a distance that
they do not tell what the box does when training moves its inputs. Such boxes (`jumps`) have two references. One is the
slope over one standard deviation of the inputs, the scale on which batches differ and training moves; a difference with
that step is right by definition. The other is the slope of the box smoothed by a Gaussian as wide as the inputs, which
is not the difference over any one step, so that no step is right by definition.
"""

import math
import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Rows = Callable[[Array], Array]


class ForeignBox(NamedTuple):
    """A box, the rows it is used at, and the function whose slope its gradient should be."""

    answers: Rows  # [N, d] -> [N, d_out], as the box gives it
    d: int
    d_out: int
    deviation: float  # standard deviation of the inputs
    centre: float = 0.0  # their mean
    rows: int = 32  # of a batch
    smooth: Rows | None = None  # without noise and rounding; None: the box itself
    reference_step: float = 1e-4  # of central differences of `smooth`, in units of the deviation
    jumps: bool = False  # whether it jumps or is piecewise constant: references are then the slopes over the deviation


def circuit(shots: int | None, rows: int = 32, deviation: float = 1.0, centre: float = 0.0) -> ForeignBox:
    """PennyLane: eight angles on four qubits in two entangled layers, four expectation values."""
    import pennylane as qml

    def expectations(shots: int | None) -> Rows:
        device = qml.device("default.qubit", wires=4, seed=0)

        @qml.set_shots(shots)
        @qml.qnode(device, diff_method=None)
        def run(x: Array) -> Any:
            for layer in range(2):
                for wire in range(4):
                    (qml.RY, qml.RX)[layer](x[:, 4 * layer + wire], wires=wire)
                for wire in range(4):
                    qml.CNOT(wires=[wire, (wire + 1) % 4])
            return [qml.expval(qml.PauliZ(wire)) for wire in range(4)]

        return lambda x: np.stack([np.atleast_1d(value) for value in run(x.astype(np.float64))], 1)

    exact = expectations(None)
    return ForeignBox(expectations(shots) if shots else exact, 8, 4, deviation, centre, rows, exact)


def fitted(model: Any, smooth: bool = False) -> ForeignBox:
    """scikit-learn: a regressor fitted to four smooth functions of eight inputs of deviation 0.3."""
    random = np.random.default_rng(0)
    weights = random.normal(size=(8, 4))
    x = 0.3 * random.normal(size=(2000, 8))
    model.fit(x[:300] if smooth else x, np.tanh(x @ weights)[: 300 if smooth else None])

    def predict(x: Array) -> Array:
        return np.asarray(model.predict(x.astype(np.float64)))

    return ForeignBox(predict, 8, 4, 0.3, jumps=not smooth)


def tree() -> ForeignBox:
    """A single decision tree of depth four."""
    from sklearn.tree import DecisionTreeRegressor

    return fitted(DecisionTreeRegressor(max_depth=4, random_state=0))


def forest() -> ForeignBox:
    """A random forest of 100 trees."""
    from sklearn.ensemble import RandomForestRegressor

    return fitted(RandomForestRegressor(random_state=0))


def boosted() -> ForeignBox:
    """Gradient boosting, 100 trees for each output."""
    from sklearn.ensemble import GradientBoostingRegressor
    from sklearn.multioutput import MultiOutputRegressor

    return fitted(MultiOutputRegressor(GradientBoostingRegressor(random_state=0)))


def gaussian_process() -> ForeignBox:
    """A Gaussian process with a kernel of learnt length."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF

    return fitted(GaussianProcessRegressor(RBF(1.0), alpha=1e-6, random_state=0), smooth=True)


def stiff() -> ForeignBox:
    """SciPy's LSODA at rtol 1e-3: a stiff oscillator (van der Pol), its state at four times, of four parameters."""
    from scipy.integrate import solve_ivp

    times = np.array([0.5, 1.0, 2.0, 4.0])

    def solve(x: Array, rtol: float, atol: float) -> Array:
        def row(p: Array) -> Array:
            stiffness, push = 20 * math.exp(0.3 * p[2]), 0.5 * p[3]

            def change(_: float, s: Array) -> list[float]:
                return [s[1], stiffness * (1 - s[0] ** 2) * s[1] - s[0] + push]

            start = [2 + 0.3 * p[0], 0.3 * p[1]]
            answer: Array = solve_ivp(change, (0, 4), start, "LSODA", t_eval=times, rtol=rtol, atol=atol).y[0]
            return answer

        return np.stack([row(p) for p in x.astype(np.float64)])

    return ForeignBox(
        lambda x: solve(x, 1e-3, 1e-6), 4, 4, 1.0, rows=16, smooth=lambda x: solve(x, 1e-11, 1e-12), reference_step=1e-3
    )


CONTACTS = """
<mujoco>
  <option timestep="0.005"/>
  <worldbody>
    <geom type="plane" size="5 5 .1" friction="0.6 0.005 0.0001"/>
    <body name="box" pos="0 0 0.3">
      <freejoint/>
      <geom type="box" size="0.1 0.15 0.05" mass="1" friction="0.6 0.005 0.0001"/>
    </body>
    <geom type="box" pos="0.8 0 0.1" size="0.05 1 0.1"/>
  </worldbody>
</mujoco>
"""


def contacts() -> ForeignBox:
    """MuJoCo: a brick that is thrown at a wall, tumbles and slides; where it lies one second later.

    Within three deviations of the inputs no trajectory is unstable. At eight deviations one of 150 is, at thirty every
    other: the engine starts such a one again from rest, so that its answer means nothing, and the row is NaN here.
    """
    import mujoco

    mujoco.set_mju_user_warning(lambda _: None)  # otherwise it writes MUJOCO_LOG.TXT into the working directory

    model = mujoco.MjModel.from_xml_string(CONTACTS)
    data = mujoco.MjData(model)

    def row(p: Array) -> Array:
        mujoco.mj_resetData(model, data)
        data.qvel[:] = [1.0 + 0.5 * p[0], 0.5 * p[1], 0.5 * p[2], 2 * p[3], 2 * p[4], 2 * p[5]]
        mujoco.mj_step(model, data, nstep=200)
        stable = not any(warning.number for warning in data.warning)
        return np.array(data.qpos[:3]) if stable else np.full(3, math.nan)

    return ForeignBox(lambda x: np.stack([row(p) for p in x]), 6, 3, 1.0, rows=16, jumps=True)


def spice() -> ForeignBox:
    """A subprocess, ngspice: three voltages drive two diodes and a transistor; three node voltages come back."""
    program = shutil.which("ngspice")
    if program is None:
        raise FileNotFoundError("ngspice is not installed: apt-get install ngspice")

    def netlist(x: Array, options: str) -> str:
        lines = ["rows of a circuit", f".options {options} noacct"]
        lines += [".model d1 D(is=1e-14)", ".model q1 NPN(is=1e-15 bf=100)", "vcc vcc 0 5"]
        for n, (a, b, c) in enumerate(x.tolist()):
            lines += [f"va{n} a{n} 0 {a!r}", f"vb{n} b{n} 0 {b!r}", f"vc{n} c{n} 0 {c!r}"]
            lines += [f"r1{n} a{n} m{n} 1k", f"r2{n} b{n} m{n} 2k", f"d1{n} m{n} 0 d1", f"r3{n} m{n} q{n} 5k"]
            lines += [f"r4{n} c{n} q{n} 10k", f"qt{n} k{n} q{n} e{n} q1", f"r5{n} vcc k{n} 2k", f"r6{n} e{n} 0 200"]
        names = " ".join(f"v({node}{n})" for n in range(len(x)) for node in "mqk")
        return "\n".join(
            [*lines, ".control", "set numdgt=12", "op", *(f"print {v}" for v in names.split()), ".endc", ".end"]
        )

    def solve(x: Array, options: str) -> Array:
        done = subprocess.run([program, "-b"], input=netlist(x, options), capture_output=True, text=True, check=False)
        found = re.findall(r"^v\([mqk]\d+\) = (\S+)", done.stdout, re.MULTILINE)
        if len(found) != 3 * len(x):
            raise RuntimeError(f"ngspice found no operating point: {done.stderr.strip()[:200]}")
        return np.array([float(value) for value in found]).reshape(len(x), 3)

    tight = "reltol=1e-9 vntol=1e-12 abstol=1e-15"
    return ForeignBox(
        lambda x: solve(x, "reltol=1e-3"),
        3,
        3,
        0.3,
        0.8,
        rows=16,
        smooth=lambda x: solve(x, tight),
        reference_step=1e-3,
    )


BOXES: dict[str, Callable[[], ForeignBox]] = {
    "circuit, exact": lambda: circuit(None),
    "circuit, 1000 shots": lambda: circuit(1000),
    "circuit, 100 shots": lambda: circuit(100),
    "circuit, inputs of 0.3, 1000 shots": lambda: circuit(1000, deviation=0.3),
    "circuit, inputs of 0.3, 100 shots": lambda: circuit(100, deviation=0.3),
    "circuit, one row, 1000 shots": lambda: circuit(1000, rows=1, deviation=0.05, centre=0.1),
    "contacts": contacts,
    "tree": tree,
    "forest": forest,
    "boosted trees": boosted,
    "Gaussian process": gaussian_process,
    "stiff solver": stiff,
    "circuit simulator": spice,
}
