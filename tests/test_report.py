"""Statistics, tables and figures of runs: recomputed by other means, and with everything that names can contain."""

import csv
import errno
import io
import re
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.transforms import Bbox
from rich.console import Console

from segprox.errors import SegproxError
from segprox.report.compare import compare_tables, match_runs
from segprox.report.contents import report_tables
from segprox.report.curves import anytime_curve, measure_curve, unbroken_curve
from segprox.report.evaluation import Results
from segprox.report.figures import _steps, draw_figures, masking_variants, save_figure
from segprox.report.groups import attack_labels, group_runs
from segprox.report.metrics import mean_iou, pixel_accuracy
from segprox.report.panels import NormAxis
from segprox.report.results import RunResults, load_runs
from segprox.report.statistics import (
    bootstrap_median,
    common_norms,
    compare_pair,
    head_to_head,
    optimality,
    sign_test,
    summarise,
)
from segprox.report.tables import Column, Table, to_csv, to_latex, to_markdown, to_screen
from segprox.report.units import Unit
from segprox.report.write import write_report
from segprox.run.record import ClassCounts, ImageError, Score
from tests.records import make_record, make_results, make_run, make_store

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "a|b",
    "_under_score_",
    "100%",
    "=cmd()",
    "$\\frac{1}{",
    "[x](y)",
    "a\nb",
    "*\\~^",
    "道路",
]
NORM = st.one_of(st.none(), st.floats(0, 0.99))
NORMS = st.lists(NORM, min_size=1, max_size=12)


def results_of(norms, **more):
    """A run in memory."""
    records = tuple(
        make_record(f"i{n:03}", 0.5 if norm is None else norm, norm is not None) for n, norm in enumerate(norms)
    )
    return RunResults(Path("f/r"), make_run(**more), {"classes": ("road", "car", "sky")}, records, ())


def varied(seed=0, images=9):
    """A run in which everything differs from image to image."""
    rng = np.random.default_rng(seed)
    records = []
    for n in range(images):
        counts = [ClassCounts(*(rng.integers(0, 20, 3).tolist() for _ in range(3))) for _ in range(2)]
        success = bool(rng.random() < 0.7)
        linf, seconds = float(rng.random() / 10), float(rng.random())
        rounded = Score(linf=round(linf * 255) / 255, l2=1, l1=1, apsr=0.9, success=success and n % 2 == 0)
        queries = {"forwards": int(rng.integers(1, 50)), "backwards": int(rng.integers(1, 50)), "seconds": seconds}
        records.append(
            make_record(f"i{n}", linf, success, clean_counts=counts[0], counts=counts[1], rounded=rounded, **queries)
        )
    errors = (ImageError(version="1", key="k", image="x", reason="gone"),)
    return RunResults(Path("f/r"), make_run(), {}, tuple(records), errors)


def middle(values):
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def breaks_half(sizes):
    """The smallest of the sizes that breaks at least half of the images."""
    return min(size for size in sizes if 2 * sum(other <= size for other in sizes) >= len(sizes))


def pooled_by_hand(records, chosen):
    """Pixel accuracy and mean IoU from loops."""
    sums = [[0, 0, 0] for _ in range(3)]
    for record, counts in zip(records, chosen):
        assert record
        for k, values in product(range(3), enumerate((counts.tp, counts.fp, counts.fn))):
            sums[k][values[0]] += values[1][k]
    accuracy = Fraction(sum(tp for tp, _, _ in sums), sum(tp + fn for tp, _, fn in sums))
    ious = [Fraction(tp, tp + fp + fn) for tp, fp, fn in sums if tp + fp + fn]
    return float(accuracy), float(sum(ious) / len(ious))


@pytest.mark.parametrize("seed", range(4))
def test_summary_against_loops(seed):
    result = varied(seed, images=8 + seed)
    records, found = result.records, summarise(result)
    norms = [r.found.linf if r.found.success else 1.0 for r in records]
    coarse = [r.rounded.linf if r.rounded.success else 1.0 for r in records]
    assert (found.images, found.errors) == (len(records), 1)
    assert found.broken == len([r for r in records if r.found.success])
    assert found.success_rate == found.broken / len(records)
    assert found.median == pytest.approx(breaks_half(norms))
    assert found.mean == pytest.approx(sum(norms) / len(norms))
    assert found.l2 == pytest.approx(breaks_half([r.found.l2 if r.found.success else float("inf") for r in records]))
    assert found.apsr == pytest.approx(middle([r.found.apsr for r in records]))
    assert found.forwards == middle([r.forwards for r in records])
    assert found.backwards == middle([r.backwards for r in records])
    assert found.seconds == pytest.approx(middle([r.seconds for r in records]))
    assert found.total_seconds == pytest.approx(sum(r.seconds for r in records))
    assert (found.rounded_median, found.rounded_mean) == pytest.approx((breaks_half(coarse), sum(coarse) / len(coarse)))
    assert found.rounded_broken == len([r for r in records if r.rounded.success])
    clean = pooled_by_hand(records, [r.clean_counts for r in records])
    attacked = pooled_by_hand(records, [r.counts for r in records])
    assert (found.accuracy, found.miou) == pytest.approx(clean)
    assert (found.attacked_accuracy, found.attacked_miou) == pytest.approx(attacked)


@pytest.mark.parametrize("seed", range(4))
def test_curves_against_loops(seed):
    result = varied(seed)
    curves = unbroken_curve(result), measure_curve(result, pixel_accuracy), measure_curve(result, mean_iou)
    edges = [r.found.linf for r in result.records]
    for epsilon in [0.0, 1.0, *edges, *np.nextafter(edges, 0), *np.linspace(0, 0.11, 23)]:
        fits = [r.found.linf <= epsilon for r in result.records]
        broken = [r.found.success and fit for r, fit in zip(result.records, fits)]
        chosen = [r.counts if fit else r.clean_counts for r, fit in zip(result.records, fits)]
        accuracy, miou = pooled_by_hand(result.records, chosen)
        expected = (1 - sum(broken) / len(broken), accuracy, miou)
        assert [curve.at(epsilon) for curve in curves] == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(4))
def test_anytime_curve_against_loops(seed):
    rng = np.random.default_rng(seed)
    records, unbroken = [], 1.0
    for n in range(5 + seed):
        queries, norms = sorted(rng.choice(40, 6, replace=False) + 1), sorted(rng.random(6), reverse=True)
        trace = list(zip(map(int, queries), map(float, norms)))[: rng.integers(0, 7)]
        success = bool(trace) and n != 1
        records.append(
            make_record(f"i{n}", trace[-1][1] if trace else 0.5, success, trace=trace, forwards=30, backwards=20)
        )
    curve = anytime_curve(replace(results_of([]), records=tuple(records)))
    for query in range(60):
        known = [[norm for at, norm in r.trace if at <= query and r.found.success] for r in records]
        assert curve.at(query) == pytest.approx(breaks_half([norms[-1] if norms else unbroken for norms in known]))
    assert (curve.x[0], curve.x[-1]) == (0, 50)
    assert anytime_curve(replace(results_of([]), records=(*records, make_record("old")))) is None
    assert anytime_curve(results_of([])) is None


@given(NORMS)
def test_curve_never_rises_and_ends_at_what_was_not_broken(norms):
    curve = unbroken_curve(results_of(norms))
    assert curve.x[0] == 0
    assert np.all(np.diff(curve.x) > 0)
    assert np.all(np.diff(curve.y) < 0)
    assert curve.y[-1] == pytest.approx(norms.count(None) / len(norms))
    x, y = _steps(curve, 1.0)
    assert np.all(np.diff(x) >= 0)
    assert np.all(np.diff(y) <= 0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 5))
def test_bootstrap_interval_contains_the_median_and_repeats(values, seed):
    interval = bootstrap_median(np.array(values), seed, resamples=60)
    assert interval.low - 1e-12 <= np.median(values) <= interval.high + 1e-12
    assert interval == bootstrap_median(np.array(values), seed, resamples=60)


def test_bootstrap_interval_covers():
    rng = np.random.default_rng(1)
    inside = 0
    for seed in range(100):
        low, high = bootstrap_median(rng.normal(size=40), seed, resamples=100)
        inside += low <= 0 <= high
    assert 85 <= inside <= 100  # of 95 expected


MATRIX = st.integers(1, 8).flatmap(
    lambda n: st.lists(
        st.lists(st.one_of(st.just(1.0), st.floats(0, 0.9)), min_size=n, max_size=n), min_size=1, max_size=4
    )
)


@given(MATRIX)
@example([[1.0, 0.375, 1.0], [0.458756582204645, 1.0, 0.0], [0.17135466101759877, 0.29626507304865124, 0.225]])
@example([[1.0] * 8, [1.0] * 5 + [1.8879612908729606e-23] + [1.0] * 2, [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]])
def test_optimality_is_a_share_and_one_for_the_best(rows):
    norms = np.array(rows)
    best = norms.min(0)
    values = optimality(np.vstack([norms, best]))
    if (best == 1).all():
        assert np.isnan(values).all()
        return
    assert np.all((values >= 0) & (values <= 1))
    assert values[-1] == 1
    worse = np.where(norms[0] < 1, norms[0] + 0.05, 1)  # an attack that needs more everywhere is no better
    first, second = optimality(np.vstack([norms[0], worse, best]))[:2]
    assert second <= first


def test_optimality_is_the_area_between_curves():
    rng = np.random.default_rng(0)
    norms = np.where(rng.random((3, 20)) < 0.2, 1.0, rng.random((3, 20)) / 20)
    best = norms.min(0)
    end = max(b for b in best if b < 1)
    grid = (np.arange(200_000) + 0.5) * end / 200_000
    kept = [i for i in range(20) if best[i] < 1]

    def area(values):
        ordered = np.sort(values[kept])
        return float(np.mean(1 - np.searchsorted(ordered, grid, side="right") / len(kept)))

    expected = [1 - (area(row) - area(best)) / (1 - area(best)) for row in norms]
    assert optimality(norms) == pytest.approx(expected, abs=1e-4)


def test_optimality_where_areas_are_empty():
    assert optimality(np.array([[0.1], [0.2]])).tolist() == [1.0, 0.0]
    assert optimality(np.array([[0.1, 0.1], [0.1, 1.0]])).tolist() == [1.0, 0.5]


@given(MATRIX)
def test_head_to_head_against_loops(rows):
    found = head_to_head(np.array(rows))
    for a, b in product(range(len(rows)), repeat=2):
        points = [1.0 if x < y else 0.5 if x == y else 0.0 for x, y in zip(rows[a], rows[b])]
        assert found[a, b] == pytest.approx(sum(points) / len(points))
    assert found + found.T == pytest.approx(np.ones_like(found))


@pytest.mark.parametrize(("larger", "smaller"), [(0, 0), (1, 0), (7, 2), (4, 4), (12, 1), (3, 9)])
def test_sign_test_against_enumeration(larger, smaller):
    tosses = larger + smaller
    far = abs(larger - smaller)
    extreme = sum(abs(2 * sum(coins) - tosses) >= far for coins in product((0, 1), repeat=tosses))
    assert sign_test(larger, smaller) == pytest.approx(extreme / 2**tosses)


def test_sign_test_of_many():
    assert sign_test(5000, 0) == 0.0
    assert sign_test(2500, 2500) == 1.0


def test_paired_by_pixels_not_by_names():
    first, second = results_of([0.1, 0.2, 0.3, None]), results_of([0.2, 0.1, 0.3, 0.5, 0.9])
    renamed = tuple(replace(record, image=f"z{n}") for n, record in enumerate(second.records))
    second = replace(second, records=renamed[::-1])
    found = compare_pair(first, second)
    assert (found.images, found.larger, found.equal, found.smaller) == (4, 1, 1, 2)
    assert found.difference == pytest.approx(-0.05)
    assert found.interval.low <= found.difference <= found.interval.high
    assert found.p_value == 1.0


def test_common_images_of_runs_that_differ():
    runs = [results_of([0.1, 0.2, 0.3]), results_of([0.4, 0.5])]
    assert common_norms(runs).tolist() == [[0.1, 0.2], [0.4, 0.5]]
    twice = results_of([0.1, 0.2])
    twice = replace(twice, records=tuple(replace(record, image_hash="same") for record in twice.records))
    assert common_norms([twice, twice]).tolist() == [[0.1, 0.2], [0.1, 0.2]]


def test_labels_say_what_differs():
    def labels(*runs):
        return attack_labels([RunResults(Path("f/r"), run, {}, (), ()) for run in runs])

    same = make_run("fmn", set={"steps": 5})
    assert labels(same, make_run("fmn", model="other", set={"steps": 5})) == ["fmn", "fmn"]
    assert labels(same, make_run("fmn", set={"steps": 6})) == ["fmn steps=5", "fmn steps=6"]
    assert labels(make_run("fmn"), make_run("fmn", set={"masking": "none"})) == ["fmn", "fmn masking=none"]
    assert labels(make_run(), make_run(settings={"seed": 1})) == ["fmn seed=0", "fmn seed=1"]


def test_groups(tmp_path):
    runs = [
        make_run("fmn", goal="road", dataset="voc:data/x"), make_run("fmn", dataset="voc:data/x"),
        make_run("pgd", dataset="voc:data/x"), make_run("fmn", dataset="camvid:/y"),
    ]  # fmt: skip
    results = [RunResults(tmp_path / "a" / "r", run, {}, (), ()) for run in runs]
    groups = group_runs([*results, RunResults(tmp_path / "b" / "r", runs[2], {}, (), ())])
    assert [group.names for group in groups] == [
        ("m", "voc", "untargeted"), ("m", "camvid", "untargeted"), ("m", "voc", "road"),
    ]  # fmt: skip
    assert list(groups[0].runs) == ["fmn", "pgd (a)", "pgd (b)"]
    twice = group_runs([results[2], results[2], results[2]])
    assert list(twice[0].runs) == ["pgd (a)", "pgd (a) #2", "pgd (a) #3"]


def test_thresholds_are_never_compared():
    loose = results_of([0.1], settings={"threshold": 0.9})
    assert len(group_runs([loose, results_of([0.2])])) == 2


# Tables


def table_of(rows, *columns, **more):
    return Table("name", "Title", columns, tuple(rows), **more)


@given(st.lists(st.one_of(st.none(), st.floats(0, 300), st.just(float("nan"))), min_size=2, max_size=8))
def test_bold_is_the_smallest(values):
    table = table_of([(value,) for value in values], Column("norm", ".2f", best="min"))
    known = [value for value in values if value is not None and value == value]
    expected = {f"{min(known):.2f}"} if len(known) > 1 else set()
    assert {f"{values[row]:.2f}" for row, _ in table.bold()} == expected


def test_bold_in_each_group_and_direction():
    columns = (Column("group"), Column("low", ".1f", "min"), Column("high", ".1f", "max"), Column("n", "d"))
    table = table_of(
        [("a", 1.0, 1.0, 1), ("a", 2.0, 2.0, 2), ("b", 9.0, 5.0, 3), ("b", 9.04, 4.0, 4)], *columns, keys=1
    )
    assert table.bold() == {(0, 1), (1, 2), (2, 1), (3, 1), (2, 2)}


def unescaped_latex(text):
    """What a reader of the page would see."""
    named = {
        "backslash": "\\",
        "asciicircum": "^",
        "asciitilde": "~",
        "less": "<",
        "greater": ">",
        "bar": "|",
        "quotedbl": '"',
    }
    text = re.sub(r"\\text(\w+)\{\}", lambda found: f"\\text{ord(named[found[1]])};", text)
    text = re.sub(r"\{([\[\]*])\}", r"\1", text)
    text = re.sub(r"\\([{}$&#%_])", r"\1", text)
    return re.sub(r"\\text(\d+);", lambda found: chr(int(found[1])), text)


def split_cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)&", line)]


@pytest.mark.parametrize("name", HOSTILE)
def test_latex_is_well_formed_and_says_the_name(name):
    columns = (Column("attack"), Column(name, ".1f", "min", over=name), Column("b", ".1f", over=name))
    text = to_latex(table_of([(name, 1.0, 2.0), ("fmn", 3.0, None)], *columns, notes=(name,)))
    bare = re.sub(r"\\[{}]", "", text)
    depth = np.cumsum([{"{": 1, "}": -1}.get(c, 0) for c in bare])
    assert depth.min() >= 0
    assert depth[-1] == 0
    opened, closed = re.findall(r"\\begin\{(\w+)\}", text), re.findall(r"\\end\{(\w+)\}", text)
    assert opened == closed[::-1] == ["table", "tabular"]
    lines = [line.removesuffix(r" \\") for line in text.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 4
    assert all(len(split_cells(line)) == 3 for line in lines[1:])
    first = split_cells(lines[2])
    assert unescaped_latex(first[0]) == name.replace("\n", " ")
    assert first[1] == r"\textbf{1.0}"
    assert not re.search(r"\\\\\s*[\[*]", text)  # which would be arguments
    assert not re.search(r"(?<!\\)[%$#_^~]", text.replace(r"\label{tab:name}", ""))


@pytest.mark.parametrize("name", HOSTILE)
def test_markdown_is_aligned_and_harmless(name):
    text = to_markdown(table_of([(name, 1.0), ("fmn", 22.0)], Column("attack"), Column(name, ".1f", "min")))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    edges = [[found.start() for found in re.finditer(r"(?<!\\)\|", line)] for line in lines]
    assert all(len(line) == 3 for line in edges)
    assert len({tuple(line) for line in edges}) == 1
    assert re.fullmatch(r"\| :-+ \| -+: \|", lines[1])
    assert "<" not in text
    assert "**1.0**" in lines[2]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\x00")), min_size=1, max_size=5))
def test_csv_round_trip(names):
    values = [n / 3 for n in range(len(names))]
    text = to_csv(table_of(list(zip(names, values)), Column("attack"), Column("norm", ".1f")))
    rows = list(csv.reader(io.StringIO(text, newline="")))[1:]
    assert [float(row[1]) for row in rows] == values  # unrounded
    for row, name in zip(rows, names):
        shown = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", name)  # on one line
        assert row[0] in (shown, f"'{shown}")
        assert not row[0].lstrip().startswith(("=", "+", "-", "@"))


def test_csv_keeps_negative_numbers_and_empty_cells():
    text = to_csv(table_of([("-x", -1.5), ("b", None), ("c", float("nan"))], Column("attack"), Column("norm", ".1f")))
    assert text.splitlines() == ["attack,norm", "'-x,-1.5", "b,", "c,"]


def test_screen_shows_names_as_they_are():
    console = Console(width=100, record=True, file=io.StringIO())
    columns = (
        Column("group"),
        Column("attack"),
        Column("norm", ".1f", over="here"),
        Column("mean", ".1f", over="there"),
    )
    console.print(to_screen(table_of([("[red]g", "[bold]fmn[/]", 1.0, 2.0)], *columns, keys=1, notes=("[dim]",))))
    text = console.export_text()
    assert all(part in text for part in ("[red]g, here", "[red]g, there", "[bold]fmn[/]", "1.0", "2.0", "[dim]"))


def named(tables):
    return {table.name: table for table in tables}


def test_tables_of_a_report(tmp_path):
    results = make_results(tmp_path, {"fmn": [0.01, 0.02, None], "pdpgd": [0.02, 0.01, 0.03]}, errors=2)
    results += make_results(tmp_path / "road", {"fmn": [0.01], "pdpgd": [None]}, goal="road")
    tables = named(report_tables(group_runs(results)))
    assert list(tables) == [
        "norms-untargeted", "norms-targeted", "summary", "accuracy", "classes", "8-bit", "complexity", "optimality",
        "optimality-mean", "head-to-head", "paired", "runs",
    ]  # fmt: skip
    assert tables["norms-untargeted"].rows[0] == ("fmn", pytest.approx(5.1), pytest.approx(87.55), "2 of 3, 2 errors")
    assert tables["norms-targeted"].rows == (
        ("fmn", pytest.approx(2.55), pytest.approx(2.55), "1 of 1"), ("pdpgd", 255.0, 255.0, "0 of 1"),
    )  # fmt: skip
    assert tables["norms-targeted"].columns[1].title == "m, d, road: median"
    for table in tables.values():  # how many there were is always to be seen
        heads = {column.heading for column in table.columns}
        assert {"images", "errors"} <= heads or "broken" in heads or table.name == "optimality-mean"
    assert tables["optimality-mean"].rows[0][1] == 2
    assert [row[6:] for row in tables["head-to-head"].rows[:2]] == [
        (None, pytest.approx(1 / 3)),
        (pytest.approx(2 / 3), None),
    ]
    assert tables["paired"].rows[0][3:5] == ("fmn", "pdpgd")  # the same median: the first of them


def test_attacks_that_were_not_run_everywhere(tmp_path):
    results = make_results(tmp_path, {"fmn": [0.1]}) + make_results(tmp_path / "o", {"pdpgd": [0.1]}, model="other")
    table = named(report_tables(group_runs(results)))["norms-untargeted"]
    assert [row[1:4] == (None,) * 3 for row in table.rows] == [False, True]


# Degenerate runs, and names from data, through the whole command

WIDTH = 160  # of the console: no cell is cut


def test_report_command(segprox, tmp_path):
    for attack, value in (("fmn", 0.01), ("_hidden$", 0.1), ("=cmd()|<b>", None)):
        norms = [None if value is None else value * (1 + n) for n in range(3)]
        make_results(tmp_path / "in", {attack: norms}, errors=1, model=HOSTILE[0], dataset=HOSTILE[1])
        make_results(tmp_path / "in", {attack: norms}, model=HOSTILE[5], dataset=HOSTILE[-1])
    code, output, error = segprox("report", tmp_path / "in", "--out", tmp_path / "out", "--figures", "svg, pdf")
    assert (code, error) == (0, "")
    assert HOSTILE[0] in output
    assert "figures (SVG, PDF)" in " ".join(output.split())
    files = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    for name in ("unbroken", "accuracy", "miou", "classes", "queries"):
        assert {file for file in files if file.startswith(f"figures/{name}.")} == {
            f"figures/{name}.{ending}" for ending in ("svg", "pdf")
        }
    assert {f"tables/summary.{ending}" for ending in ("md", "tex", "csv")} <= files
    assert "<img" not in (tmp_path / "out/tables/all.md").read_text()
    assert "<img" not in (tmp_path / "out/figures/unbroken.svg").read_text()


@pytest.mark.parametrize(
    "norms",
    [
        {"fmn": [0.01]},
        {"fmn": [None]},
        {"fmn": [0.0, 0.0]},
        {"fmn": [None, None], "pdpgd": [None, None]},
        {"fmn": [1.0]},
    ],
    ids=["one image", "not broken", "broken as they are", "nothing broken", "all of the range"],
)
def test_degenerate_runs_can_be_drawn(tmp_path, norms):
    groups = group_runs(make_results(tmp_path, norms))
    assert report_tables(groups)
    assert set(dict(draw_figures(groups))) == {"unbroken", "accuracy", "miou", "classes", "queries"}  # and no traces


def test_failures_only(segprox, tmp_path):
    make_results(tmp_path / "in", {"fmn": []}, errors=3)
    code, output, _ = segprox("report", tmp_path / "in", "--out", tmp_path / "out")
    assert code == 0
    assert "0 of 0, 3 errors" in output
    assert not list((tmp_path / "out" / "figures").iterdir())


def test_no_classes_many_attacks_and_missing_previews(tmp_path):
    for n in range(9):
        records = [make_record(f"i{k}", 0.01 * (1 + n) * (1 + k), preview="images/gone.png") for k in range(3)]
        make_store(tmp_path, make_run(f"attack-number-{n}"), records, {"classes": None})
    groups = group_runs(load_runs([tmp_path]))
    figures = dict(draw_figures(groups))
    assert len(figures["unbroken"].legends) == 1  # too many to label
    assert len(figures["classes"].axes[0].containers) == 4  # before, and the three strongest
    looks = {(line.get_color(), str(line.get_linestyle())) for line in figures["unbroken"].axes[0].get_lines()}
    assert len(looks) >= 9


def test_nothing_to_report(segprox, tmp_path):
    make_results(tmp_path / "in", {"fmn": []})
    code, _, error = segprox("report", tmp_path / "in", "--out", tmp_path / "out")
    assert code == 2
    assert "have no records yet" in error
    assert not (tmp_path / "out").exists()
    assert segprox("report", tmp_path / "nowhere", "--out", tmp_path / "out")[0] == 2
    (tmp_path / "file").write_text("")
    make_results(tmp_path / "some", {"fmn": [0.1]})
    code, _, error = segprox("report", tmp_path / "some", "--out", tmp_path / "file")
    assert code == 2
    assert "cannot write" in error


def test_the_same_report_twice_is_the_same(tmp_path):
    groups = group_runs(make_results(tmp_path / "in", {"fmn": [0.01, 0.02], "pdpgd": [0.02, None]}))
    for copy in "ab":
        (tmp_path / copy).mkdir()
        save_figure(dict(draw_figures(groups))["unbroken"], tmp_path / copy / "f")
    for ending in ("svg", "pdf", "png"):
        assert (tmp_path / "a" / f"f.{ending}").read_bytes() == (tmp_path / "b" / f"f.{ending}").read_bytes()


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_report_that_is_not_finished_changes_nothing(segprox, tmp_path, monkeypatch):
    make_results(tmp_path / "in", {"fmn": [0.01, 0.02]})
    (tmp_path / "out/figures").mkdir(parents=True)
    (tmp_path / "out/figures/own.txt").write_text("of the user")
    assert segprox("report", tmp_path / "in", "--out", tmp_path / "out")[0] == 0
    before = contents(tmp_path / "out")
    assert before["figures/own.txt"] == b"of the user"
    assert "index.html" in before
    make_results(tmp_path / "in", {"pdpgd": [0.02, None]})
    saved = []

    def full(figure, path, formats):
        if len(saved) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        saved.append(path)
        save_figure(figure, path, formats)

    with monkeypatch.context() as patched:
        patched.setattr("segprox.report.write.save_figure", full)
        for folder in ("out", "new"):
            saved.clear()
            code, _, error = segprox("report", tmp_path / "in", "--out", tmp_path / folder)
            assert (code, len(saved)) == (2, 2)
            assert "No space left on device" in error
    assert contents(tmp_path / "out") == before
    assert contents(tmp_path / "new") == {}
    (tmp_path / "out/.unfinished/figures").mkdir(parents=True)  # as a process that was killed leaves it
    (tmp_path / "out/.unfinished/figures/torn.svg").write_text("<svg")
    assert segprox("report", tmp_path / "in", "--out", tmp_path / "out")[0] == 0
    after = contents(tmp_path / "out")
    assert after["figures/unbroken.svg"] != before["figures/unbroken.svg"]
    assert not [name for name in after if "torn" in name or "unfinished" in name]


def test_formats_of_figures(segprox, tmp_path):
    [run] = make_results(tmp_path / "in", {"fmn": [0.01, 0.02]})
    write_report([run], tmp_path / "out")
    assert {path.suffix for path in (tmp_path / "out" / "figures").iterdir()} == {".svg", ".png"}
    code, _, error = segprox("report", tmp_path / "in", "--out", tmp_path / "none", "--figures", "svg,gif")
    assert (code, error) == (2, "error: figures cannot be written as 'gif'; the formats are: svg, png, pdf\n")
    assert not any((tmp_path / "none").rglob("*"))


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_nothing_sticks_out_of_a_figure_or_into_another_panel(tmp_path, groups):
    norms = {f"attack-{k}": [0.001 * (k + 1), 0.2] for k in range(12)}
    for k in range(groups):
        make_results(
            tmp_path, norms, model=f"a model with a rather long name {k}", dataset="a dataset with a long name, cut off"
        )
    runs = [
        replace(run, header=run.header | {"classes": ["Traffic Lights and Signs", "b", "c"]})
        for run in load_runs([tmp_path])
    ]
    for figure in dict(draw_figures(group_runs(runs))).values():
        boxes = [axes.get_tightbbox() for axes in figure.axes] + [box.get_window_extent() for box in figure.legends]
        inside = Bbox.union([figure.bbox, *boxes])
        assert inside.bounds == figure.bbox.bounds
        assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])


def test_few_curves_are_labelled_where_they_are(tmp_path):
    figure = dict(draw_figures(group_runs(make_results(tmp_path, {"fmn": [0.01, 0.02], "pdpgd": [0.1, 0.2]}))))[
        "unbroken"
    ]
    labels = {text.get_text(): text.get_window_extent() for text in figure.axes[0].texts}
    assert not figure.legends
    assert {"fmn", "pdpgd"} <= labels.keys()
    assert not labels["fmn"].overlaps(labels["pdpgd"])


def test_masking_variants():
    def run(attack, **fields):
        return RunResults(Path("f/r"), make_run(attack, set=fields), {}, (make_record(),), ())

    [group] = group_runs(
        [
            run("alma-prox"),
            run("alma-prox", masking="none"),
            run("alma-prox", masking="fixed", steps=9),
            run("pdpgd"),
            run("x"),
        ]
    )
    found = masking_variants(group)
    assert len(found.runs) == 2
    assert "alma-prox, masking none" in found.runs
    assert "masking" in dict(draw_figures([group]))


def test_axis_ends_at_a_tick():
    sizes = ([], [0.3], [3.99], [17.0], [254.0], [255.0])
    assert [NormAxis.fitting(Unit("linf"), values).end for values in sizes] == [4, 4, 8, 32, 255, 255]
    for values in (*sizes, [0.0], [1e-5], [1.0, float("inf")], [3e5, 7.0]):
        axis = NormAxis.fitting(Unit("l2"), values)
        assert axis.end >= max((value for value in values if value < float("inf")), default=0)
        assert 0 < axis.linear < axis.end
        assert list(axis.ticks) == sorted(set(axis.ticks))
        assert len(axis.ticks) <= 16


def traced(norms, linf=0.01):
    return [make_record(f"i{n}", norm or linf, norm is not None, trace=[(5, 0.2), (20 + n, norm)] if norm else [])
            for n, norm in enumerate(norms)]  # fmt: skip


def test_anytime_figure(tmp_path):
    for attack, norms in (("fmn", [0.01, 0.02]), ("pdpgd", [0.05, 0.1]), ("hopeless", [None, None])):
        make_store(tmp_path, make_run(attack), traced(norms))
    make_store(tmp_path, make_run("from-before"), [make_record("i0"), make_record("i1")])
    figure = dict(draw_figures(group_runs(load_runs([tmp_path]))))["anytime"]
    lines = [line.get_xydata() for line in figure.axes[0].get_lines() if line.get_color() != "#BBBBBB"]
    assert len(lines) == 3
    ends = sorted(line[-1, 1] for line in lines)
    assert ends == pytest.approx([0.01 * 255, 0.05 * 255, 255])
    assert {line[0, 0] for line in lines} == {1, 5}


def test_attacks_that_asked_nothing_can_be_drawn(tmp_path):
    make_store(tmp_path, make_run(), [make_record("void", 0.0, False, trace=[], forwards=0, backwards=0)])
    assert "anytime" in dict(draw_figures(group_runs(load_runs([tmp_path]))))


def test_every_norm_has_its_own_tables_and_figures(segprox, tmp_path):
    records = traced([0.01, 0.02, None] * 2)
    make_store(tmp_path / "in", make_run("fmn"), records)
    for attack in ("ddn", "pdgd"):
        make_store(tmp_path / "in", make_run(attack), records, {"norm": "l2"})
    make_store(tmp_path / "in", make_run("fmn", set={"norm": "l0"}), records, {"norm": "l0"})
    code, output, error = segprox("report", tmp_path / "in", "--out", tmp_path / "out")
    assert (code, error) == (0, "")
    assert "Smallest perturbations, untargeted, l2" in output
    names = {path.stem for path in (tmp_path / "out").rglob("*.*")}
    assert {"norms-untargeted", "norms-untargeted-l2", "summary-l2", "unbroken-l2", "anytime", "anytime-l0"} <= names
    table = named(report_tables(group_runs(load_runs([tmp_path / "in"]))))["summary-l2"]
    assert {row[3] for row in table.rows} == {"ddn", "pdgd"}
    assert "Norms are l2; an image that was not broken counts as infinite." in table.notes
    by_name = dict(zip((column.heading for column in table.columns), table.rows[0]))
    assert (by_name["median"], by_name["mean"]) == (pytest.approx(0.2), float("inf"))
    assert (by_name["low"], by_name["high"]) == (pytest.approx(0.1), float("inf"))
    code, _, error = segprox("compare", *(next((tmp_path / "in").glob(f"*+{name}+*")) for name in ("ddn", "fmn")))
    assert code == 2
    assert "cannot be compared" in error
    code, output, _ = segprox("compare", *(next((tmp_path / "in").glob(f"*+{name}+*")) for name in ("ddn", "pdgd")))
    assert (code, "l2 minus the first's" in " ".join(output.split())) == (0, True)


def test_an_unknown_norm_is_refused(segprox, tmp_path):
    make_store(tmp_path, make_run("fmn"), [make_record()], {"norm": "../l2"})
    code, _, error = segprox("report", tmp_path, "--out", tmp_path / "out")
    assert (code, "'../l2'" in error) == (2, True)


def test_compare_command(segprox, tmp_path):
    make_results(tmp_path / "a", {"fmn": [0.1, 0.2, 0.3]})
    make_results(tmp_path / "b", {"fmn": [0.2, 0.3, 0.4]})
    make_results(tmp_path / "b", {"pdpgd": [0.2]})
    code, output, _ = segprox("compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "out")
    assert code == 0
    assert "+25.50" in output
    assert "0.25" in output
    assert "No difference is shown between m (a) and m (b) (fmn, d, untargeted; p = 0.25)." in output
    assert (tmp_path / "out" / "comparison.tex").exists()
    assert "pdpgd" not in output  # a folder of several: run by run
    single = next((tmp_path / "b").glob("*pdpgd*"))
    code, output, _ = segprox("compare", next((tmp_path / "a").iterdir()), single)
    assert code == 0
    assert "fmn against pdpgd" in output


def test_compare_refuses(segprox, tmp_path):
    make_results(tmp_path / "a", {"fmn": [0.1]})
    make_results(tmp_path / "b", {"pdpgd": [0.1], "fgsm": [0.1]})
    make_store(tmp_path / "c", make_run("fmn"), [make_record("other")])
    for folders, sentence in (("a", "two runs"), ("ab", "no run in common"), ("ac", "no image in common")):
        code, _, error = segprox("compare", *(tmp_path / name for name in folders))
        assert code == 2
        assert sentence in error


def one_run(norms, attack="fmn", model="m", fixed=None, **more):
    header = {} if fixed is None else {"family": "fixed-epsilon", "attack": {"epsilon": fixed}}
    return replace(results_of(norms, attack=attack, model=model, **more), header=header)


def test_compared_numbers():
    first, second = one_run([0.01, 0.02, 0.04, None]), one_run([0.03, 0.02, 0.02, 0.5], model="better")
    (table,) = compare_tables([(first, second)])
    cells = dict(zip((column.heading for column in table.columns), table.rows[0]))
    assert (cells["first against second"], cells["with"], cells["images"]) == ("m against better", "fmn", 4)
    assert (cells["median 1"], cells["median 2"]) == (pytest.approx(0.02 * 255), pytest.approx(0.02 * 255))
    assert cells["ratio"] == pytest.approx((1 + 0.5) / 2)  # of 3, 1, 1/2 and 1/2
    assert cells["difference"] == pytest.approx(-0.01 * 255)  # of 0.02, 0, -0.02 and -0.5
    assert (cells["larger"], cells["smaller"], cells["p-value"]) == (0.25, 0.5, 1.0)
    assert table.notes[0] == "No difference is shown between m and better (fmn, d, untargeted; p = 1)."


@pytest.mark.parametrize("images", [5, 6])
def test_more_robust_is_said_where_the_test_supports_it(images):
    weak, strong = one_run([0.01] * images), one_run([0.02] * images, model="better")
    said = "better is more robust than m" if images == 6 else "No difference is shown between"  # p is 0.031 or 0.063
    for pair in ((weak, strong), (strong, weak)):
        assert compare_tables([pair])[0].notes[0].startswith(said)
    attacks = compare_tables([(weak, one_run([0.02] * images, "pdpgd"))])[0].notes[0]
    assert attacks.startswith("fmn is a stronger attack than pdpgd (m, d" if images == 6 else "No difference is shown")


def test_attacks_within_an_epsilon_are_compared_by_what_they_leave():
    first, second = (one_run([0.01] * 3, "fgsm", model, fixed=0.01) for model in ("m", "better"))
    accuracies = {first: (0.1, 0.2, 0.3), second: (0.3, 0.2, 0.9)}
    pair = [
        replace(run, records=tuple(replace(r, accuracy=a) for r, a in zip(run.records, values)))
        for run, values in accuracies.items()
    ]
    (table,) = compare_tables([(pair[0], pair[1])])
    cells = dict(zip((column.heading for column in table.columns), table.rows[0]))
    assert table.name == "comparison-epsilon"
    assert (cells["median 1"], cells["median 2"], cells["difference"]) == (0.2, 0.3, pytest.approx(0.2))
    assert (cells["larger"], cells["smaller"]) == (pytest.approx(2 / 3), 0)


def test_which_runs_belong_together():
    def titles(first, second):
        return [(one.run.title, other.run.title) for one, other in match_runs(first, second)]

    palma, fmn, aimed = one_run([0.1], "palma"), one_run([0.1]), one_run([0.1], goal="road")
    theirs = [one_run([0.1], attack, "other") for attack in ("fmn", "palma")]
    assert titles([palma, fmn], [fmn, palma]) == [(run.run.title, run.run.title) for run in (palma, fmn)]
    assert titles([palma, fmn], theirs) == [
        (palma.run.title, theirs[1].run.title), (fmn.run.title, theirs[0].run.title)
    ]  # fmt: skip
    # one run for each goal
    assert titles([palma, aimed], [theirs[0], replace(aimed, run=make_run("dag-0.003", goal="road"))]) == [
        ("m | d | palma | untargeted", "other | d | fmn | untargeted"),
        ("m | d | fmn | road", "m | d | dag-0.003 | road"),
    ]
    assert titles([fmn], [one_run([0.1], dataset="moved")]) == [(fmn.run.title, "m | moved | fmn | untargeted")]
    for other in (aimed, one_run([0.1], settings={"threshold": 0.9}), one_run([0.1], fixed=0.01)):
        with pytest.raises(
            SegproxError, match="cannot be compared: goal, threshold, norm and epsilon must be the same"
        ):
            match_runs([fmn], [other])
    with pytest.raises(SegproxError, match="no run in common"):
        match_runs([fmn, palma], [one_run([0.1], "pdpgd"), one_run([0.1], "dag-0.003")])


def test_nothing_in_common_is_refused():
    first, second = results_of([0.1]), replace(results_of([0.1]), records=(make_record("other"),))
    with pytest.raises(SegproxError, match="have no image in common"):
        compare_tables([(first, second)])
    with pytest.raises(SegproxError, match="have no image in common"):
        Results([first]).compare(Results([second]))
