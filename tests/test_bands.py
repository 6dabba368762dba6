"""Images of any number of bands, 16 bits or floats: read, attacked, rounded, saved and shown as they are."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import segprox
from segprox import Bands, Problem, Segmenter, SegproxError
from segprox.bands import EIGHT_BIT, read_range
from segprox.data import load_dataset
from segprox.data.arrays import read_array, resize_array
from segprox.encoding import decode, encode, file_kinds
from segprox.models import load_model
from segprox.report.contents import report_tables
from segprox.report.evaluation import load_results
from segprox.report.groups import group_runs
from segprox.report.units import Unit
from segprox.run.preview import decode_preview, encode_preview

tifffile = pytest.importorskip("tifffile")
SIX = np.random.default_rng(0).uniform(0, 1.27, (6, 16, 24)).astype(np.float32)
WHOLE = np.random.default_rng(1).integers(0, 65536, (6, 16, 24)).astype(np.uint16)
NETWORK = """
import torch
def network():
    torch.manual_seed(0)
    return torch.nn.Conv2d({channels}, {classes}, 3, padding=1)
"""


@pytest.fixture
def tiles(tmp_path):
    """A folder of two 6-band float TIFFs with labels of two classes."""
    for name in ("images", "labels"):
        (tmp_path / "tiles" / name).mkdir(parents=True)
    for i in range(2):
        tifffile.imwrite(tmp_path / f"tiles/images/t{i}.tif", np.roll(SIX, i, 2), photometric="minisblack")
        Image.fromarray((SIX[i] > 0.6).astype(np.uint8)).save(tmp_path / f"tiles/labels/t{i}.png")
    (tmp_path / "net.py").write_text(NETWORK.format(channels=6, classes=2))
    return tmp_path / "tiles"


def write_png16(path, values):
    path.write_bytes(pytest.importorskip("imagecodecs").png_encode(np.ascontiguousarray(values)))


@pytest.mark.parametrize(
    ("name", "write", "expected"),
    [
        ("a.npy", lambda path: np.save(path, SIX), SIX),
        ("a.npy", lambda path: np.save(path, SIX.transpose(1, 2, 0)), SIX),
        ("a.npy", lambda path: np.save(path, SIX[0]), SIX[:1]),
        ("a.npz", lambda path: np.savez(path, SIX), SIX),
        ("a.npz", lambda path: np.savez_compressed(path, image=WHOLE, label=WHOLE[0]), WHOLE),
        ("a.tif", lambda path: tifffile.imwrite(path, SIX, photometric="minisblack"), SIX),  # pages
        ("a.tif", lambda path: tifffile.imwrite(path, SIX, photometric="minisblack", planarconfig="separate"), SIX),
        ("a.tiff", lambda path: tifffile.imwrite(path, WHOLE.transpose(1, 2, 0), photometric="rgb"), WHOLE),
        ("a.tif", lambda path: tifffile.imwrite(path, SIX[:, :4, :4], photometric="minisblack"), SIX[:, :4, :4]),
        ("a.tif", lambda path: tifffile.imwrite(path, WHOLE[0], compression="lzw"), WHOLE[:1]),
        ("a.png", lambda path: Image.fromarray(WHOLE[0]).save(path), WHOLE[:1]),
        ("a.png", lambda path: write_png16(path, WHOLE[:3].transpose(1, 2, 0)), WHOLE[:3]),
        ("a.png", lambda path: Image.fromarray((WHOLE[0] >> 8).astype(np.uint8)).save(path), WHOLE[:1] >> 8),
    ],
)
def test_every_format_is_read_as_it_is_stored(tmp_path, name, write, expected):
    write(tmp_path / name)
    found = read_array(tmp_path / name)
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)
    high = 1.5 if found.dtype == np.float32 else 65535
    sample = segprox.load_dataset(f"images:{tmp_path}", range=(0, high))[0]
    assert sample.image.dtype == torch.float32
    assert np.allclose(sample.image.numpy() * high, expected, rtol=1e-6, atol=1e-7 * high)


def test_pages_that_were_appended_are_bands_and_smaller_versions_are_not(tmp_path):
    with tifffile.TiffWriter(tmp_path / "pages.tif") as file:
        for plane in SIX:
            file.write(plane, photometric="minisblack", contiguous=False)
    assert np.array_equal(read_array(tmp_path / "pages.tif"), SIX)
    with tifffile.TiffWriter(tmp_path / "overview.tif") as file:
        file.write(SIX.transpose(1, 2, 0), photometric="minisblack", planarconfig="contig", metadata=None)
        file.write(SIX.transpose(1, 2, 0)[::2, ::2], photometric="minisblack", subfiletype=1, metadata=None)
    assert np.array_equal(read_array(tmp_path / "overview.tif"), SIX)


def test_each_band_is_mapped_by_its_own_range(tmp_path):
    np.save(tmp_path / "a.npy", np.stack([np.full((4, 8), 0.3), np.full((4, 8), 290.0)]))
    data = segprox.load_dataset(f"images:{tmp_path}?range=0:1.5,250:330")
    assert data[0].image.flatten(1).unique(dim=1).flatten().tolist() == pytest.approx([0.2, 0.5])
    assert data.bands == Bands(((0, 1.5), (250, 330)), whole=False, declared=True)


@pytest.mark.parametrize(
    ("values", "options", "reason"),
    [
        (SIX, "", r"a\.npy holds 6 bands of float32 from .* to 1\.2.*: declare which values are possible"),
        (WHOLE, "", r"holds 6 bands of uint16 from \d+ to \d+: declare which"),
        (SIX * np.nan, "", "that are all NaN or infinite"),
        (SIX, "?range=0,1", r"band 1 of .*a\.npy reaches from .* to 1\.2.*, which is not within .* of 0 to 1:"),
        (SIX, "?range=0:2,0:2,0:1,0:2,0:2,0:2", "band 3 of image .* such as 0:1.2"),
        (np.where(SIX > 1, np.nan, SIX), "?range=0,2", "band 1 of .* is NaN or infinite at .*: declare nodata=nan"),
        (SIX, "?range=0:2,0:2", "has 6 bands but range= declares 2"),
        (SIX, "?range=0,2&bands=7,1,2", "has 6 bands, so bands= cannot name band 7"),
        (SIX > 1, "?range=0,1", "holds bool, not whole numbers or floats"),
        (SIX[None], "?range=0,2", r"has the shape \[1, 6, 16, 24\]"),
        (SIX[:, :, :6], "?range=0,2", "which axis of image .* are its bands"),
        (SIX, "?bands=1,2,3", "bands can only be given beside range="),
        (SIX, "?range=0,2&bands=1,2", "bands of images cannot be .* one band, or three"),
        (SIX, "?range=0,2&bands=0", "bands of images cannot be"),
        (SIX, "?range=2,0", "range of images cannot be .* lowest and its highest"),
        (SIX, "?range=0,inf", "range of images cannot be"),
        (SIX, "?range=1", "range of images cannot be"),
        (SIX, "?range=0,2&nodata=0&size=8x8", "size=8x8 would mix pixels"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path, values, options, reason):
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(SegproxError, match=reason):
        segprox.load_dataset(f"images:{tmp_path}{options}")[0]


def test_floats_among_whole_numbers_are_an_error_of_their_image(tmp_path):
    np.save(tmp_path / "a.npy", WHOLE)
    np.save(tmp_path / "b.npy", SIX)
    data = segprox.load_dataset(f"images:{tmp_path}?range=0,65535")
    assert data.bands.steps == 65535
    with pytest.raises(SegproxError, match="holds float32 but others hold whole numbers"):
        data[1]


def test_damaged_files_are_refused_and_the_next_one_tells_what_values_are(tmp_path):
    for name in ("a.npy", "a2.npz", "b.tif", "c.png"):
        (tmp_path / name).write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(30))
        with pytest.raises(SegproxError, match=r"cannot read .* as an image"):
            read_array(tmp_path / name)
    (tmp_path / "arrays").mkdir()
    (tmp_path / "arrays" / "a.npy").write_bytes(b"nothing")
    np.save(tmp_path / "arrays" / "b.npy", SIX)
    assert not segprox.load_dataset(f"images:{tmp_path}/arrays?range=0,1.5").bands.whole


def test_resized_bands_keep_their_mean_and_whole_numbers_stay_whole():
    assert resize_array(SIX, "12x8").shape == (6, 8, 12)
    assert resize_array(SIX, "12x8").mean() == pytest.approx(SIX.mean(), rel=0.02)
    assert resize_array(WHOLE, "12x8").dtype == np.uint16


def test_eight_bit_images_are_rounded_as_ever():
    images = torch.cat([torch.rand(2, 3, 32, 32), (torch.arange(3072) / 6 / 255).clamp(max=1).view(1, 3, 32, 32)])
    for kind in (images, images.double()):
        expected = kind.mul(255).round().clamp(0, 255).to(torch.uint8).to(kind) / 255
        assert torch.equal(EIGHT_BIT.rounded(kind), expected)


@pytest.mark.parametrize(
    ("bands", "steps", "dtype"),
    [
        (Bands(), 255, "uint8"),
        (Bands(((0, 65535),)), 65535, "uint16"),
        (Bands(((0, 10000),)), 10000, "uint16"),
        (Bands(((-100, 100),)), 200, "int16"),
        (Bands(((0, 10), (0, 20), (0, 30))), None, "uint8"),
        (Bands(((0, 1.5),), whole=False), None, "float32"),
    ],
)
def test_rounding_knows_the_depth(bands, steps, dtype):
    image = torch.rand(3, 9, 7)
    stored, again = bands.stored(image), bands.rounded(image[None])[0]
    widths = torch.tensor([high - low for low, high in bands.range]).view(-1, 1, 1)
    assert (bands.steps, str(stored.dtype)) == (steps, dtype)
    assert ((again - image).abs() * widths <= (0.5 + 1e-3 if bands.whole else 1e-6)).all()
    assert torch.equal(bands.rounded(again[None])[0], again)


@pytest.mark.parametrize(
    ("bands", "channels", "kinds"),
    [
        (Bands(), 3, ["float", "png"]), (Bands(), 1, ["float", "png"]), (Bands(), 6, ["float", "npy"]),
        (Bands(((0, 65535),)), 1, ["float", "png"]), (Bands(((0, 65535),)), 3, ["float", "npy"]),
        (Bands(((0, 1.5),), whole=False), 6, ["float", "npy"]),
    ],
)  # fmt: skip
def test_saved_images_come_back(bands, channels, kinds):
    image = torch.rand(channels, 5, 7)
    assert file_kinds(["preview", "png", "float"], channels, bands) == kinds
    assert torch.equal(decode("float", encode("float", image, bands), bands), image)
    again = decode(kinds[1], encode(kinds[1], image, bands), bands)
    assert torch.allclose(again, bands.rounded(image[None])[0], atol=1e-7)


def test_the_network_gets_values_in_the_range():
    seen = []

    class Seen(nn.Module):
        def forward(self, x):
            seen.append(x)
            return x[:, :2]

    images = torch.rand(1, 3, 4, 4)
    Segmenter(Seen(), range=((0, 1.5), (250, 330), (-1, 1)), mean=(1, 2, 3), std=(2, 2, 2)).logits(images)
    low, high = torch.tensor([0.0, 250, -1]).view(3, 1, 1), torch.tensor([1.5, 330, 1]).view(3, 1, 1)
    expected = (low + images * (high - low) - torch.tensor([1.0, 2, 3]).view(3, 1, 1)) / 2
    assert torch.allclose(seen[0], expected, atol=1e-4)


def test_ranges_of_model_and_dataset(tiles):
    data, name = segprox.load_dataset(f"folder:{tiles}?range=0,1.5"), f"python:{tiles.parent}/net.py:network"
    assert load_model(name, bands=data.bands).range == ((0, 1.5),)
    assert load_model(f"{name}?range=0,1", bands=data.bands).range == ((0, 1),)
    assert load_model(name).range is None
    with pytest.raises(SegproxError, match=r"expects values in 0\.\.255 but the dataset declares range="):
        load_model(f"{name}?scale_255=true", bands=data.bands)
    with pytest.raises(SegproxError, match="a range for 2 bands but the dataset's is for 3"):
        load_model(f"{name}?range=0:1,0:1", bands=Bands(((0, 1),) * 3, declared=True))
    with pytest.raises(SegproxError, match="images have 6 bands but range of the model is for 2"):
        load_model(f"{name}?range=0:1,0:1")(data[0].image[None])
    with pytest.raises(SegproxError, match="both say what the network expects"):
        load_model(f"{name}?range=0,1&scale_255=true")
    with pytest.raises(SegproxError, match="range cannot be"):
        read_range("a,b")


@pytest.mark.parametrize("attack", ["palma", "alma-prox", "pgd", "fmn", "ddn", "dag-0.003", "bisect:fgsm"])
def test_pixels_without_data_never_change(attack):
    torch.manual_seed(0)
    model, images = Segmenter(nn.Conv2d(4, 3, 3, padding=1)), torch.rand(2, 4, 12, 12)
    fixed = torch.zeros(2, 12, 12, dtype=torch.bool)
    fixed[:, :3] = True
    labels = model(images).argmax(1).masked_fill(fixed, 255)
    fields = {"epsilon": 0.5} if attack == "pgd" else {}
    problem = Problem.build(images, labels, fixed=fixed)
    found = segprox.make_attack(attack, **fields, **({} if ":" in attack else {"steps": 25})).run(model, problem)
    changed = (found.images != images).any(1)
    assert not changed[fixed].any()
    assert changed[~fixed].any()
    assert found.apsr.min() > 0
    assert problem.select([1]).fixed.shape == (1, 12, 12)


@pytest.mark.parametrize(("nodata", "filled"), [("nan", 0.0), ("-9999", 0.0), ("0.75", 0.5)])
def test_declared_nodata_is_ignored_and_filled(tmp_path, nodata, filled):
    values = SIX.copy()
    values[2, :4] = float(nodata)
    np.save(tmp_path / "a.npy", values)
    data = segprox.load_dataset(f"images:{tmp_path}?range=0,1.5&nodata={nodata}")
    _, image, label = data[0]
    assert (image[2, :4] == filled).all()
    assert (label[:4] == label[0, 0]).all()
    assert label[0, 0] in data.ignore
    assert label[0, 0] != label[5, 0]


def test_a_run_on_floats_rounds_nothing_and_says_so(tiles, monkeypatch, segprox):
    monkeypatch.chdir(tiles.parent)
    values = SIX.copy()
    values[0, :2] = np.nan
    tifffile.imwrite("tiles/images/t0.tif", values, photometric="minisblack")
    dataset, model = "folder:tiles?range=0,1.5&bands=4,3,2&nodata=nan&classes=2", "python:net.py:network"
    common = ["--model", model, "--dataset", dataset]
    shown = ""
    for command in (
        ["check", *common],
        ["evaluate", *common, "--attack", "palma", "--steps", "15", "--out", "out", "--save", "png", "--save", "float"],
        ["verify", "out"],
        ["report", "out", "--out", "report"],
    ):
        code, output, errors = segprox(*command)
        assert code == 0, errors
        shown += output
    assert "% of the range" in shown
    assert "/255" not in shown
    (run,) = (path.parent for path in (tiles.parent / "out").glob("*/run.json"))
    header = json.loads((run / "run.json").read_text())
    assert header["values"] == {"range": [[0.0, 1.5]], "whole": False, "shown": [4, 3, 2], "declared": True}
    for line in (run / "records.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["rounded"] is None
        assert sorted(record["saved"]) == ["float", "npy"]
        saved = np.load(run / record["saved"]["npy"]["file"])
        before = load_dataset(dataset)[int(record["image"][1])]
        change = np.abs(saved - before.image.numpy() * 1.5)
        assert change.max() == pytest.approx(1.5 * record["saved"]["npy"]["score"]["linf"], rel=1e-4)
        assert saved.dtype == np.float32
        if record["image"] == "t0":
            assert change[:, :2].max() < 1e-6
            assert change[:, 2:].max() > 1e-3
    tables = {path.stem: path.read_text() for path in (tiles.parent / "report" / "tables").glob("*.md")}
    assert "summary-range" in tables
    assert not any("8 bits" in text or "255" in text or "ounded" in text for text in tables.values())
    page = (tiles.parent / "report" / "index.html").read_text()
    assert "% of the range" in page
    assert not {"broken_8bit", "broken_rounded"} & set(load_results("out").rows()[0])


def test_a_run_on_16_bits_rounds_to_16_bits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiles").mkdir()
    Image.fromarray(WHOLE[0]).save(tmp_path / "tiles" / "a.png")
    (tmp_path / "net.py").write_text(NETWORK.format(channels=1, classes=3))
    dataset = "images:tiles?range=0,65535"
    results = segprox.evaluate(
        "python:net.py:network?range=0,1", dataset, [segprox.Palma(steps=30, bits=16)], out="out", save=["png"],
        progress=False,
    )  # fmt: skip
    (record,) = results.runs[0].records
    assert record.rounded == record.found  # it searched among them
    assert record.found.linf * 65535 == pytest.approx(round(record.found.linf * 65535), abs=0.01)
    assert list(record.saved) == ["png"]
    assert "broken_rounded" in results.rows()[0]
    assert results.runs[0].unit == Unit("linf", eight_bit=False)
    assert "rounded-range" in {table.name for table in report_tables(group_runs(results.runs))}


@pytest.mark.parametrize(
    ("values", "options", "attack", "reason"),
    [
        (SIX, "range=0,1.5", "palma-8bit", "palma-8bit rounds values to 255 steps but .* holds floats: take an attack"),
        (SIX, "range=0,1.5", "ddn", "ddn rounds values to 255 steps but .* holds floats"),
        (WHOLE, "range=0,65535", "palma-8bit", "has 65535: set bits=16"),
        (WHOLE // 8, "range=0,10000", "palma-8bit", "has 10000: take an attack that does not round"),
    ],
)
def test_attacks_that_round_otherwise_are_refused(tmp_path, values, options, attack, reason):
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(SegproxError, match=reason):
        segprox.evaluate(nn.Conv2d(6, 2, 1), f"images:{tmp_path}?{options}", attack, progress=False)


def test_networks_are_fed_the_range_that_the_dataset_declares(tiles):
    network = nn.Conv2d(6, 2, 1)
    dataset = segprox.load_dataset(f"folder:{tiles}?range=0,1.5&classes=2")
    (record, _) = segprox.evaluate(network, dataset, "fgsm", progress=False).runs[0].records
    sample = dataset[0]
    right = network(sample.image[None] * 1.5).argmax(1)[0] == sample.label
    assert record.clean_accuracy == pytest.approx(right.double().mean().item())


def test_pairs_with_bands_are_shares_of_their_range():
    class Tiles(torch.utils.data.Dataset):
        bands = Bands(((0, 1.5),), whole=False, declared=True)

        def __len__(self):
            return 1

        def __getitem__(self, index):
            generator = torch.Generator().manual_seed(index)
            image = torch.rand(6, 8, 8, generator=generator)
            return image, torch.randint(0, 2, (8, 8), generator=generator)

    network, (image, label) = nn.Conv2d(6, 2, 1), Tiles()[0]
    results = segprox.evaluate(network, Tiles(), "fgsm", progress=False)
    right = network(image[None] * 1.5).argmax(1)[0] == label
    assert results.runs[0].records[0].clean_accuracy == pytest.approx(right.double().mean().item())
    assert results.runs[0].unit == Unit("linf", eight_bit=False)


def test_previews_show_the_chosen_bands():
    image = torch.zeros(6, 8, 8)
    image[3, :, :4], image[0] = 0.2, torch.rand(8, 8)  # a small part of the range, in what is drawn as red
    maps = dict.fromkeys(("label", "clean", "prediction"), torch.zeros(8, 8, dtype=torch.long))
    bands = Bands(((0, 1.5),), whole=False, shown=(4, 3, 2))
    for shown in (bands, EIGHT_BIT):
        preview = decode_preview(encode_preview(image, image + 0.01, maps, (), 2, shown))
        assert set(preview) == {"image", "adversarial", "perturbation", "label", "clean", "prediction"}
    drawn = np.asarray(
        Image.open(io.BytesIO(decode_preview(encode_preview(image, image, maps, (), 2, bands))["image"]))
    )
    assert drawn[:, :3, 0].min() > 200
    assert drawn[:, 5:, 0].max() < 60


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_results_of_any_bands_are_drawn_and_saved(channels, tmp_path):
    images, labels = torch.rand(1, channels, 8, 8), torch.zeros(1, 8, 8, dtype=torch.long)
    result = segprox.attack(nn.Conv2d(channels, 2, 1), images, labels, steps=3)
    result.plot(bands=(channels,)).savefig(tmp_path / "plot.png")
    kinds = [path.suffix for path in result.save(tmp_path / "plain")]
    assert kinds == [".safetensors", ".png"][: 2 if channels == 1 else 1]
    files = result.save(tmp_path / "floats", bands=Bands(((0, 1.5),), whole=False))
    assert np.allclose(np.load(files[1]), result.images[0].numpy() * 1.5, atol=1e-6)
