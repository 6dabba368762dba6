"""The paper's numbers as data, and own runs beside them: a store of records made by hand of three of its runs."""

import csv
from importlib import resources

import pytest

from segprox import SegproxError
from segprox.attacks.registry import PAPER_ATTACKS
from segprox.models import PAPER_MODELS
from segprox.report.evaluation import Results
from segprox.report.published import against, published
from segprox.report.results import load_runs
from segprox.run.plan import Spec
from segprox.run.record import ClassCounts
from tests.records import make_record, make_run, make_store

WIDTH = 200
VOC, CITY = "mmseg:deeplabv3plus-r50-voc", "mmseg:deeplabv3plus-r50b-cityscapes"
VOC_DATA, CITY_DATA = "voc:/mine/VOCdevkit?split=val&size=short-512", "cityscapes:/mine/cityscapes"
TARGET = next(
    run.goal
    for run in Spec.read_text((resources.files("segprox.run") / "specs" / "paper.yaml").read_text()).runs()
    if run.model == CITY and run.goal != "untargeted"
)
FIELDS = {"step_size": 0.001, "penalty": 0.01, "prox": "ternary"}  # the paper's


# --- the data ---------------------------------------------------------------------------------------------------------
def test_every_number_of_the_tables_is_there():
    models = published()["models"]
    assert set(models) == set(PAPER_MODELS)
    for name, model in models.items():
        attacks = PAPER_ATTACKS[6:] if name.startswith("ddcat") else PAPER_ATTACKS  # no bisections on the robust model
        for goal in ("untargeted", "targeted"):
            assert tuple(model[goal]) == attacks
            for median, mean, seconds in model[goal].values():
                assert 0 < median <= 255
                assert 0 < mean <= 255
                assert 0 < seconds < 180
                assert mean >= 0.43 * median
    assert tuple(published()["complexity"]) == PAPER_ATTACKS


@pytest.mark.parametrize(
    ("model", "goal", "attack", "numbers"),
    [
        (VOC, "untargeted", "alma-prox", [0.32, 0.34, 28.1]),
        (VOC, "untargeted", "i-fgsm-13x20", [146.32, 136.55, 13.3]),
        ("mmseg:deeplabv3plus-r101-voc", "targeted", "pgd-dlr-13x4x10", [1.18, 2.03, 39.8]),
        ("mmseg:fcn-hrnetv2-w48-voc", "untargeted", "fmn", [0.91, 46.39, 41.3]),
        (CITY, "targeted", "pdpgd", [14.51, 14.41, 158.8]),
        ("mmseg:fcn-hrnetv2-w48-cityscapes", "targeted", "i-fgsm-13x20", [115.76, 128.65, 41.4]),
        ("mmseg:segformer-mit-b0-cityscapes", "targeted", "dag-0.001", [255.0, 145.61, 52.0]),
        ("mmseg:segformer-mit-b3-cityscapes", "untargeted", "pgd-dlr-13x40", [84.22, 102.8, 170.7]),
        ("ddcat:voc", "untargeted", "alma-prox", [0.78, 2.17, 28]),
        ("ddcat:cityscapes", "targeted", "alma-prox", [3.64, 3.92, 67.6]),
    ],
)
def test_numbers_as_printed(model, goal, attack, numbers):
    assert published()["models"][model][goal][attack] == numbers


def test_clean_numbers_and_costs_as_printed():
    assert [tuple(model["clean"].values()) for model in published()["models"].values()] == [
        (77.4, 0.8, 94.9, 0.2), (78.8, 0.1, 95.3, 0.1), (76.4, 0.2, 94.7, 0.1), (75.2, 0.0, 94.4, None),
        (80.1, -0.2, 96.4, -0.1), (80.5, -0.2, 96.6, -0.1), (76.4, -0.1, 95.9, 0.0), (81.8, 0.0, 96.7, -0.1),
        (71.0, -0.3, 95.0, None),
    ]  # fmt: skip
    assert [published()["complexity"][attack] for attack in PAPER_ATTACKS] == [
        *[[260, 260]] * 2, *[[520, 520]] * 4, [63, 62], [155, 154], *[[500, 500]] * 3,
    ]  # fmt: skip


# --- beside own runs --------------------------------------------------------------------------------------------------
def store(folder, attack, sizes, model=VOC, dataset=VOC_DATA, **more):
    """A run with a record for each size in 255ths; None is an image that was not broken."""
    records = [
        make_record(
            f"i{n}", 0.5 if size is None else size / 255, size is not None, forwards=500 + n, seconds=2.0,
            clean_counts=ClassCounts([90, 0, 0], [0, 10, 0], [10, 0, 0]),
        )
        for n, size in enumerate(sizes)
    ]  # fmt: skip
    return make_store(folder, make_run(attack, model, dataset=dataset, **more), records)


@pytest.fixture
def three(tmp_path):
    """Three of the paper's runs, PALMA on the place of one, and a run of something else."""
    store(tmp_path, "alma-prox", [0.30, 0.40, 0.60], set=FIELDS)
    store(tmp_path, "fmn", [0.46, 0.50, None], model=f"{VOC}?checkpoint=there.pth")
    store(tmp_path, "alma-prox", [1.15, 2.0], CITY, CITY_DATA, set=FIELDS, goal=TARGET)
    store(tmp_path, "palma", [0.16, 0.24, 0.30])
    store(tmp_path, "fmn", [1.0], "demo-robust", "demo")
    return tmp_path


def lines(table):
    """The rows by model and attack, as dictionaries."""
    heads = [column.heading for column in table.columns]
    return {(row[0], row[3]): dict(zip(heads, row)) for row in table.rows}


def test_own_runs_beside_the_paper(three):
    norms, clean, costs = against(load_runs([three]))
    rows = lines(norms)
    assert list(rows) == [(VOC, "fmn"), (VOC, "alma-prox"), (VOC, "palma"), (CITY, "alma-prox")]
    row = rows[VOC, "alma-prox"]
    assert (row["dataset"], row["images"], row["of"]) == ("voc", 3, 1449)
    assert (row["median"], row["paper"], row["ratio"]) == pytest.approx((0.40, 0.32, 1.25))
    assert row["mean"] == pytest.approx(1.3 / 3)
    assert (row["paper's mean"], row["mean ratio"]) == pytest.approx((0.34, 1.3 / 3 / 0.34))
    assert row["to ALMA prox"] == pytest.approx(1.25)
    row = rows[VOC, "fmn"]  # one of three is not broken: 255
    assert (row["median"], row["paper"], row["ratio"]) == pytest.approx((0.50, 0.46, 0.50 / 0.46))
    assert row["mean"] == pytest.approx((0.46 + 0.50 + 255) / 3)
    row = rows[CITY, "alma-prox"]
    assert (row["images"], row["of"], row["median"], row["paper"], row["ratio"]) == (2, 500, pytest.approx(1.15), 1.15,
                                                                                    pytest.approx(1.0))  # fmt: skip
    assert norms.notes[-1] == "Nothing is published for: demo-robust | demo | fmn | untargeted."
    assert any("counts as 255, as in the paper" in note for note in norms.notes)
    assert any("smoothed their target by hand" in note for note in norms.notes)
    clean_row = dict(zip([column.heading for column in clean.columns], clean.rows[0]))
    assert (clean_row["accuracy"], clean_row["paper"], clean_row["difference"]) == pytest.approx((0.9, 0.949, -0.049))
    assert (clean_row["mIoU"], clean_row["paper's mIoU"]) == pytest.approx((0.45, 0.774))
    cost = lines(costs)[VOC, "fmn"]
    assert (cost["forwards"], cost["paper"], cost["seconds"], cost["paper's seconds"]) == (501, 500, 2.0, 24.4)


def test_what_the_paper_does_not_have_is_told_by_its_ratio_to_alma_prox(three):
    row = lines(against(load_runs([three]))[0])[VOC, "palma"]
    assert row["to ALMA prox"] == pytest.approx(0.24 / 0.32)
    assert all(value != value for value in (row["paper"], row["ratio"], row["paper's mean"], row["mean ratio"]))  # NaN


@pytest.mark.parametrize(
    ("more", "deviates"),
    [
        ({"set": FIELDS}, False),
        ({"set": {**FIELDS, "step_size": "1e-3"}, "settings": {"seed": 5, "limit": 3}}, False),
        ({}, True),
        ({"set": FIELDS, "settings": {"max_queries": 50}}, True),
        ({"set": FIELDS, "model": f"{VOC}?precision=bfloat16"}, True),
    ],
)
def test_what_was_run_in_another_way_is_marked(tmp_path, more, deviates):
    store(tmp_path, "alma-prox", [0.3], **more)
    norms = against(load_runs([tmp_path]))[0]
    assert norms.rows[0][3].endswith(" *") == deviates
    assert any(note.startswith("*: other fields") for note in norms.notes) == deviates


@pytest.mark.parametrize(
    "more",
    [
        {"dataset": "voc:/mine?split=val&size=long-512"},
        {"dataset": "voc:/mine?split=train&size=short-512"},
        {"goal": "person"},
        {"settings": {"threshold": 0.9}},
        {"attack": "palma", "set": {"norm": "l2"}},
    ],
)
def test_another_question_is_not_put_beside_the_paper(tmp_path, more):
    folder = store(tmp_path, more.pop("attack", "fmn"), [0.3], **more)
    if more.get("set"):
        header = folder / "run.json"
        header.write_text(header.read_text().replace('"norm": "linf"', '"norm": "l2"'))
    (norms,) = against(load_runs([tmp_path]))
    assert norms.rows == ()
    assert norms.notes[-1].startswith(f"Nothing is published for: {VOC} | ")


def test_the_report_shows_and_writes_it(segprox, three, tmp_path):
    code, output, error = segprox("report", three, "--out", tmp_path / "out", "--against", "paper")
    assert (code, error) == (0, "")
    assert "Beside the paper: smallest perturbations" in output
    assert "Nothing is published for: demo-robust | demo | fmn | untargeted." in output
    with (tmp_path / "out" / "tables" / "against-paper.csv").open() as file:
        rows = {(row["model"], row["attack"]): row for row in csv.DictReader(file)}
    assert float(rows[VOC, "alma-prox"]["ratio"]) == pytest.approx(1.25)
    assert rows[VOC, "palma"]["ratio"] == ""
    assert {path.name for path in (tmp_path / "out" / "tables").glob("against-*.md")} == {
        "against-paper.md", "against-paper-clean.md", "against-paper-cost.md",
    }  # fmt: skip
    assert not list((tmp_path / "other").glob("*"))
    code, _, error = segprox("report", three, "--out", tmp_path / "other", "--against", "memory")
    assert (code, "against 'paper' only, but got 'memory'" in error) == (2, True)
    assert not (tmp_path / "other").exists()


def test_from_python(three):
    results = Results(load_runs([three]))
    assert "1.25" in str(results.against("paper"))
    assert "<h4>Beside the paper: smallest perturbations</h4>" in results.against()._repr_html_()
    with pytest.raises(SegproxError, match="against 'paper' only, but got 'us'"):
        results.against("us")
