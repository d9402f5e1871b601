"""Findings, facts, settings and reports are values: nothing changes them once they are made."""

import dataclasses
import importlib
import pkgutil

import pytest

import bondgrad.probing

MODULES = [
    importlib.import_module(f"bondgrad.probing.{module.name}")
    for module in pkgutil.iter_modules(bondgrad.probing.__path__)
]
RECORDS = {
    thing
    for module in MODULES
    for thing in vars(module).values()
    if isinstance(thing, type) and dataclasses.is_dataclass(thing) and thing.__module__.startswith("bondgrad.probing")
}


def test_there_are_some():
    assert len(RECORDS) > 15


@pytest.mark.parametrize("record", sorted(RECORDS, key=lambda record: record.__name__))
def test_records_cannot_be_changed(record):
    made = object.__new__(record)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(record)[0].name, None)
