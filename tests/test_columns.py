"""The index of a run: the same numbers as the lines, and never more than they say."""

import re

import numpy as np
import pytest

from segprox.errors import SegproxError
from segprox.report import page
from segprox.report.contents import report_tables
from segprox.report.curves import anytime_curve
from segprox.report.groups import group_runs
from segprox.report.page import write_page
from segprox.report.results import load_runs
from segprox.run import columns
from segprox.run.engines import Local
from segprox.run.evaluate import Evaluation
from segprox.run.execution import Execution
from segprox.run.plan import AttackEntry, Run, Settings
from segprox.run.record import ImageError, from_line, to_line
from segprox.run.store import RECORDS, Store
from segprox.trace import Improvement
from tests.records import make_record, make_run, make_store


@pytest.fixture
def folder(tmp_path):
    """A run of three images and an error, one of them with two lines."""
    steps = (Improvement(3, 0.5), Improvement(7, 0.02))
    records = [
        make_record("b", 0.03, trace=steps),
        make_record("a", 0.5, False, trace=()),
        make_record("c", trace=steps),
    ]
    error = ImageError(key="k", version="1", image="d", reason="cannot read it: ☃")
    return make_store(tmp_path / "runs", make_run(), [*records, error, make_record("b", 0.02, trace=steps)])


@pytest.fixture
def indexed(monkeypatch):
    monkeypatch.setattr(columns, "SMALL", 0)


def everything(folder, tmp_path):
    """What a report says of a run."""
    results = load_runs([folder])
    write_page(results, tmp_path / "page.html")
    x, y = anytime_curve(results[0])
    return str(report_tables(group_runs(results))), (tmp_path / "page.html").read_text(), x.tolist(), y.tolist()


def test_the_index_says_what_the_lines_say(folder, tmp_path, monkeypatch):
    plain, lines = everything(folder, tmp_path), load_runs([folder])[0]
    assert not (folder / columns.INDEX).exists()  # a small run needs none
    monkeypatch.setattr(columns, "SMALL", 0)
    assert everything(folder, tmp_path) == plain  # makes it
    monkeypatch.setattr(Store, "latest", None)  # nothing reads the lines any more
    assert everything(folder, tmp_path) == plain
    monkeypatch.undo()
    monkeypatch.setattr(columns, "SMALL", 0)
    (run,) = load_runs([folder])
    assert isinstance(run.records, columns.IndexedRecords)
    assert (tuple(run.records), run.errors) == (lines.records, lines.errors)
    assert not list(folder.glob(f".{columns.INDEX}*"))


def test_a_page_of_too_many_records_lists_the_worst_and_says_so(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "RECORD_LIMIT", 2)
    write_page(load_runs([folder]), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "Of 3 records 2 are listed, the worst of each run" in text
    assert re.findall('"image":"(.)"', text) == ["b", "c"]  # a is not broken


def test_a_stale_index_is_made_again(folder, indexed):
    assert load_runs([folder])[0].norms.tolist() == [1.0, 0.02, 0.01]
    with Store(folder) as store:
        store.append(make_record("a", 0.04))
    assert load_runs([folder])[0].norms.tolist() == [0.04, 0.02, 0.01]
    text = (folder / RECORDS).read_text()
    (folder / RECORDS).write_text(text.replace("0.04", "0.06"))  # as long as before
    assert load_runs([folder])[0].norms.tolist() == [0.06, 0.02, 0.01]


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text", "other", "folder"])
def test_a_damaged_index_is_made_again(folder, indexed, damage):
    before, path = load_runs([folder])[0].columns, folder / columns.INDEX
    content = bytearray(path.read_bytes())
    place = content.index(np.float64(0.02).tobytes())
    content[place] ^= 1
    if damage == "folder":
        path.unlink()
        path.mkdir()  # which cannot be written either
    elif damage == "other":
        np.savez(path, made_of=np.array("something else"))
    else:
        path.write_bytes(
            {"empty": b"", "cut": path.read_bytes()[:-100], "flipped": bytes(content), "text": b"no index"}[damage]
        )
    after = load_runs([folder])[0].columns
    assert all(np.array_equal(before[name], after[name], equal_nan=before[name].dtype.kind == "f") for name in before)


def test_damaged_lines_are_refused_whatever_the_index_says(folder, indexed):
    load_runs([folder])
    with (folder / RECORDS).open("a") as lines:
        lines.write("{}\n")
    with pytest.raises(SegproxError, match=r"line 6 of .* is damaged"):
        load_runs([folder])


def test_a_run_of_errors_only(tmp_path, indexed):
    error = ImageError(key="k", version="1", image="d", reason="no")
    folder = make_store(tmp_path, make_run(), [error])
    for _ in range(2):
        (run,) = load_runs([folder])
        assert (len(run.records), run.errors) == (0, (error,))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_run_that_ends_has_its_index_and_one_that_was_stopped_has_none(tmp_path, indexed, batch):
    attack = AttackEntry(name="fmn", set={"steps": 1})
    runs = [Run(model="demo-standard", dataset="demo", attack=attack, settings=Settings(limit=n)) for n in (3, 4)]
    first, second = (tmp_path / run.folder for run in runs)
    assert first == second  # the limit does not make another run
    evaluation = Evaluation(runs[:1], tmp_path, Execution(batch=batch))
    stopped = evaluation.go(Local())
    next(stopped)
    stopped.close()
    assert not (first / columns.INDEX).exists()
    assert len(list(evaluation.go(Local()))) == 3 - 1
    made = (first / columns.INDEX).read_bytes()
    assert load_runs([first])[0].columns["image"].tolist() == ["scene-0000", "scene-0001", "scene-0002"]
    assert not list(evaluation.go(Local()))
    assert (first / columns.INDEX).read_bytes() == made  # it is of just these lines
    list(Evaluation(runs[1:], tmp_path, Execution(batch=batch)).go(Local()))
    assert (first / columns.INDEX).read_bytes() != made


def test_a_name_of_bytes_that_are_no_text_is_read_back():
    record = make_record("scan-\udcff", 0.03)  # as Linux names a file whose name is not UTF-8
    assert from_line(to_line(record)) == record
