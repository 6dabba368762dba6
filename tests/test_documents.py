"""The documents keep their word: their examples run and the public names are documented."""

import re
from pathlib import Path

import pytest

import segprox
from segprox.attacks import ATTACKS, make_attack

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in BLOCK.findall(page.read_text()):
        exec(compile(code, page.name, "exec"), names)  # examples of a page build on each other


def test_there_are_examples():
    assert BLOCK.findall((ROOT / "README.md").read_text())


@pytest.mark.parametrize("name", segprox.__all__)
def test_public_names_have_an_example(name):
    text = getattr(segprox, name).__doc__
    assert text
    assert ">>>" in text


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_is_documented_with_its_cost(name):
    forwards, backwards = make_attack(name).cost()
    rows = [
        line for line in (ROOT / "docs" / "attacks.md").read_text().splitlines() if line.startswith(f"| `{name}` |")
    ]
    assert any(f"| {forwards} | {backwards} |" in row for row in rows)


def test_version_is_the_same_everywhere():
    assert f'version = "{segprox.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"## {segprox.__version__}" in (ROOT / "CHANGELOG.md").read_text()
