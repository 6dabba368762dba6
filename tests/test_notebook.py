"""The notebook and a script as a user writes them: the first is run, the second is run and checked by mypy."""

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


@pytest.fixture
def notebook():
    return nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)


def test_the_notebook_is_kept_without_outputs(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert 8 <= len(code) <= 12
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.filterwarnings("default")  # of Jupyter's own
def test_the_notebook_runs_and_shows_what_it_should(notebook, tmp_path):
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    shown = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output.text
            shown.setdefault(cell.source.splitlines()[-1].partition("(")[0], []).append(output.get("data", {}))
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
