"""Train neural networks through functions that have no gradient."""

from bondgrad import baselines, estimators, evaluators, policies, structure
from bondgrad._version import __version__
from bondgrad.box import BlackBox
from bondgrad.calling._per_row import per_row
from bondgrad.checking import Check, check
from bondgrad.errors import BoxError, EvaluationLimitError
from bondgrad.estimators import Central, Forward, Simultaneous
from bondgrad.evaluators._live import LiveTable
from bondgrad.metrics import TensorBoard, sign_accuracy
from bondgrad.probing import Report, probe
from bondgrad.step._records import Step
from bondgrad.step._stats import Stats
from bondgrad.torch_support._graphs import GraphedStep

__all__ = [
    "BlackBox",
    "BoxError",
    "Central",
    "Check",
    "EvaluationLimitError",
    "Forward",
    "GraphedStep",
    "LiveTable",
    "Report",
    "Simultaneous",
    "Stats",
    "Step",
    "TensorBoard",
    "__version__",
    "baselines",
    "check",
    "estimators",
    "evaluators",
    "per_row",
    "policies",
    "probe",
    "sign_accuracy",
    "structure",
]
