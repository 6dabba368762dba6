"""Every refusal: one clear sentence that names the value and what was expected."""

import json
import math
import os
import re
import struct
import subprocess
import sys
import zlib
from functools import reduce
from itertools import pairwise

import pytest
import torch
from PIL import Image
from torch import nn

import segprox
from segprox import Problem, Segmenter, SegproxError
from segprox.data import make_goal
from segprox.models import MODELS
from segprox.report.contents import report_tables
from segprox.report.groups import group_runs
from segprox.report.results import load_runs
from segprox.run.plan import Spec
from segprox.run.record import to_line
from segprox.run.store import RECORDS, Store
from segprox.text import read_yaml
from tests.records import make_record, make_results, make_run

IMAGES, LABELS = torch.rand(2, 3, 8, 8), torch.zeros(2, 8, 8, dtype=torch.long)


def network(channels=4, after=lambda z: z):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, channels, 1)

        def forward(self, x):
            return after(self.conv(x))

    return Network()


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (IMAGES * 255, r"must lie in \[0, 1\] but reach from"),
        (IMAGES * 2 - 1, r"must lie in \[0, 1\] but reach from"),
        (IMAGES * torch.nan, r"must lie in \[0, 1\] but reach from nan"),
        ((IMAGES * 255).byte(), "must be floats in .* but are torch.uint8"),
    ],
)
def test_images_out_of_range(images, message):
    with pytest.raises(SegproxError, match=message):
        Problem.build(images, LABELS)
    with pytest.raises(SegproxError, match=message):
        Segmenter(network())(images)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": None}, "needs labels .* or a target"),
        ({"labels": LABELS[:, :4]}, r"labels must have shape \[2, 8, 8\], like the images, but has \[2, 4, 8\]"),
        ({"labels": LABELS.float()}, "labels must hold whole numbers, one per pixel, but is torch.float32"),
        ({"target": LABELS[:1, :, :3]}, "target must have shape"),
        ({"mask": LABELS[0, 0]}, "mask must have shape"),
        ({"threshold": 0.0}, r"threshold must lie in \(0, 1\] but is 0.0"),
        ({"threshold": 99}, r"threshold must lie in \(0, 1\] but is 99"),
        ({"images": IMAGES[0]}, r"images must have shape \[batch, channels, height, width\] but have \[3, 8, 8\]"),
    ],
)
def test_problems_that_make_no_sense(options, message):
    with pytest.raises(SegproxError, match=message):
        Problem.build(**{"images": IMAGES, "labels": LABELS, **options})


@pytest.mark.parametrize(
    ("label", "sentence"), [(4, "label 4 is not one of the model's 4 classes"), (-1, "label -1 is")]
)
def test_labels_that_the_model_does_not_know(label, sentence):
    labels = LABELS.clone()
    labels[1, 3, 3] = label
    with pytest.raises(SegproxError, match=sentence):
        segprox.attack(network(), IMAGES, labels, steps=2)


def test_target_that_the_model_does_not_know():
    with pytest.raises(SegproxError, match="target 9 is not one of the model's 4 classes"):
        segprox.attack(network(), IMAGES, LABELS, target=9, steps=2)


def test_softmax_outputs():
    with pytest.raises(SegproxError, match="seems to return probabilities"):
        Segmenter(network(after=lambda z: z.softmax(1)))(IMAGES)


def test_softmax_outputs_at_lower_resolution():
    pooled = nn.Sequential(network(after=lambda z: z.softmax(1)), nn.AvgPool2d(2))
    with pytest.raises(SegproxError, match="seems to return probabilities"):
        segprox.attack(pooled, IMAGES, LABELS, steps=2)


def test_sigmoid_output():
    with pytest.raises(SegproxError, match="seems to be a probability"):
        Segmenter(network(channels=1, after=torch.sigmoid), binary=True)(IMAGES)


def test_one_channel_without_the_binary_flag():
    with pytest.raises(SegproxError, match="one output channel; pass binary=True"):
        Segmenter(network(channels=1))(IMAGES)


def test_binary_flag_with_more_channels():
    with pytest.raises(SegproxError, match="binary=True needs one output channel but the model has 4"):
        Segmenter(network(), binary=True)(IMAGES)


@pytest.mark.parametrize("after", [lambda z: z[..., :2], lambda z: nn.functional.pad(z, (1, 1, 1, 1))])
def test_spatial_mismatch(after):
    with pytest.raises(SegproxError, match="for a 8x8 image: not a smaller version of it"):
        Segmenter(network(after=after))(IMAGES)


@pytest.mark.parametrize("after", [lambda z: z.mean((2, 3)), lambda z: {"masks": z}, lambda z: "logits", lambda z: ()])
def test_outputs_that_are_no_logits(after):
    with pytest.raises(SegproxError, match="must return logits"):
        Segmenter(network(after=after))(IMAGES)


def test_class_subset_that_does_not_exist():
    with pytest.raises(SegproxError, match=r"channels \[0, 7\] do not fit a model with 4 output channels"):
        Segmenter(network(), channels=[0, 7])(IMAGES)


def test_std_of_zero():
    with pytest.raises(SegproxError, match="std must be positive"):
        Segmenter(network(), std=(1.0, 0.0, 1.0))


def test_unknown_kind_of_output():
    with pytest.raises(SegproxError, match="output must be one of auto, logits, probabilities but is 'scores'"):
        Segmenter(network(), output="scores")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_size": -1}, "step_size of alma-prox cannot be -1"),
        ({"steps": 0}, "steps of alma-prox cannot be 0"),
        ({"steps": "many"}, "steps of alma-prox cannot be 'many'"),
        ({"masking": "some"}, "masking of alma-prox cannot be 'some'"),
        ({"multiplier_min": 2}, "multiplier_min must not exceed multiplier_max"),
        ({"stepsize": 1}, "alma-prox has no field 'stepsize'; its fields are: norm, steps"),
    ],
)
def test_hyper_parameters_that_make_no_sense(options, message):
    with pytest.raises(SegproxError, match=message):
        segprox.make_attack("alma-prox", **options)


@pytest.mark.parametrize("load", [segprox.make_attack, segprox.load_model, segprox.load_dataset])
def test_unknown_names(load):
    with pytest.raises(SegproxError, match=r"there is no .* 'no-such'; (known are|names look like): "):
        load("no-such")


# --- models by name: what cannot be applied is refused, and whatever a file or a factory does is one sentence ---------
FACTORIES = """
import sys, segprox, torch
def network(): return torch.nn.Conv2d(3, 8, 1)
def segmenter(): return segprox.Segmenter(network())
def raises(): raise RuntimeError("no licence\\nask for one")
def looks_up(): return {}["weights"]
def leaves(): sys.exit(3)
def wants(size): return network()
"""
OWN_WEIGHTS = "demo-standard has its own weights, so leave out "
SEGMENTER = "is a Segmenter, which has its own preprocessing, so leave out "


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with factories and checkpoints of all kinds; `network` is the factory that they are tried on."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "mine.py").write_text(FACTORIES)
    (folder / "unfinished.py").write_text("def network(:\n")
    (folder / "unwilling.py").write_text("raise LookupError('no data')\n")
    weights = nn.Conv2d(3, 8, 1).state_dict()
    kinds = {
        "sparse": weights["weight"].to_sparse(),
        "meta": weights["weight"].to("meta"),
        "complex": weights["weight"].to(torch.complex64),
    }
    for kind, weight in kinds.items():
        torch.save({**weights, "weight": weight}, folder / f"{kind}.pt")
    (folder / "text.pt").write_text("hello world\n")
    return folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("demo-standard?std=0,0,0", f"demo-standard {SEGMENTER}std"),
        ("demo-standard?scale_255=true", f"demo-standard {SEGMENTER}scale_255"),
        ("demo-standard?bgr=false&output=logits", f"demo-standard {SEGMENTER}bgr, output"),
        ("demo-standard?checkpoint=other.pt", f"{OWN_WEIGHTS}checkpoint"),
        ("demo-standard?checkpoint=random", f"{OWN_WEIGHTS}checkpoint"),
        ("demo-standard?num_classes=5", f"{OWN_WEIGHTS}num_classes"),
        ("demo-standard?num_classes=-1", "num_classes of a model cannot be '-1'"),
        ("demo-standard?num_classes=99999999999", "num_classes of a model cannot be '99999999999'"),
        ("demo-standard?what=1", "a model has no option 'what'"),
        ("demo-standard?make=1", "a model has no option 'make'"),
        ("demo-standard?nmae=1", "a model has no option 'nmae'"),
        ("demo-standard?lean=true&lean=false", "says lean twice; leave one of them out"),
        ("demo-standard?device=meta", "device 'meta' cannot be used: it computes nothing"),
        ("demo-standard?device=privateuseone", "device 'privateuseone' cannot be used"),
        ("demo-standard?resize=0x4", "resize of a model cannot be"),
        ("demo-standard?resize=-4x4", "resize of a model cannot be"),
        ("demo-standard?resize=1000000x1000000", "resize of a model cannot be"),
        ("demo-standard?multiple=99999999999", "multiple of a model cannot be '99999999999'"),
        ("python:PLACE/mine.py:segmenter?mean=0.5,0.5,0.5", f"{SEGMENTER}mean"),
        ("python:PLACE/mine.py:network?num_classes=5", "is called without arguments, so leave out num_classes"),
        (
            "python:PLACE/mine.py:network?checkpoint=random",
            "makes its own weights: checkpoint=random cannot be applied",
        ),
        ("python:PLACE/mine.py:network?std=nan,nan,nan", r"std must be positive and mean finite but they are \[nan"),
        ("python:PLACE/mine.py:network?mean=inf,0,0", r"std must be positive and mean finite but .* \[inf"),
        ("python:PLACE/mine.py:network?std=-1,1,1", "std must be positive"),
        ("python:PLACE/mine.py:raises", "raises of .*mine.py cannot make a model: RuntimeError: no licence$"),
        ("python:PLACE/mine.py:looks_up", "cannot make a model: KeyError: 'weights'"),
        ("python:PLACE/mine.py:leaves", "cannot make a model: SystemExit: 3"),
        ("python:PLACE/mine.py:wants", "cannot make a model: TypeError: wants.. missing 1 required"),
        ("python:PLACE/unfinished.py:network", "unfinished.py cannot be imported: SyntaxError"),
        ("python:PLACE/unwilling.py:network", "unwilling.py cannot be imported: LookupError: no data"),
        ("python:.:network", ". cannot be imported: TypeError"),
        ("python:PLACE/mine.py:network?checkpoint=~nobody-here/w.pt", "there is no checkpoint ~nobody-here/w.pt"),
        (f"python:PLACE/mine.py:network?checkpoint={'x' * 5000}", "there is no checkpoint xxx"),
        ("python:PLACE/mine.py:network?checkpoint=PLACE/text.pt", "text.pt is not a checkpoint that can be read"),
        ("python:PLACE/mine.py:network?checkpoint=PLACE/sparse.pt", "weight must be a plain tensor of real numbers"),
        ("python:PLACE/mine.py:network?checkpoint=PLACE/meta.pt", "real numbers but is without values"),
        ("python:PLACE/mine.py:network?checkpoint=PLACE/complex.pt", "real numbers but is torch.complex64"),
        ("hf:./no/such/folder", "hf:./no/such/folder: there is no such folder, and an id on the hub looks like"),
        ("hf:~/models", "hf:~/models: there is no such folder"),
        (
            "hf:some/model?num_classes=3",
            "configuration of hf:some/model says how many classes .* leave out num_classes",
        ),
        (
            "mmseg:segformer-mit-b0-cityscapes?num_classes=3",
            "says how many classes there are, so leave out num_classes",
        ),
    ],
)
def test_models_that_cannot_be_what_is_asked(place, name, message):
    with pytest.raises(SegproxError, match=message):
        segprox.load_model(name.replace("PLACE", str(place)))


def test_models_that_are_registered_and_raise(monkeypatch):
    def unwilling():
        raise OSError("no licence server")

    monkeypatch.setitem(MODELS, "unwilling", unwilling)
    with pytest.raises(SegproxError, match="unwilling cannot be built: OSError: no licence server") as refusal:
        segprox.load_model("unwilling")
    assert isinstance(refusal.value.__cause__, OSError)  # for those who look for the line


def test_channels_last_is_applied_to_a_segmenter():
    model = segprox.load_model("demo-standard", channels_last=True)
    assert model.channels_last
    assert model.model.stem[0].weight.is_contiguous(memory_format=torch.channels_last)


# --- calls ------------------------------------------------------------------------------------------------------------
def test_fields_beside_attacks_that_are_made_already():
    made = segprox.make_attack("fmn")
    sentence = "steps cannot be given beside (an attack that is|attacks that are) made already"
    with pytest.raises(SegproxError, match=sentence):
        segprox.attack(network(), IMAGES, LABELS, made, steps=5)
    with pytest.raises(SegproxError, match=sentence):
        segprox.evaluate(network(), [(IMAGES[0], LABELS[0])], made, steps=5)
    with pytest.raises(SegproxError, match=sentence):
        segprox.evaluate(network(), [(IMAGES[0], LABELS[0])], [made, made], steps=5)


# --- datasets ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def pictures(tmp_path):
    """A folder of two labelled images."""
    for part, mode in (("images", "RGB"), ("labels", "L")):
        (tmp_path / part).mkdir()
        for name in "ab":
            Image.new(mode, (8, 6)).save(tmp_path / part / f"{name}.png")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder:HERE?size=1000000x1000000", "image of 1000000 x 1000000 pixels is too large: at most 178,956,970"),
        ("folder:HERE?size=long-99999999999", "size of folder cannot be 'long-99999999999': a size is native"),
        ("folder:HERE?size=long-9999999999", "image of 9999999999 x 9999999999 pixels is too large"),
        ("folder:HERE?size=short-99999999", "image of 99999999 x 99999999 pixels is too large"),
        ("folder:HERE?classes=99999999999", "classes of folder cannot be '99999999999'"),
        ("folder:HERE?classes=9999999999", "classes of folder cannot be '9999999999': there are 1 to 65536 classes"),
        ("folder:HERE?classes=0", "classes of folder cannot be '0'"),
        ("folder:HERE?classes=-1", "classes of folder cannot be '-1'"),
        ("folder:HERE?classes=3&ignore=99999999999", "ignore of folder cannot be '99999999999'"),
        ("folder:HERE?what=3", "folder has no option 'what'"),
        ("folder:~nobody-here/x", "root of folder cannot be '~nobody-here/x': there is no such folder"),
        (f"folder:{'x' * 5000}", "there is no such folder"),
        ("images:.\0", "there is no such folder"),
        ("demo?length=99999999999", "length of demo cannot be '99999999999'"),
        ("demo?length=-5", "length of demo cannot be '-5'"),
        ("demo?seed=-1", "seed of demo cannot be '-1'"),
        ("demo?length=3&length=4", "says length twice"),
    ],
)
def test_datasets_that_no_memory_holds_or_nobody_has(pictures, name, message):
    with pytest.raises(SegproxError, match=message):
        segprox.load_dataset(name.replace("HERE", str(pictures)))


def test_long_lists_of_ids_are_no_file(pictures):
    with pytest.raises(SegproxError, match="there is no image 'xxx"):
        segprox.load_dataset(f"images:{pictures / 'images'}?ids={'x' * 3000},a")


def write_eps(path):
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) print\n%%EOF\n")


def write_bomb(path):
    """A PNG of a few bytes whose header promises 4 giga-pixels."""
    chunks = (b"IHDR" + struct.pack(">IIBBBBB", 65000, 65000, 8, 2, 0, 0, 0), b"IDAT" + zlib.compress(bytes(1000)))
    whole = (struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(whole))


def write_gif(path):
    Image.new("P", (8, 6)).save(path, format="gif")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (write_eps, "cannot identify image file"),
        (write_gif, "cannot identify image file"),
        (write_bomb, "exceeds limit of 178956970 pixels"),
    ],
)
@pytest.mark.parametrize("part", ["images", "labels"])
def test_pictures_that_are_not_what_they_seem(pictures, monkeypatch, write, message, part):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_: pytest.fail("Ghostscript was started"))
    write(pictures / part / "a.png")
    data = segprox.load_dataset(f"folder:{pictures}?classes=2")
    with pytest.raises(SegproxError, match=rf"cannot read .*{part}/a\.png as a picture .*{message}"):
        data[0]
    assert data[1].name == "b"


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        ("[/oops]", r"there is no class '\[/oops\]'"),
        ("9" * 5000, "there is no class '999"),
        ("untargeted?only=99999999999999999999", "there is no class '99999999999999999999'"),
        ("untargeted?only=", "only of the goal untargeted cannot be ''"),
        ("untargeted?only=car&only=sky", "says only twice"),
        ("untargeted?what=car", "has no option 'what'"),
        ("untargeted?share=nan", "share of the goal untargeted cannot be 'nan'"),
        ("untargeted?share=0", "share of the goal untargeted cannot be '0'"),
        ("untargeted?share=-1", "share of the goal untargeted cannot be '-1'"),
        ("untargeted?protect=rest", "must say what is attacked"),
        ("erase:", "there is no class ''"),
        ("permute:1,2", "permut"),
        ("permute:", "permut"),
        ("png:no-such.png", "there is no file no-such.png"),
        (f"png:{'x' * 5000}", "cannot read|there is no file"),
    ],
)
def test_goals_that_make_no_sense(goal, message):
    with pytest.raises(SegproxError, match=message):
        make_goal(goal, segprox.load_dataset("demo"))


# --- YAML -------------------------------------------------------------------------------------------------------------
ALIASES = "".join(f"{c}: &{c} [{', '.join([f'*{b}'] * 10)}]\n" for b, c in pairwise("abcdefghij"))
EXPLODING = f"a: &a [x, x, x, x, x, x, x, x, x, x]\n{ALIASES}"
PLAN = "grids: [{models: [demo-robust], datasets: [demo], attacks: [ATTACKS]}]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{EXPLODING}grids: *j", "the spec is too large: more than 100,000 entries"),
        (f"{EXPLODING}{PLAN.replace('ATTACKS', '{name: fmn, set: {steps: *j}}')}", "too large: more than 100,000"),
        ("[" * 20_000 + "]" * 20_000, "the spec is nested too deeply: more than 30 levels"),
        ("[" * 40 + "]" * 40, "the spec is nested too deeply: more than 30 levels"),
        ("&a {grids: *a}", "the spec is nested too deeply"),
        ("grids: &a [*a]", "the spec is nested too deeply"),
        (PLAN.replace("ATTACKS", "{name: fmn, set: &a {steps: *a}}"), "the spec is nested too deeply"),
        ("grids: []\ngrids: []", "the spec is not YAML: it says 'grids' twice, in line 2"),
        ("grids: [{models: [demo-robust], models: [demo]}]", "the spec is not YAML: it says 'models' twice"),
        (f"seed: 1{'0' * 5000}", "the spec is not YAML: ValueError: Exceeds the limit"),
        ("seed: 2026-99-99", "the spec is not YAML: ValueError: month must be in 1..12"),
        ("? [a, b]\n: 1", "the spec is not YAML|does not fit"),
        ("!!python/object/apply:os.system [ls]", "the spec is not YAML: could not determine a constructor"),
        (PLAN.replace("ATTACKS", "{name: fmn, set: {1: 2}}"), "the spec does not fit: grids.0.attacks.0.set"),
    ],
)
def test_yaml_that_explodes_or_says_something_twice(text, message):
    with pytest.raises(SegproxError, match=message):
        Spec.read_text(text)


def test_aliases_and_merges_in_moderation():
    shared = "all: &all {datasets: [demo]}\n"
    assert read_yaml(f"{shared}more: {{<<: *all, models: [m]}}", "x")["more"] == {"datasets": ["demo"], "models": ["m"]}
    assert read_yaml(f"{shared}more: {{<<: *all, datasets: [voc]}}", "x")["more"] == {"datasets": ["voc"]}


# --- stores -----------------------------------------------------------------------------------------------------------
def changed(record, path, value):
    """The line of a record in which something is something else."""
    content = json.loads(to_line(record))
    *parents, last = path.split(".")
    reduce(lambda part, key: part[key], parents, content)[last] = value
    return json.dumps(content)


def store_with(folder, *lines):
    with Store(folder / "run") as store:
        store.start(make_run(), {"images": 2})
    (store.folder / RECORDS).write_text("".join(f"{line}\n" for line in lines))
    return store


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("norm", -0.1, r"is damaged \(done.norm: Input should be greater than or equal to 0\)"),
        ("norm", math.nan, r"is damaged \(done.norm"),
        ("norm", "large", r"is damaged \(done.norm"),
        ("norm", None, r"is damaged \(done.norm"),
        ("found.linf", math.nan, r"is damaged \(done.found.linf"),
        ("found.l2", -1, r"is damaged \(done.found.l2"),
        ("found.apsr", 1.5, r"is damaged \(done.found.apsr"),
        ("found.success", "perhaps", r"is damaged \(done.found.success"),
        ("found", [], r"is damaged \(done.found"),
        ("height", 0, r"is damaged \(done.height"),
        ("forwards", -1, r"is damaged \(done.forwards"),
        ("trace", [[3]], r"is damaged \(done.trace"),
        ("counts", [[1, 2], [3, 4]], r"is damaged \(done.counts"),
        ("counts", [[1, 2, -3], [0, 0, 0], [0, 0, 0]], r"is damaged \(done.counts"),
        ("counts", [[1, 2], [0, 0, 0], [0, 0, 0]], "does not count the pixels of as many classes as the other lines"),
        ("counts", [[1, 2], [0, 0], [0, 0]], "does not count the pixels of as many classes as the other lines"),
        ("status", "perhaps", "is damaged"),
        ("image", 3, r"is damaged \(done.image"),
        ("saved", {"png": "file"}, r"is damaged \(done.saved.png"),
        ("colour", "red", "has a field 'colour', which segprox .* does not know; keep it, and read the folder with"),
        ("found.colour", "red", "has a field 'colour', which segprox .* does not know; keep it"),
    ],
)
def test_records_that_make_no_sense(tmp_path, path, value, message):
    store = store_with(tmp_path, to_line(make_record("a")), changed(make_record("b"), path, value))
    with pytest.raises(SegproxError, match=rf"^line 2 of .*records\.jsonl {message}|^line 2 .*{message}") as refusal:
        store.latest()
    assert "remove" not in str(refusal.value)


@pytest.mark.parametrize("line", ["[" * 100_000, "null", "3", '"text"', "[]", "{}", '{"status": "done"}', "\ufeff{}"])
def test_lines_that_are_no_records(tmp_path, line):
    with pytest.raises(SegproxError, match=r"line 1 of .* is damaged"):
        store_with(tmp_path, line).latest()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", None), ("run", []), ("run", {"model": 3}), ("images", "many"), ("images", -1), ("classes", 3),
        ("classes", [1, 2]), ("palette", [[1, 2]]), ("palette", "red"), ("norm", 2), ("started", 2026),
        ("environment", "here"), ("attack", []), ("family", "fixed-epsilon"), ("family", 3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["runs", "report"])
def test_headers_that_make_no_sense(segprox_cli, tmp_path, field, value, command):
    store = store_with(tmp_path, to_line(make_record("a")))
    header = json.loads((store.folder / "run.json").read_text()) | {field: value}
    (store.folder / "run.json").write_text(json.dumps(header))
    more = ["--out", tmp_path / "report"] if command == "report" else []
    code, _, error = segprox_cli(command, tmp_path, *more)
    assert code == 2
    assert "run.json is damaged: it does not describe a run (" in error
    assert not (tmp_path / "report").exists() or not list((tmp_path / "report").iterdir())


def test_a_header_of_a_later_version_may_say_more(tmp_path):
    store = store_with(tmp_path, to_line(make_record("a")))
    header = json.loads((store.folder / "run.json").read_text()) | {"colour": "red"}
    (store.folder / "run.json").write_text(json.dumps(header))
    assert store.header["colour"] == "red"
    assert list(store.latest()) == ["a"]


def test_a_run_of_a_later_version_is_not_called_damaged(tmp_path):
    store = store_with(tmp_path, to_line(make_record("a")))
    header = json.loads((store.folder / "run.json").read_text())
    header["run"]["settings"]["colour"] = "red"
    (store.folder / "run.json").write_text(json.dumps(header))
    with pytest.raises(SegproxError, match=r"run\.json has a field 'colour', which segprox .* does not know; keep it"):
        _ = store.run


# --- the command line -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--set", "name=x"], "fmn has no field 'name'; its fields are: norm, steps"),
        (["--set", "self=x"], "fmn has no field 'self'"),
        (["--set", "=x"], "--set takes FIELD=VALUE"),
        (["--set", "steps=3"], "--steps 2 and --set steps=3 say it twice; leave one out"),
        (["--set", "rate=1", "--set", "rate=2"], "--set says rate twice; leave one of them out"),
        (["--address", "auto"], "the address auto is one of a Ray cluster, which only the engine ray uses"),
        (["--device", "cpu,cpu"], "2 devices are named (cpu, cpu), but only 1 of them would be used"),
        (
            ["--engine", "ray", "--address", "127.0.0.1:1"],
            "there is no Ray cluster at '127.0.0.1:1': Connection",
        ),
        (["--engine", "ray", "--address", "::99999"], "there is no Ray cluster at '::99999': "),
        (["--engine", "ray", "--device", "cpu,cpu"], "Ray gives every worker a device of its own, but 2 devices"),
        (["--target", "[/oops]"], "there is no class '[/oops]'; the classes are: sky"),
        (["--target", "\x1b[31mred"], "there is no class '\\x1b[31mred'"),
        (["--model", "demo-standard?std=0,0,0"], "demo-standard is a Segmenter, which has its own preprocessing"),
        (["--device", "meta"], "device 'meta' cannot be used: it computes nothing"),
        (["--device", ""], "device '' cannot be used"),
        (["--device", ",", "--workers", "2"], "device '' cannot be used"),
        (["--dataset", "demo?length=99999999999"], "length of demo cannot be '99999999999'"),
        (["--dataset", f"folder:{'x' * 5000}"], "root of folder cannot be"),
        (["--dataset", "folder:~nobody-here/x"], "root of folder cannot be '~nobody-here/x': there is no such folder"),
        (["--threshold", "nan"], "threshold of an evaluation cannot be nan"),
        (["--save", "gif"], "save of an evaluation cannot be 'gif'"),
        (["--out", "x" * 5000], "File name too long: xxxx"),
    ],
)
def test_evaluate_refuses(segprox_cli, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    usual = ["--model", "demo-standard", "--attack", "fmn", "--steps", 2, "--limit", 1, "--out", "out"]
    code, _, error = segprox_cli("evaluate", *usual, *arguments)
    assert code == 2
    assert error.startswith(f"error: {sentence}")
    assert len(error.splitlines()) == 1
    assert "\x1b" not in error
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["spec", "/bin/true"], "error: cannot read /bin/true: it is not text in UTF-8"),
        (["spec", "/bin/true", "--count"], "error: cannot read /bin/true: it is not text in UTF-8"),
        (["spec", "x" * 5000], "error: File name too long: "),
        (["spec", "/"], "error: there is no spec '/'"),
        (["memory", "--model", "demo-standard", "--size", "0x0"], "error: --size must be HEIGHTxWIDTH"),
        (["memory", "--model", "demo-standard", "--size", "99999999999x9"], "error: --size must be HEIGHTxWIDTH"),
        (["memory", "--model", "demo-standard?std=1,1,1"], "error: demo-standard is a Segmenter"),
        (["runs", "x" * 5000], "error: File name too long: xxx"),
        (["runs", "/dev/null"], "error: there are no runs in /dev/null"),
        (["evaluate", "--model", "demo-standard", "--out", "o", "--threads", "100000"], "--threads"),
        (["evaluate", "--model", "demo-standard", "--out", "o", "--workers", "100000"], "--workers"),
        (["check", "--model", "demo-standard?mean=1"], "error: demo-standard is a Segmenter"),
        (["require", ".", "--share", "0.5"], "error: --share goes with --withstand"),
        (["require", ".", "--withstand", "2/255", "--epsilon", "1/255"], "error: --epsilon goes with --accuracy and"),
    ],
)
def test_commands_refuse(segprox_cli, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    code, _, error = segprox_cli(*arguments)
    assert code == 2
    assert sentence in error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


def too_small():
    """A network for images of 64 x 64 pixels, which the demo's are not."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 8), nn.Unflatten(1, (8, 1, 1)))


def test_a_dry_run_of_a_model_that_cannot_take_the_first_image(segprox_cli, tmp_path):
    model = ["--model", "python:tests.test_refusals:too_small", "--attack", "fmn", "--limit", 1]
    code, output, _ = segprox_cli("evaluate", *model, "--dry-run", "--out", tmp_path)
    assert code == 0
    assert "could not be timed by its first image: RuntimeError: mat1 and mat2 shapes" in " ".join(output.split())
    assert "unknown" in output


NAMES = {"markup": "[/oops] [red]", "escapes": "\x1b]0;title\x07\x1b[2Jgone\x9b31m", "letters": "\u03bb\u2192\u0131"}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("width", [40, 80, 120])
def test_names_reach_the_terminal_as_they_are_or_not_at_all(segprox_cli, tmp_path, monkeypatch, kind, width):
    name = NAMES[kind]
    make_results(tmp_path, {"fmn": [0.01, None], "palma": [0.02, 0.03]}, model=name, dataset=name, goal=name)
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", width, raising=False)
    code, output, _ = segprox_cli("runs", tmp_path)
    assert code == 0
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", output)
    for text in ("fmn", "palma", "2/2", "2.6/255", "5.1/255", "1 of 2", "2 of 2"):
        assert text in output  # no number is cut, whatever the width
    if kind != "escapes":
        assert name in output


def test_terminals_that_know_ascii_only(tmp_path):
    make_results(tmp_path, {"fmn": [0.01]}, model="\u03bb\u2192")
    for arguments in (["runs", str(tmp_path)], ["runs", "\u03bb"]):
        done = subprocess.run(
            [sys.executable, "-m", "segprox", *arguments], env={**os.environ, "PYTHONIOENCODING": "ascii"},
            capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == (2 if arguments[-1] == "\u03bb" else 0)
        assert b"Traceback" not in done.stderr
        assert (done.stdout + done.stderr).isascii()


def test_no_attack_is_best_that_saw_other_images(tmp_path):
    make_results(tmp_path, {"fmn": [0.01, 0.02], "palma": [0.03, 0.04]}, model="same")
    make_results(tmp_path, {"fmn": [0.01, 0.02], "palma": [0.03]}, model="other")
    tables = {table.name: table for table in report_tables(group_runs(load_runs([tmp_path])))}
    summary = tables["summary"]
    assert {summary.rows[row][0] for row, _ in summary.bold()} == {"same"}
    norms = tables["norms-untargeted"]
    assert {norms.columns[place].over for _, place in norms.bold()} == {"same, d"}
    assert {tables["optimality"].rows[row][0] for row, _ in tables["optimality"].bold()} == {"same", "other"}
