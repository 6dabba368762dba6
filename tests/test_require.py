"""Requirements: passing, failing and undecided, against computations by other means."""

import math

import numpy as np
import pytest

from segprox import SegproxError
from segprox.report.evaluation import Results, load_results
from segprox.report.requirements import load_requirements, read_requirements
from segprox.run.record import ClassCounts
from segprox.sizes import wilson
from tests.records import make_record, make_run, make_store

WIDTH = 160


@pytest.fixture
def folder(tmp_path):
    """A hundred images, broken at 1/255 to 100/255; of 20 pixels 18 are right before the attack and 2 after it."""
    records = [
        make_record(
            f"i{n:03}", (n + 1) / 255,
            clean_counts=ClassCounts([10, 6, 2], [1, 1, 0], [1, 0, 1]),
            counts=ClassCounts([1, 0, 1], [9, 6, 3], [10, 6, 2]),
        )
        for n in range(100)
    ]  # fmt: skip
    make_store(tmp_path, make_run("palma"), records)
    make_store(tmp_path, make_run("fmn"), [make_record(r.image, 2 * r.norm) for r in records])
    return tmp_path


@pytest.mark.parametrize(
    ("options", "code", "outcome", "share"),
    [
        (["--withstand", "2/255"], 0, "pass", "98.0%"),
        (["--withstand", "2/255", "--share", "0.99"], 4, "too few images", "98.0%"),
        (["--withstand", "50/255"], 3, "fail", "50.0%"),
        (["--accuracy", "0.7", "--epsilon", "1/255"], 0, "pass", "89.2%"),
        (["--accuracy", "0.9", "--epsilon", "90/255"], 3, "fail", "18.0%"),
        (["--class", "road", "--iou", "0.5", "--epsilon", "1/255"], 0, "pass", "82"),
        (["--class", "road", "--iou", "0.8", "--epsilon", "99/255"], 3, "fail", ""),
    ],
)
def test_the_gate(segprox, folder, options, code, outcome, share):
    found, output, _ = segprox("require", folder, *options)
    assert found == code
    assert outcome in output
    assert share in output


def test_several_at_once_and_from_a_file(segprox, folder, tmp_path):
    file = tmp_path / "requirements.yaml"
    file.write_text("- {withstand: 2/255, share: 0.9}\n- {class: sky, iou: 0.01, epsilon: 1/255}\n")
    code, output, _ = segprox("require", folder, "--file", file)
    assert code == 0
    assert output.count("pass") == 2
    assert "All requirements are met." in output
    code, output, _ = segprox("require", folder, "--file", file, "--withstand", "99/255")
    assert code == 3
    assert (output.count("pass"), output.count("fail")) == (2, 1)


def test_a_report_begins_with_them(segprox, folder, tmp_path):
    file = tmp_path / "wanted.yaml"
    file.write_text("- {withstand: 1/255, share: 0.5}\n")
    code, _, error = segprox("report", folder, "--require", file, "--out", tmp_path / "cli")
    assert (code, error) == (0, "")
    load_results(folder).write_report(tmp_path / "file", require=file)
    load_results(folder).write_report(tmp_path / "list", require=[{"withstand": "1/255", "share": 0.5}])
    pages = [(tmp_path / name / "index.html").read_text() for name in ("cli", "file", "list")]
    assert pages[0] == pages[1] == pages[2]
    assert pages[0].count('class="outcome ') == 1
    assert "images that withstand 1.0/255" in (tmp_path / "cli/tables/requirements.md").read_text()


def test_critical_classes_come_first(segprox, folder, tmp_path):
    code, _, error = segprox("report", folder, "--critical", "sky, car", "--out", tmp_path / "cli")
    assert (code, error) == (0, "")
    lines = (tmp_path / "cli/tables/classes.csv").read_text().splitlines()[1:]
    assert [line.split(",")[6:8] for line in lines[:3]] == [["sky", "critical"], ["car", "critical"], ["road", ""]]
    assert '"critical":["sky","car"]' in (tmp_path / "cli/index.html").read_text()
    drawn = (tmp_path / "cli/figures/classes.svg").read_text()
    assert drawn.index("<!-- sky * -->") < drawn.index("<!-- car * -->") < drawn.index("<!-- road -->")
    code, _, error = segprox("report", folder, "--critical", "tram", "--out", tmp_path / "none")
    assert code == 2
    assert "there is no class 'tram' in these runs; the classes are: car, road, sky" in error
    with pytest.raises(SegproxError, match="no class 'tram'"):
        load_results(folder).write_report(tmp_path / "none", critical=["tram"])
    assert not (tmp_path / "none/index.html").exists()


def test_in_python(folder):
    results = load_results(folder)
    found = results.require({"withstand": 2 / 255}, {"accuracy": 0.5, "epsilon": "1/255"})
    assert found.met
    assert found.outcomes == ["pass", "pass"]
    assert "Requirements" in str(found)
    assert "<table>" in found._repr_html_()
    assert not results.require({"withstand": "60/255"}).met
    alone = results.only(attack="fmn")
    (judged,) = alone.require({"withstand": "60/255", "share": 0.5}).judged  # its norms are 2/255, 4/255, ...
    assert judged.measured == pytest.approx(0.7)


def test_accuracy_is_that_of_the_strongest_attack_by_hand(folder):
    (judged,) = load_results(folder).require({"accuracy": 0.5, "epsilon": "40/255"}).judged
    assert judged.measured == pytest.approx((40 * 2 + 60 * 18) / (100 * 20))
    resampled = np.random.default_rng(5).choice([0.1] * 40 + [0.9] * 60, (4000, 100)).mean(1)
    assert judged.interval == pytest.approx(np.quantile(resampled, [0.025, 0.975]), abs=0.01)


def test_without_records_nothing_is_decided(tmp_path):
    make_store(tmp_path, make_run("palma"), [])
    results = load_results(tmp_path)
    wanted = ({"withstand": "2/255"}, {"accuracy": 0.5, "epsilon": "1/255"})
    assert results.require(*wanted).outcomes == ["too few images"] * 2
    assert isinstance(results, Results)


@pytest.mark.parametrize(("held", "count"), [(0, 10), (5, 10), (10, 10), (97, 100)])
def test_intervals_of_shares(held, count):
    low, high = wilson(held, count)
    share = held / count
    assert 0 <= low <= share <= high <= 1
    for bound in (low, high):  # where the share is 1.96 standard deviations of the bound away, unless it is cut off
        if 0 < bound < 1:
            assert abs(share - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / count), rel=1e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "must be a list"),
        ({"withstand": 1}, "must be a list"),
        ([{"share": 0.9}], "has none of withstand, accuracy, iou"),
        ([{"withstand": "two"}], "withstand of"),
        ([{"withstand": "2/0"}], "withstand of"),
        ([{"withstand": 0.1, "share": 1.5}], "share of"),
        ([{"accuracy": 0.5}], "epsilon of"),
        ([{"iou": 0.5, "epsilon": 0.1}], "class of"),
        ([{"withstand": 0.1, "shaer": 0.9}], "shaer of"),
    ],
)
def test_what_does_not_fit_is_refused(content, message):
    with pytest.raises(SegproxError, match=message):
        read_requirements(content)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing is required"),
        (["--accuracy", "0.5"], "need --epsilon"),
        (["--iou", "0.5", "--epsilon", "1/255"], "--class and --iou go together"),
        (["--class", "elephant", "--iou", "0.5", "--epsilon", "1/255"], "there is no class 'elephant' in"),
        (["--file", "no-such.yaml"], "cannot read no-such.yaml"),
    ],
)
def test_options_that_do_not_fit(segprox, folder, options, message):
    code, _, error = segprox("require", folder, *options)
    assert code == 2
    assert message in error


def test_a_file_that_is_no_yaml(tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(SegproxError, match="is not YAML"):
        load_requirements(tmp_path / "bad.yaml")
