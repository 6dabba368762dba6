"""Rooms know only the rooms to their left: an import the other way is a sign that something is in the wrong place."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "segprox"
NUMERIC = {"errors", "naming", "norms", "problem", "losses", "prox"}
CORE = {*NUMERIC, "models", "trace", "tracker"}
ALLOWED = {
    "errors": set(),
    "naming": {"errors"},
    "optional": {"errors"},
    "norms": set(),
    "counts": {"errors"},
    "losses": set(),
    "prox": NUMERIC,
    "problem": {"errors", "norms"},
    "data": {"errors", "naming", "optional"},
    "models": {
        "errors",
        "naming",
        "optional",
        "problem",
        "data",
    },  # the embedded model knows the classes of the embedded scenes
    "trace": set(),
    "tracker": CORE,
    "attacks": CORE,
    "run": {*CORE, "optional", "attacks", "counts", "data"},
    "report": {*CORE, "attacks", "counts", "data", "run"},
}


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name.split(".")[1] for name in names if name and name.startswith("segprox."))


@pytest.mark.parametrize("room", ALLOWED)
def test_imports(room):
    files = (SOURCE / room).rglob("*.py") if (SOURCE / room).is_dir() else [SOURCE / f"{room}.py"]
    found = {name for file in files for name in imports(file)} - {room}
    assert found <= ALLOWED[room]
