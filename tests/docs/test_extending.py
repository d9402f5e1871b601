"""The page about parts of one's own: its code runs, prints what it says, has public names, is as long as it says."""

import ast
import contextlib
import importlib
import io
import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, re.DOTALL)


def test_the_code_prints_what_the_page_says():
    assert len(BLOCKS) == 11
    torch.manual_seed(0)
    names = {}
    for code, said in BLOCKS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)  # noqa: S102
        assert printed.getvalue() == said


def test_parts_are_as_long_as_the_page_says():
    parts = re.findall(r"(\d+) lines:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(parts) == 4
    for lines, code in parts:
        assert int(lines) == sum(bool(line.strip()) for line in code.splitlines())


@pytest.mark.parametrize("code", [code for code, _ in BLOCKS])
def test_only_public_names_are_used(code):
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("bondgrad"):
            public = importlib.import_module(node.module).__all__
            assert {alias.name for alias in node.names} <= set(public)
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_") or node.attr.endswith("__")
