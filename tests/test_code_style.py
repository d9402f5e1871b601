"""What a reader may rely on: no object's underscore names are read by others, and nothing is too long to be read."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "bondgrad").rglob("*.py"))
SCRIPTS = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "docs" / "generate").glob("*.py")]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make"}
# Private names of torch and of the standard library for which there is no public way, and why.
FOREIGN = {
    "_C": "graph tasks, functorch transforms, float32 precision without the overhead of its interfaces",
    "_functorch": "whether a tensor belongs to a transform",
    "_are_functorch_transforms_active": "whether a transform is at work",
    "_current_graph_task_id": "whether a backward pass is under way",
    "_get_fp32_precision_getter": "see _C",
    "_set_fp32_precision_setter": "see _C",
    "_dynamo": "a break of the graph, with a message",
    "_current_level": "whether forward-mode differentiation is at work",
    "_active_ddp_module": "the DistributedDataParallel whose forward pass is running",
    "_join_config": "whether it waits for processes that have no more batches",
    "_getframe": "whether the caller is torch.utils.checkpoint",
    "_parameters": "of nn.Module: dictionaries whose tensors may be replaced",
    "_buffers": "of nn.Module, likewise",
    "_foreach_copy_": "many small copies in one call",
    "_BatchNorm": "the common class of batch normalisation in all dimensions",
    "_version": "of a tensor: whether it was written to",
    "_Popen": "of multiprocessing's processes: how they are started",
    "_exit": "the only way to end a forked process without the work of its parent",
    "_DropoutNd": "the common class of dropout in all dimensions",
}


def reaches(tree):
    """Underscore names that are read from anything but the object itself, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value
            own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
            own |= isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"
            if not own and node.attr not in NAMED_TUPLE and node.attr not in FOREIGN:
                yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bondgrad"):
            for alias in node.names:
                is_module = (ROOT / f"{node.module.replace('.', '/')}/{alias.name}.py").exists()
                if alias.name.startswith("_") and not alias.name.startswith("__") and not is_module:
                    yield alias.name, node.lineno


@pytest.mark.parametrize("code", ["other._x", "self.part._x", "from bondgrad.box import _x", "f()._x = 1"])
def test_reaches_are_found(code):
    assert [name for name, _ in reaches(ast.parse(code))] == ["_x"]


@pytest.mark.parametrize("code", ["self._x", "cls._x", "super()._x()", "t._replace(x=1)", "other.__dict__", "torch._C"])
def test_what_is_no_reach(code):
    assert not list(reaches(ast.parse(code)))


@pytest.mark.parametrize("path", [*SOURCES, *SCRIPTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_reads_underscore_names_of_other_objects(path):
    found = [f"line {line}: {name}" for name, line in reaches(ast.parse(path.read_text()))]
    assert not found, "give what is needed a public name, or let its owner do the work"


@pytest.mark.parametrize("path", [*SOURCES, *SCRIPTS, *TESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short(path):
    assert path.read_text().count("\n") <= 350


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_are_short(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            body = [part for part in node.body if not isinstance(getattr(part, "value", None), ast.Constant)]
            length = node.end_lineno - (body[0].lineno if body else node.end_lineno) + 1
            assert length <= 60, f"{node.name} has {length} lines"
