"""The notebooks and a script as a user writes them: the first are run, the second is run and checked by mypy."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from mypy import api as mypy
from nbclient import NotebookClient

import segprox

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "user_script.py"


TUTORIAL = ROOT / "docs" / "start" / "tutorial.ipynb"
NEW_ATTACK = ROOT / "docs" / "how-to" / "new-attack.ipynb"


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_are_kept_without_outputs(path):
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert 8 <= len(code) <= 13
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


def executed(path, folder):
    """What the cells of a notebook show, by the beginning of their last lines."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}})
    client.execute()
    shown = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output.text
            data = output.get("data", {"text/plain": output.get("text")})
            shown.setdefault(cell.source.splitlines()[-1].partition("(")[0].strip(), []).append(data)
    return shown


@pytest.mark.filterwarnings("default")  # of Jupyter's own
def test_the_tutorial_runs_and_shows_what_it_should(tmp_path):
    shown = executed(TUTORIAL, tmp_path)
    checks = next(data["text/plain"] for data in shown["print"] if "finite differences" in data["text/plain"])
    assert "red" not in checks
    assert [set(data) for data in shown["result.plot"]][-1] == {"text/plain", "image/png"}
    bar, table = shown["results"]
    assert "8 of 8 broken" in bar["text/html"]
    assert "<progress" not in bar["text/html"]  # it is done
    assert table["text/plain"] == "Results(2 runs, 16 attacked images)"
    assert "<table>" in table["text/html"]
    (requirements,) = shown["results.require"]  # shown once, as text and as HTML
    assert "images that withstand 1.0/255" in requirements["text/plain"]
    assert "images that withstand 1.0/255" in requirements["text/html"]
    assert any("image/png" in data for data in shown["_ = axes.set_title"])
    assert (tmp_path / "notebook-report" / "index.html").is_file()
    assert len(list((tmp_path / "notebook-results").iterdir())) == 2


@pytest.mark.filterwarnings("default")  # of Jupyter's own
def test_the_notebook_for_researchers_runs_and_ends_with_a_table(tmp_path):
    shown = executed(NEW_ATTACK, tmp_path)
    printed = "".join(data["text/plain"] for data in shown["print"])
    assert "times the smallest perturbation" in printed
    assert r"\bottomrule" in printed
    assert "segprox evaluate --model demo-robust" in printed  # the commands of the card
    assert (tmp_path / "card" / "card.md").is_file()
    assert any("sign test" in data.get("text/html", "") for data in shown["results.only"])
    assert any("broken by" in data.get("text/html", "") for data in shown["audit"])


def test_a_script_that_uses_everything_passes_mypy_strictly(monkeypatch, tmp_path):
    assert "type: ignore" not in SCRIPT.read_text()
    monkeypatch.setenv("MYPYPATH", str(ROOT / "src"))
    options = ["--strict", "--follow-imports=silent", "--config-file=", f"--cache-dir={tmp_path}"]
    report, errors, code = mypy.run([*options, str(SCRIPT)])
    assert (report, errors, code) == ("Success: no issues found in 1 source file\n", "", 0)


def test_that_script_uses_every_public_name_and_runs(tmp_path):
    text = SCRIPT.read_text()
    unused = [name for name in segprox.__all__ if f"segprox.{name}" not in text]
    assert unused == ["prox_linf_box"]  # for those who write attacks of that kind
    methods = [name for name in vars(segprox.Results) if not name.startswith("_")]
    assert [name for name in methods if f".{name}(" not in text] == []
    warnings = ("-W", "error", "-W", "ignore:segprox check is red")  # its networks are random
    command = [sys.executable, *warnings, str(SCRIPT), str(tmp_path)]  # alone: it registers names
    found = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "MPLBACKEND": "agg"})
    assert "there is no attack 'no-such-attack'" in found.stdout
    assert (tmp_path / "report" / "index.html").is_file()
