"""What is written down of a run of all tests: which failed, and why, in the table that is made of it."""

import sys
from pathlib import Path

import pytest
import suite

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "generate"))
import pytorch_table

pytest_plugins = "pytester"


def outcomes(pytester, text):
    pytester.makepyfile(text)
    plugin = suite.Outcomes()
    pytester.inline_run("-p", "no:cacheprovider", plugins=[plugin])
    return plugin


def test_failed_tests_are_named_with_the_reason(pytester):
    found = outcomes(
        pytester,
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert 1 == 2, 'one is not two'\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError('no device')\n"
        "def test_broken(broken): pass\n",
    )
    assert dict(found.totals) == {"passed": 1, "failed": 2}
    (wrong, why), (broken, cause) = found.failures.items()
    assert wrong.endswith("::test_wrong")
    assert "one is not two" in why
    assert broken.endswith("::test_broken")
    assert cause == "OSError: no device"


@pytest.mark.parametrize("failures", [{}, {"tests/test_a.py::test_b": "OSError: no device"}])
def test_the_table_says_which_failed_and_why(failures):
    numbers = {"totals": {"passed": 3, "failed": len(failures)}, "failures": failures}
    text = pytorch_table.all_tests({"numbers": numbers, "gpu": None, "machine": "here"})
    assert text.startswith(f"All tests, here: 3 passed, {len(failures)} failed.")
    assert ("Failed: `tests/test_a.py::test_b`: OSError: no device." in text) == bool(failures)
