"""Attacks, objectives, datasets and models of others: from a script, a file, and an installed package."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import segprox
from segprox import SegproxError
from segprox.attacks import ATTACKS, Palma
from segprox.attacks.objectives import OBJECTIVES
from segprox.registry import GROUP, VARIABLE, Registry
from segprox.run.store import stores

SCRIPT = """
import torch
from pydantic.dataclasses import dataclass
import segprox
from segprox.losses import margin

@segprox.register_attack("halving")
@dataclass(frozen=True, kw_only=True)
class Halving(segprox.MinimalAttack):
    \"\"\"Noise that is halved after every success.\"\"\"
    norm: str = "linf"
    steps: int = 6

    def search(self, tracker, report):
        x, size = tracker.problem.images, 1.0
        for t in range(self.steps):
            query = tracker.query((x + size * (0.5 - x).sign()).clamp(0, 1))
            report(query)
            size = size / 2 if query.success.all() else size * 0.9

@segprox.register_objective("lead")
def lead(query, problem, progress):
    values, pullback = margin(query.logits, problem.labels, targeted=problem.wanted)
    return segprox.Loss(-values, lambda weights: pullback(-weights))
"""
SPEC = """
settings: {limit: 1}
grids:
  - models: [demo-standard]
    datasets: [demo]
    attacks: [halving, {name: pgd, set: {objective: lead, steps: 3}}]
"""


def run(*arguments, **environment):
    """A fresh process, which knows of no plugin but those it is told of."""
    command = [sys.executable, "-m", "segprox", *map(str, arguments)]
    environment = {"PATH": "", "COLUMNS": "200", **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SCRIPT)
    return file


@pytest.fixture
def forgotten():
    """Whatever a test registers is gone afterwards."""
    registries = [(registry, dict(registry), dict(registry._origins)) for registry in (ATTACKS, OBJECTIVES)]
    yield
    for registry, entries, origins in registries:
        registry.clear()
        registry.update(entries)
        registry._origins = origins


def test_a_file_serves_the_command_line_specs_and_worker_processes(script, tmp_path):
    (tmp_path / "spec.yaml").write_text(SPEC)
    out = tmp_path / "out"
    done = run("--plugin", script, "run", tmp_path / "spec.yaml", "--workers", 2, "--log", "quiet", "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    names = {store.run.attack.name: [record.forwards for record in store.records()] for store in stores(out)}
    assert names == {"halving": [6], "pgd": [3]}
    listed = run("runs", out)  # what was found can be read by those who do not have the plugin
    assert (listed.returncode, "halving" in listed.stdout, "right at 8.0/255" in listed.stdout) == (0, True, True)
    assert run("report", out, "--out", tmp_path / "report").returncode == 0
    assert "halving" not in run("list", "attacks").stdout
    shown = run("list", "attacks", **{VARIABLE: str(script)}).stdout
    assert re.search(r"halving\s+linf\s+6\s+5\s+Noise that is halved after every success\. \(no\s+publication\)", shown)
    shown = run("attacks", "show", "halving", **{VARIABLE: str(script)}).stdout
    assert re.search(r"steps\s+6", shown)


def test_a_package_announces_its_plugins(script, tmp_path):
    package = tmp_path / "site"
    (package / "mine-1.0.dist-info").mkdir(parents=True)
    (package / "mine-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (package / "mine-1.0.dist-info" / "entry_points.txt").write_text(f"[{GROUP}]\nattacks = mine\n")
    (package / "mine.py").write_text(SCRIPT)
    code = "import segprox; print('halving' in segprox.list_attacks(), segprox.make_attack('halving').cost())"
    path = {"PYTHONPATH": str(package)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": "", **path})
    assert done.stdout == "True Cost(forwards=6, backwards=5)\n"
    (package / "mine.py").write_text("raise ValueError('not today')")
    done = run("attacks", "show", "halving", **path)
    assert done.returncode == 2
    assert done.stderr == "error: the plugin attacks of mine cannot be loaded: ValueError: not today\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [("no/such.py", "there is no plugin no/such.py"), ("no_such_module", "ModuleNotFoundError: No module named")],
)
def test_a_plugin_that_is_not_there_is_named(text, message):
    done = run("list", "attacks", **{VARIABLE: text})
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.usefixtures("forgotten")
def test_names_that_are_taken_are_refused_but_a_definition_may_be_repeated():
    with pytest.raises(SegproxError, match="the name 'palma' is taken by another attack"):
        segprox.register_attack("palma", steps=3)(Palma)
    assert segprox.make_attack("palma").steps == 200
    for steps in (3, 4):
        segprox.register_attack("short", steps=steps)(Palma)
        assert segprox.make_attack("short").steps == steps
    with pytest.raises(SegproxError, match="the name 'short' is taken"):
        segprox.register_attack("short")(segprox.AlmaProx)


@pytest.mark.usefixtures("forgotten")
def test_what_is_no_attack_is_refused():
    with pytest.raises(SegproxError, match="must be a dataclass that inherits MinimalAttack or FixedEpsilonAttack"):
        segprox.register_attack("mine")(Path)  # type: ignore[type-var]


@pytest.mark.usefixtures("forgotten")
def test_an_objective_serves_every_attack_that_has_one():
    @segprox.register_objective("zero")
    def zero(query, problem, progress):
        return segprox.Loss(torch.zeros_like(query.logits[:, 0]), lambda weights: torch.zeros_like(query.logits))

    scene = segprox.load_dataset("demo")[0]
    for name in ("pgd", "apgd", "sea"):
        options = {"objectives": ("zero",)} if name == "sea" else {"objective": "zero"}
        attack = segprox.make_attack(name, steps=4, **options)
        found = attack(segprox.load_model("demo-standard"), scene.image[None], scene.label[None])
        assert found.forwards.item() == 4
    with pytest.raises(SegproxError, match=r"objective of pgd cannot be 'one'.*there is no objective 'one'"):
        segprox.make_attack("pgd", objective="one")


def test_a_registry_names_what_it_has():
    registry = Registry("fruit", {"pear": 1})
    assert registry.find("pear") == 1
    with pytest.raises(SegproxError, match="there is no fruit 'plum'; known are: pear"):
        registry.find("plum")
