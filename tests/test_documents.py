"""The documents keep their word: their examples and commands run, their links lead somewhere, names are documented.

Blocks of a page are executed in order, in an empty folder: `python` blocks, and the commands of `sh` blocks that begin
with `segprox`. A block with a title is also written to a file of that name. Commands get small limits, so that they are
quick. A command that is not executed has a comment `# needs ...`, and is in `NOT_EXECUTED` below.
"""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import segprox
from segprox.attacks import ATTACKS, make_attack

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
SOURCES = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
BLOCK = re.compile(r"^```(python|sh|yaml|toml)(?: title=\"([\w.-]+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)
LONG_LINES = {"architecture.md"}  # a table of rooms, a row each

# What a command in the documents may need, and how many commands need it.
NOT_EXECUTED = {
    "a package index": 8,
    "a copy of the source": 4,
    "a GPU": 4,
    "GPUs": 2,
    "SLURM and GPUs": 1,
    "two nodes": 2,
    "a Ray cluster": 1,
    "chromium": 1,
    "a network and tiles": 3,
    "the hub and data": 2,
    "weights and data": 2,
    "segprox[mmseg]": 5,
    "segprox[hf,smp,torchvision]": 1,
    "segprox[hf,mmseg,smp,torchvision]": 1,
    "a folder with the network and the images": 2,
    "a folder with the networks and the images": 3,
}

# Small limits: what is appended to a command, by its name.
LIMITS = {
    "demo": ["--images", "1", "--steps", "3"],
    "evaluate": ["--limit", "1", "--steps", "3"],
    "audit": ["--limit", "1", "--steps", "3"],
    "check": ["--limit", "1"],
    "memory": ["--size", "64x64"],
}
MANY_STEPS = ("13x", "bisect:", "fgsm")  # attacks whose steps are few already
OUTCOMES = {"require": {0, 3, 4}, "check": {0, 1}, "run": {0}, "demo": {0}}


def load_pages():
    """The module that makes the generated pages."""
    spec = importlib.util.spec_from_file_location("pages", ROOT / "scripts" / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE = load_pages()


class Command(NamedTuple):
    line: str
    needs: str | None


def commands_of(block):
    """The commands of a block of shell; a comment before a command or after it says what it needs."""
    needs = None
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("# needs "):
            needs = line.removeprefix("# needs ")
        elif line.strip() and not line.startswith("#"):
            command, _, after = line.partition(" # ")
            needs = after.removeprefix("needs ") if after.startswith("needs ") else needs
            needs = "a package index" if needs is None and command.startswith("pip ") else needs
            yield Command(command.strip(), needs)
            needs = None


def limited(arguments):
    """A quicker version of a command: fewer images, fewer steps; a spec with smaller numbers is the page's business."""
    name = next((word for word in arguments if not word.startswith("-") and not word.endswith(".py")), "")
    extra = list(LIMITS.get(name, []))
    if any(mark in word for word in arguments for mark in MANY_STEPS) and "--steps" in extra:
        extra = [*extra[: extra.index("--steps")], "--max-queries", "20"] if name == "evaluate" else extra
    if "--until" in arguments:
        extra = ["--limit", "6", "--steps", "3"]
    return name, [*arguments, *extra]


@pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript:DeprecationWarning")  # torch's exporter
@pytest.mark.filterwarnings("ignore:The feature will be removed:DeprecationWarning")  # the same
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_and_commands_run(page, tmp_path, monkeypatch, segprox_cli):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {}
    for kind, title, text in BLOCK.findall(page.read_text()):
        if title:
            Path(title).write_text(text.replace("limit: 4", "limit: 1, max_queries: 6"))
        if kind == "python":
            exec(compile(text, page.name, "exec"), names)  # examples of a page build on each other
        for command in commands_of(text) if kind == "sh" else ():
            if command.needs is None:
                run(command.line, segprox_cli)


def run(line, segprox_cli):
    program, *arguments = shlex.split(line)
    if program == "python":
        subprocess.run([sys.executable, *arguments], check=True)
        return
    assert program == "segprox", f"{line!r} is neither executed nor marked with what it needs"
    name, arguments = limited(arguments)
    if "--plugin" in arguments:  # alone: it registers names
        subprocess.run([sys.executable, "-m", "segprox", *arguments], check=True)
        return
    code, out, err = segprox_cli(*arguments)
    assert code in OUTCOMES.get(name, {0}), f"{line}\n{out}\n{err}"


def test_commands_that_are_not_executed_are_known():
    found: dict[str, int] = {}
    for page in PAGES:
        for kind, _, text in BLOCK.findall(page.read_text()):
            for command in commands_of(text) if kind == "sh" else ():
                if command.needs is not None:
                    found[command.needs] = found.get(command.needs, 0) + 1
    assert found == NOT_EXECUTED


def test_there_are_examples():
    assert BLOCK.findall((ROOT / "README.md").read_text())


@pytest.mark.parametrize("name", segprox.__all__)
def test_public_names_have_an_example(name):
    text = getattr(segprox, name).__doc__
    assert text
    assert ">>>" in text


def test_every_public_name_is_in_the_reference():
    text = MADE.python_api()
    assert all(re.search(rf"^::: [\w.]+\.{name}$", text, re.MULTILINE) for name in segprox.__all__)


def test_links_between_pages_lead_somewhere():
    made = {DOCS / page for page in [*MADE.GENERATED, *MADE.notebook_pages()]}
    for page in SOURCES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in target and not target.startswith("data:"):
                file = (page.parent / target).resolve()
                assert file.exists() or file in made, f"{page.name} links to {target}"


@pytest.mark.parametrize("page", SOURCES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lines_are_short(page):
    if page.name not in LONG_LINES:
        assert [line for line in page.read_text().splitlines() if len(line) > 120] == []


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_is_documented_with_its_cost(name):
    forwards, backwards = make_attack(name).cost()
    rows = [line for text in MADE.attack_tables().values() for line in text.splitlines()]
    assert any(line.startswith(f"| [`{name}`]") and f"| {forwards} | {backwards} |" in line for line in rows)
    assert f"## `{name}` " in MADE.attack_fields()


def test_generated_pages_say_what_the_program_says():
    line = MADE.command_line()
    for command in ("demo", "evaluate", "run", "audit", "require", "report", "card", "attacks show"):
        assert f"`segprox {command}`" in line
    assert "`--max-queries" in line
    assert "| `max_queries` | `int \\| None` | `None` | most forwards plus backwards per image |" in MADE.records()
    assert "| `workers` | `int` | `1` | processes on this machine, or Ray actors. |" in MADE.records()
    assert "`hf:openmmlab/upernet-convnext-tiny`" in MADE.names()


def test_version_is_the_same_everywhere():
    version = segprox.__version__
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"version = {{{version}}}" in (DOCS / "start" / "cite.md").read_text()
