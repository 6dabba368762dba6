"""Saved images of one model, scored on others."""

import json

import pytest
import torch
from torch import nn

import segprox
from segprox import Segmenter, SegproxError
from segprox.report.results import load_runs
from segprox.report.transfer import transfer_tables
from segprox.run.store import stores
from segprox.run.transfer import FILE, read_transferred
from tests.oracles import Linear

WIDTH = 240


def cells(table, attacked):
    """The row of a model that was attacked, by the columns' titles."""
    (row,) = [row for row in table.rows if row[0] == attacked]
    return {column.title: value for column, value in zip(table.columns, row)}


class Brightness(nn.Module):
    """Class 1 where the first channel is above a limit, else class 0; in a third class nothing is."""

    def __init__(self, limit=0.5, classes=2):
        super().__init__()
        self.limit = nn.Parameter(torch.tensor(limit))
        self.classes = classes

    def forward(self, x):
        z = 10 * (x[:, :1] - self.limit)
        return torch.cat([-z, z, *[torch.full_like(z, -50)] * (self.classes - 2)], 1)


@pytest.fixture
def pairs():
    image = torch.full((3, 4, 6), 0.3)
    image[0, :, 3:] = 0.7
    return [(image, (image[0] > 0.5).long())]


@pytest.fixture
def saved(tmp_path, pairs, recwarn):
    """Both models are right about the image; the first takes 0.2 to break, the second 0.1 in one half."""
    network = Brightness(0.52)
    segprox.evaluate(network, pairs, "palma", steps=60, out=tmp_path, save=["float"], progress=False)
    return tmp_path, network


@pytest.fixture
def named(pairs):
    from segprox.run.objects import named_dataset

    with named_dataset(pairs, (255,), None) as name:
        yield name


def test_a_matrix_by_closed_form(saved, named):
    folder, network = saved
    dull = Segmenter(Linear(torch.zeros(2, 3), torch.tensor([1.0, 0.0])))  # class 0, whatever it sees
    (table,) = segprox.transfer(folder, [network, dull]).tables
    (own, other) = [column.heading for column in table.columns if column.over == "APSR"]
    row = cells(table, own)
    record = load_runs([folder])[0].records[0]
    assert row[f"APSR: {own}"] == record.found.apsr == 1
    assert row[f"accuracy left: {own}"] == record.accuracy == 0
    assert (row[f"broken: {own}"], row["images"]) == (1, 1)
    assert row[f"clean accuracy: {other}"] == row[f"accuracy left: {other}"] == row[f"APSR: {other}"] == 0.5
    assert row[f"broken: {other}"] == 0
    assert "labels of the dataset" in table.notes[1]


def test_by_their_own_prediction(saved, named):
    folder, network = saved
    dull = Segmenter(Linear(torch.zeros(2, 3), torch.tensor([1.0, 0.0])))
    (table,) = segprox.transfer(folder, [network, dull], reference="prediction").tables
    *_, other = [column.heading for column in table.columns if column.over == "APSR"]
    row = next(iter(table.rows))
    found = {column.title: value for column, value in zip(table.columns, row)}
    assert found[f"clean accuracy: {other}"] == found[f"accuracy left: {other}"] == 1  # it never changes its mind
    assert found[f"APSR: {other}"] == 0
    assert "relative to the model's own prediction" in table.notes[1]


def test_what_is_kept_is_shown_until_it_is_stale(saved, named, tmp_path):
    folder, network = saved
    segprox.transfer(folder, network)
    (store,) = stores(folder)
    assert [len(entry.images) for entry in read_transferred(store)] == [1]
    results = segprox.load_results(folder)
    page = results.write_report(tmp_path / "report")
    assert "Does it transfer?" in page.read_text()
    assert (tmp_path / "report" / "tables" / "transfer.csv").exists()
    content = json.loads((store.folder / FILE).read_text())
    content[0]["images"][0]["key"] = "of another record"
    (store.folder / FILE).write_text(json.dumps(content))
    (table,) = transfer_tables(load_runs([folder]))
    assert table.rows[0][2:] == (0, None, None, None, None)
    (store.folder / FILE).write_text("{")
    assert transfer_tables(load_runs([folder])) == []


def test_another_model_comes_on_top(segprox_cli, tmp_path):
    out = tmp_path / "runs"
    for model in ("demo-standard", "demo-robust"):
        arguments = ["--model", model, "--attack", "fmn", "--steps", "3", "--limit", "1", "--save", "png", "--out", out]
        assert segprox_cli("evaluate", *arguments)[0] == 0
    code, output, _ = segprox_cli("transfer", out, "--model", "demo-robust")
    assert code == 0
    assert "Transfer: demo, untargeted" in output
    (table,) = transfer_tables(load_runs([out]))
    assert [row[0] for row in table.rows] == ["demo-robust", "demo-standard"]
    for store in stores(out):
        record = next(iter(store.latest().values()))
        found = {entry.model: entry for entry in read_transferred(store)}
        assert found.keys() == {"demo-standard", "demo-robust"}
        assert found[store.run.model].images[0].apsr == record.saved["png"].score.apsr
    assert segprox_cli("report", out, "--out", tmp_path / "report")[0] == 0


class Coin(Brightness):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


def test_refusals(segprox_cli, tmp_path):
    def evaluate(folder, *more):
        return segprox_cli("evaluate", "--model", "demo-standard", "--attack", "fmn", "--steps", "2", "--limit", "1",
                           *more, "--out", folder)  # fmt: skip

    plain, aimed, kept = tmp_path / "plain", tmp_path / "aimed", tmp_path / "kept"
    assert evaluate(plain)[0] == evaluate(aimed, "--target", "road", "--save", "float")[0] == 0
    assert evaluate(kept, "--save", "float")[0] == 0
    few = Segmenter(Brightness())
    for folder, model, options, message in [
        (plain, few, {}, "nothing is saved in"),
        (aimed, few, {}, "has 2 classes that are not the 8 of demo: what road wants means nothing to it"),
        (kept, few, {"reference": "labels"}, "it can be measured by its own prediction only"),
        (kept, few, {"reference": "nothing"}, "reference must be labels or prediction but is 'nothing'"),
        (kept, Segmenter(Coin()), {}, "answers differently twice: only runs with samples"),
        (kept, "no-such", {}, "there is no model 'no-such'"),
    ]:
        with pytest.raises(SegproxError, match=message):
            segprox.transfer(folder, model, **options)
    (table,) = segprox.transfer(kept, few).tables  # by its own prediction
    assert "own prediction of the clean image, for: Brightness-" in table.notes[1]
    code, _, error = segprox_cli("transfer", kept, "--model", "demo-robust", "--reference", "nothing")
    assert (code, "reference must be" in error) == (2, True)
