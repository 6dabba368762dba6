"""Rooms know only the rooms to their left: an import the other way is a sign that something is in the wrong place."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "segprox"
NUMERIC = {"devices", "errors", "naming", "norms", "shrinkage", "problem", "losses", "prox"}
CORE = {
    *NUMERIC, "bands", "fusion", "models", "registry", "encoding", "trace", "best", "result", "query", "tracker",
    "draws", "seeding", "sizes", "tally",
}  # fmt: skip
ALLOWED = {
    "errors": set(),
    "registry": {"errors"},
    "naming": {"errors"},
    "optional": {"errors"},
    "text": {"errors"},
    "devices": {"errors"},
    "fusion": set(),
    "shrinkage": {"devices", "fusion"},
    "norms": {"devices", "shrinkage"},
    "counts": {"errors"},
    "sizes": set(),
    "bands": {"errors"},
    "encoding": {"bands"},
    "seeding": set(),
    "tally": set(),
    "draws": {"devices", "errors", "models", "naming", "problem", "seeding", "sizes"},
    "losses": {"devices"},
    "prox": NUMERIC,
    "problem": {"devices", "errors", "fusion", "norms"},
    "data": {"bands", "errors", "naming", "optional", "registry", "text"},
    # the embedded model knows the classes of the embedded scenes
    "models": {"bands", "devices", "seeding", "errors", "naming", "optional", "problem", "registry", "text", "data"},
    "trace": set(),
    "best": {"devices", "fusion", "problem"},
    "result": {"bands", "encoding", "trace"},
    "query": {"errors", "norms", "tracker"},  # the tracker for types only
    "tracker": CORE,
    "attacks": CORE,
    "run": {*CORE, "optional", "text", "attacks", "counts", "data", "sizes"},
    "report": {*CORE, "optional", "text", "attacks", "counts", "data", "sizes", "run"},
    "api": {*CORE, "attacks", "data", "run", "report"},
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


def test_every_room_is_listed():
    rooms = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__", "__main__", "cli"} == set(ALLOWED)


LIGHT = ("torch", "numpy", "matplotlib", "pydantic")


def test_help_imports_nothing_heavy():
    code = f"import sys, segprox.cli; print([name for name in {LIGHT!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
