"""`segprox.evaluate` and what it returns, against records and computations by other means."""

import builtins
import dataclasses
import math

import matplotlib as mpl
import numpy as np
import pytest
import torch

import segprox
from segprox import SegproxError
from segprox.attacks import Bisection, Fmn, Palma, Pgd
from segprox.encoding import decode
from segprox.report.contents import report_tables
from segprox.report.curves import epsilon_curve
from segprox.report.evaluation import Results, load_results
from segprox.report.figures import draw_figures
from segprox.report.groups import group_runs
from segprox.report.metrics import pixel_accuracy
from segprox.run.objects import ItemDataset, describe_entry
from segprox.run.record import Score, same
from tests.records import make_record, make_run, make_store

mpl.use("agg")


def network(channels=8):
    torch.manual_seed(0)
    return torch.nn.Conv2d(3, channels, 3, padding=1)


def pairs(count=3, size=12):
    source = torch.Generator().manual_seed(1)
    return [
        (torch.rand(3, size, size, generator=source), torch.randint(0, 8, (size, size), generator=source))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def found():
    return segprox.evaluate(
        "demo-standard", "demo", ["palma", "fmn"], goals=["untargeted", "road"], limit=2, steps=15, progress=False
    )


def run(**options):
    return segprox.evaluate(network(), pairs(), **{"attacks": "fmn", "steps": 5, "progress": False} | options)


# --- what can be evaluated --------------------------------------------------------------------------------------------
def test_names_give_the_records_of_the_command_line(segprox_cli, tmp_path):
    here = segprox.evaluate("demo-standard", "demo", "fmn", limit=2, steps=3, out=tmp_path / "a", progress=False)
    arguments = ("--model", "demo-standard", "--attack", "fmn", "--steps", 3, "--limit", 2, "--log", "quiet")
    assert segprox_cli("evaluate", *arguments, "--out", tmp_path / "b")[0] == 0
    there = segprox.load_results(tmp_path / "b")
    assert here[0].folder.name == there[0].folder.name
    assert all(same(*both) for both in zip(here[0].records, there[0].records, strict=True))


def test_a_network_is_left_as_it_was_found():
    model = network().train()
    results = segprox.evaluate(model, pairs(), "fmn", steps=3, progress=False)
    assert len(results[0].records) == 3
    assert model.training
    assert model.weight.requires_grad


def test_objects_give_what_an_attack_on_them_gives():
    model, data, attack = network(), pairs(), Palma(steps=8)
    (result,) = segprox.evaluate(model, data, attack, progress=False)
    for record, (image, label) in zip(result.records, data, strict=True):
        assert record.norm == attack(model, image[None], label[None]).norm.item()


def test_loaders_and_torch_datasets_are_read_alike():
    stacked = torch.utils.data.TensorDataset(*(torch.stack(part) for part in zip(*pairs())))
    loader = torch.utils.data.DataLoader(stacked, batch_size=2)
    samples = [segprox.Sample(str(i), *pair) for i, pair in enumerate(pairs())]
    dicts = [{"image": image, "label": label} for image, label in pairs()]
    expected = [record.norm for record in run()[0].records]
    for data in (stacked, loader, iter(pairs()), samples, dicts):
        (result,) = segprox.evaluate(network(), data, "fmn", steps=5, progress=False)
        assert [record.norm for record in result.records] == expected
    (result,) = segprox.evaluate(network(), loader, "fmn", steps=5, limit=1, progress=False)
    assert len(result.records) == 1


def test_sequences_are_read_when_they_are_needed():
    class Counting(list):
        read = 0

        def __getitem__(self, index):
            Counting.read += 1
            return super().__getitem__(index)

    data = Counting(pairs(50))
    segprox.evaluate(network(), data, "fmn", steps=2, limit=2, progress=False)
    assert Counting.read < 6


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ((torch.rand(3, 4, 4),), "must be (image, label)"),
        ((torch.rand(3, 4, 4), torch.zeros(4, 5)), "the shapes [3, 4, 4] and [4, 5]"),
        ((torch.rand(4, 4), torch.zeros(4, 4)), "the shapes [4, 4] and [4, 4]"),
    ],
)
def test_items_that_are_no_pairs_are_recorded_as_errors(item, message):
    (result,) = segprox.evaluate(network(), [item, pairs()[0]], "fmn", steps=2, progress=False)
    assert len(result.records) == 1
    assert message in result.errors[0].reason


def test_an_interrupted_evaluation_of_objects_goes_on(tmp_path, monkeypatch):
    first = run(out=tmp_path, limit=2)
    calls, attack = [], Fmn.run
    monkeypatch.setattr(Fmn, "run", lambda *a, **k: calls.append(1) or attack(*a, **k))
    again = run(out=tmp_path, limit=2)
    assert calls == []
    assert again[0].records == first[0].records
    assert len(run(out=tmp_path, limit=3)[0].records) == 3
    assert calls == [1]
    assert segprox.load_results(tmp_path)[0].records[:2] == first[0].records


def test_nothing_is_left_behind():
    before = segprox.list_models(), segprox.list_datasets()
    run()
    assert (segprox.list_models(), segprox.list_datasets()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 2}, "several workers need a model and a dataset that have names"),
        ({"goals": "elephant"}, "there is no class 'elephant'"),
        ({"attacks": "no-such"}, "there is no attack 'no-such'"),
        ({"limit": 0}, "limit of an evaluation cannot be 0"),
        ({"device": "cuda:77"}, "device 'cuda:77' cannot be used"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(SegproxError, match=message):
        run(**options)


@pytest.mark.parametrize(
    "attack",
    [
        Palma(steps=7, bits=8), Pgd(objective="dlr", steps=3), Pgd(steps=20, step_size=0.32, random_start=True),
        Bisection(attack=Pgd(steps=3, momentum=1.0), rounds=2, keep="smallest-radius"), segprox.make_attack("segpgd"),
    ],
)  # fmt: skip
def test_an_attack_is_described_by_what_makes_it_again(attack):
    assert describe_entry(attack).make() == attack


def test_a_bar_is_shown(capsys):
    run(progress=True)
    assert "3/3" in capsys.readouterr().out


# --- what was found ---------------------------------------------------------------------------------------------------
def test_rows_are_the_records(found):
    rows = found.rows()
    assert len(rows) == 8
    assert {(row["goal"], row["attack"]) for row in rows} == {
        (goal, attack) for goal in ("untargeted", "road") for attack in ("palma", "fmn")
    }
    row, record = rows[0], found[0].records[0]
    assert (row["image"], row["norm"], row["broken"]) == (record.image, record.norm, record.found.success)
    frame = found.to_pandas()
    assert frame.shape == (8, len(row))
    assert frame["norm"].tolist() == [row["norm"] for row in rows]


def test_without_pandas_the_way_out_is_told(found, monkeypatch):
    real = builtins.__import__

    def absent(name, *arguments, **options):
        if name.split(".")[0] == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name="pandas")
        return real(name, *arguments, **options)

    monkeypatch.setattr("segprox.optional.import_module", absent)
    with pytest.raises(SegproxError, match=r"pip install 'segprox\[pandas\]'"):
        found.to_pandas()


def test_the_best_of_all_attacks(found):
    chosen = found.only(goal="untargeted")
    expected = {}
    for row in chosen.rows():
        norm = row["linf"] if row["broken"] else math.inf
        expected[row["image"]] = min(norm, expected.get(row["image"], math.inf))
    assert chosen.best() == pytest.approx(expected)
    curve = chosen.curve()
    for size in (0.0, 0.005, 0.01, 0.05, 1.0):
        assert curve.at(size) == np.mean([norm > size for norm in expected.values()])


def test_accuracy_is_that_of_the_strongest_attack(found):
    chosen = found.only(goal="untargeted")
    assert chosen.accuracy(0.0) == pytest.approx(0.9953, abs=1e-4)
    single = [chosen.only(attack=name).accuracy(0.03) for name in ("palma", "fmn")]
    assert chosen.accuracy(0.03) == min(single)
    assert chosen.miou(1.0) < chosen.miou(0.0)


def test_what_needs_one_group_says_which_there_are(found):
    for ask in (found.best, found.curve, lambda: found.accuracy(0.1)):
        with pytest.raises(SegproxError, match=r"needs one model, dataset, goal and norm, but there are: .*road"):
            ask()
    with pytest.raises(SegproxError, match="there is no run with attack 'pgd'; there are: demo-standard"):
        found.only(attack="pgd")


def test_the_summary_prints_and_renders(found):
    summary = found.summary()
    assert str(summary) == repr(summary)
    assert "What each attack found" in str(summary)
    page = found._repr_html_()
    assert page.count("<table>") == page.count("</table>") == 2
    assert repr(found) == "Results(4 runs, 8 attacked images)"
    assert repr(found[:2]) == "Results(2 runs, 4 attacked images)"
    assert isinstance(found[1:], Results)


def test_hostile_names_are_text_in_html():
    results = run()
    hostile = dataclasses.replace(results[0].run, model="<script>alert(1)</script>")
    page = Results([dataclasses.replace(results[0], run=hostile)])._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_plots_take_axes_and_return_them(found):
    from matplotlib import pyplot

    axes = pyplot.subplots()[1]
    assert found.plot(axes) is axes
    assert len(axes.get_lines()) == 4
    x, y = axes.get_lines()[0].get_data()
    assert y[0] == 1.0
    assert x.max() <= 255
    assert len(found.plot().get_lines()) == 4
    pyplot.close("all")


def test_a_report(tmp_path):
    results = run(out=tmp_path / "runs")
    page = results.write_report(tmp_path / "report")
    assert page == tmp_path / "report" / "index.html"
    assert page.stat().st_size > 10_000
    assert list((tmp_path / "report" / "tables").iterdir())


def test_item_datasets_say_what_they_are():
    data = ItemDataset(pairs(), (255, 0), None)
    assert (len(data), data.ignore, data.labelled, data.classes, len(data.palette)) == (3, (255, 0), True, (), 256)


# --- one number, one definition ---------------------------------------------------------------------------------------
def test_one_median_everywhere(segprox_cli, tmp_path, monkeypatch):
    """Of two images one is not broken: the median is the size that breaks the other."""
    whole, calls = Palma.run, []

    def only_the_first(self, model, problem, *arguments, **options):
        calls.append(1)
        found = whole(self, model, problem, *arguments, **options)
        clean = {"images": problem.images, "norm": 0 * found.norm, "success": ~found.success}
        return found if len(calls) == 1 else dataclasses.replace(found, **clean)

    monkeypatch.setattr(Palma, "run", only_the_first)
    results = segprox.evaluate(
        "demo-standard", "demo", "palma", limit=2, steps=60, out=tmp_path / "runs", save=["float"], progress=False
    )
    broken = [record.found.linf for record in results[0].records if record.found.success]
    assert len(broken) == 1
    size = f"{255 * broken[0]:.2f}"
    short = f"{255 * broken[0]:.1f}/255"
    assert f" {size} " in str(results.summary())
    assert short in segprox_cli("runs", tmp_path / "runs")[1]
    assert f"{255 * broken[0]:.3f}" in segprox_cli("verify", tmp_path / "runs")[1]
    output = segprox_cli("report", tmp_path / "runs", "--out", tmp_path / "report")[1]
    assert f" {size} " in output
    assert f" {size} " in (tmp_path / "report" / "tables" / "norms-untargeted.md").read_text().replace("*", " ")
    page = (tmp_path / "report" / "index.html").read_text()
    assert f">{255 * broken[0]:.2f}<" in page or short in page


# --- the result of one attack -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def attacked():
    images, labels = (torch.stack(part) for part in zip(*pairs()))
    return segprox.attack(network(), images, labels, "fmn", steps=20)


def test_a_result_is_short_to_read(attacked):
    assert repr(attacked).startswith(f"AttackResult({int(attacked.success.sum())} of 3 broken, norms 0.")
    assert len(repr(attacked)) < 120
    assert len(attacked) == 3


def test_a_result_moves_between_devices(attacked):
    moved = attacked.to("meta")
    assert {value.device.type for value in vars(moved).values() if isinstance(value, torch.Tensor)} == {"meta"}
    assert moved.traces == attacked.traces
    assert torch.equal(attacked.to("cpu").images, attacked.images)


def test_saved_images_are_what_they_were(attacked, tmp_path):
    files = attacked.save(tmp_path / "new" / "folder")
    assert [file.name for file in files[:2]] == ["000000.safetensors", "000000.png"]
    for i, image in enumerate(attacked.images):
        assert torch.equal(decode("float", files[2 * i].read_bytes()), image)
        assert torch.equal(decode("png", files[2 * i + 1].read_bytes()), (image * 255).round() / 255)
    assert attacked.save(tmp_path, names=["a", "b", "c"])[0] == tmp_path / "a.safetensors"


def test_a_result_can_be_drawn(attacked):
    figure = attacked.plot(1)
    assert [axes.get_title().split(",")[0] for axes in figure.axes] == ["original", "perturbation", "adversarial"]
    shown = figure.axes[1].get_images()[0].get_array()
    assert 0 <= shown.min() <= shown.max() <= 1


def test_fixed_epsilon_attacks_are_told_in_their_own_terms(segprox_cli, tmp_path):
    results = segprox.evaluate(
        "demo-standard", "demo", ["fmn", "fgsm", segprox.make_attack("fgsm", epsilon="2/255")], limit=2,
        max_queries=80, out=tmp_path, progress=False,
    )  # fmt: skip
    fixed = results.only(attack="fgsm")
    assert sorted(run.header["attack"]["epsilon"] for run in fixed) == pytest.approx([2 / 255, 8 / 255])
    tables = {table.name: table for table in report_tables(group_runs(results.runs))}
    assert [row[3] for row in tables["summary"].rows] == ["fmn"]
    assert [row[0] for row in tables["norms-untargeted"].rows] == ["fmn"]
    by_epsilon = {round(row[6]): row for row in tables["fixed-epsilon"].rows}
    assert set(by_epsilon) == {2, 8}
    for epsilon, row in by_epsilon.items():
        (run,) = (run for run in fixed if run.header["attack"]["epsilon"] == pytest.approx(epsilon / 255))
        right = sum(sum(record.counts.tp) for record in run.records)
        assert row[9] == pytest.approx(right / sum(record.counted for record in run.records))
        assert row[7] == sum(record.found.success for record in run.records) / 2
    curve = epsilon_curve(group_runs(fixed.runs)[0].by_epsilon["fgsm"], pixel_accuracy)
    assert curve.x.tolist() == pytest.approx([0, 2 / 255, 8 / 255])
    assert curve.y.tolist() == pytest.approx([by_epsilon[2][8], by_epsilon[2][9], by_epsilon[8][9]])
    figures = dict(draw_figures(group_runs(results.runs)))
    (panel,) = figures["accuracy"].axes
    (dots,) = (line for line in panel.lines if line.get_marker() == "o")
    assert list(dots.get_xdata()) == pytest.approx([0, 2, 8])
    assert list(dots.get_ydata()) == curve.y.tolist()
    (panel,) = figures["unbroken"].axes
    assert [text.get_text() for text in panel.texts[1:]] == ["fmn"]  # after the panel's title
    output = segprox_cli("runs", tmp_path)[1]
    assert f"{by_epsilon[2][9]:.1%} right at 2.0/255" in output
    assert "255/255   " not in output.split("A median is")[0]
    assert "What is left within epsilon" in str(results.summary())
    assert "fixed-epsilon" not in {table.name for table in report_tables(group_runs(results.only(attack="fmn").runs))}


def test_what_was_reached_on_unbroken_images(segprox_cli, tmp_path):
    held = [Score(linf=size / 255, l2=1, l1=1, apsr=apsr, success=False) for size, apsr in ((2.9, 0.976), (3.1, 0.9))]
    records = [make_record(f"i{k}", 0.01, False, found=score, accuracy=0.024) for k, score in enumerate(held)]
    make_store(tmp_path, make_run(), [*records, make_record("c", 0.5)])
    (table,) = (table for table in load_results(tmp_path).summary().tables if table.name == "summary")
    assert [column.heading for column in table.columns[-3:]] == ["unbroken: APSR", "at", "accuracy"]
    assert table.rows[0][-3:] == pytest.approx((0.938, 3.0, 0.024))
    output = segprox_cli("runs", tmp_path)[1]
    assert "m | d | fmn | untargeted: APSR 93.8% at 3.0/255 on the 2 not broken" in output
