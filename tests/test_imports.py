"""Who may import whom, and what an installation without extras can do."""

import ast
import subprocess
import sys
from pathlib import Path

import bondgrad

PACKAGE = Path(bondgrad.__file__).parent
LIBRARY = {"box", "policies", "estimators", "structure", "evaluators", "probing", "baselines", "testing", "metrics"}
LIBRARY |= {"errors", "checking", "calling", "step", "torch_support", "measuring"}
EXTRAS = ("typer", "rich", "matplotlib", "yaml", "safetensors", "networkx", "tensorboard", "pytest", "hypothesis")


def imports_of(path, late=True):
    """All that a file imports, or only what it does when it is loaded."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if late else tree.body:
        if isinstance(node, ast.ImportFrom):
            yield node.module
            if node.module == "bondgrad":
                yield from (f"bondgrad.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_the_library_never_imports_from_the_tools():
    checked = 0
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room not in LIBRARY and not room.startswith("_"):
            continue
        checked += 1
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "bondgrad" and len(parts) > 1:
                assert parts[1] in LIBRARY or parts[1].startswith("_"), f"{path.name} imports {name}"
        for name in imports_of(path, late=False):
            assert name.split(".")[0] not in EXTRAS, f"{path.name} imports {name}"
    assert checked > 20


def test_torch_and_numpy_are_enough():
    hidden = "".join(f"sys.modules[{name!r}] = None\n" for name in EXTRAS)
    program = f"""
import sys
{hidden}
import torch, bondgrad, bondgrad.testing, bondgrad.data, bondgrad.networks, bondgrad.reservoirs
x = torch.randn(4, 3, requires_grad=True)
bondgrad.BlackBox(torch.sin, 3, structure="auto")(x).sum().backward()
assert x.grad.abs().min() > 0
try:
    bondgrad.structure.plot(torch.eye(3).bool())
except ImportError as error:
    assert "pip install matplotlib" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_the_compiler_is_not_loaded_before_it_is_used():
    """It takes long to load."""
    script = "import sys, bondgrad; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
