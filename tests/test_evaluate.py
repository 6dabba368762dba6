"""Evaluations as a user runs them: going on, going wrong, being stopped."""

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from segprox import SegproxError, evaluate
from segprox import __version__ as version
from segprox.attacks import Fmn, make_attack
from segprox.models.demo import StreetNet
from segprox.run import worker
from segprox.run.engines import Local
from segprox.run.evaluate import Evaluation, estimate
from segprox.run.execution import Execution
from segprox.run.plan import AttackEntry, Run, Settings
from segprox.run.record import ImageError, Record, same
from segprox.run.store import Store, stores
from segprox.run.worker import forget_models

FAST = ("--model", "demo-standard", "--attack", "fmn", "--steps", 3)


def a_run(model="demo-standard", dataset="demo", attack="fmn", goal="untargeted", fields=None, **settings):
    entry = AttackEntry(name=attack, set={"steps": 3} if fields is None else fields)
    return Run(model=model, dataset=dataset, attack=entry, goal=goal, settings=Settings(**settings))


def done(out, *runs, **options):
    """What an evaluation in this process does: statuses and records."""
    return list(Evaluation(runs, out, **options).go(Local()))


def only(out):
    (store,) = stores(out)
    return store


@pytest.fixture
def folder(tmp_path):
    """Three small pictures of the demo's classes."""
    source = np.random.default_rng(0)
    root = tmp_path / "data"
    for part in ("images", "labels"):
        (root / part).mkdir(parents=True)
    for i in range(3):
        Image.fromarray(source.integers(0, 256, (32, 48, 3), dtype=np.uint8)).save(root / f"images/{i}.png")
        Image.fromarray(source.integers(0, 8, (32, 48), dtype=np.uint8)).save(root / f"labels/{i}.png")
    return root


def fail_at(monkeypatch, number, error):
    """Let the attack of the image of that number (from 1) raise an error, or call something."""
    run, calls = Fmn.run, []

    def failing(self, *arguments, **options):
        calls.append(1)
        if len(calls) == number:
            if callable(error):
                error()
            else:
                raise error
        return run(self, *arguments, **options)

    monkeypatch.setattr(Fmn, "run", failing)


# --- going on ---------------------------------------------------------------------------------------------------------
def test_what_is_done_is_not_done_again(tmp_path, batch_sizes):
    run = a_run(limit=3)
    events = done(tmp_path, run)
    assert [record.image for _, record in events] == ["scene-0000", "scene-0001", "scene-0002"]
    assert [len(status.records) for status, _ in events] == [3, 3, 3]  # one status, which grows
    assert len(batch_sizes) == 3
    lines = (only(tmp_path).folder / "records.jsonl").read_bytes()
    assert done(tmp_path, run) == []
    assert len(batch_sizes) == 3
    assert (only(tmp_path).folder / "records.jsonl").read_bytes() == lines


def test_a_finished_run_asks_the_model_nothing(segprox, tmp_path, monkeypatch):
    arguments = ("evaluate", *FAST, "--limit", 2, "--out", tmp_path)
    assert segprox(*arguments)[0] == 0
    header, asked, forward = only(tmp_path).header, [], StreetNet.forward
    forget_models()

    def counted(self, images):
        asked.append(1)
        return forward(self, images)

    monkeypatch.setattr(StreetNet, "forward", counted)
    assert segprox(*arguments)[0] == 0
    assert asked == []
    assert only(tmp_path).header == header
    assert segprox(*arguments[:-4], "--limit", 3, "--out", tmp_path)[0] == 0
    assert len(asked) > 3


def test_a_finished_run_gets_another_title_for_nothing(segprox, tmp_path, batch_sizes):
    for name in ("A", "B"):
        arguments = ("--model", f"demo-standard?name={name}", "--attack", "fmn", "--steps", 3, "--limit", 1)
        code, output, _ = segprox("evaluate", *arguments, "--out", tmp_path)
        assert (code, f"{name} on demo" in output) == (0, True)
    assert len(batch_sizes) == 1
    assert only(tmp_path).run.model_title == "B"


@pytest.fixture
def noisy(monkeypatch):
    """A model that never says the same twice, and how often it is asked."""
    asked, forward = [], StreetNet.forward

    def shaken(self, images):
        asked.append(1)
        return forward(self, images) + 5 * len(asked) * torch.arange(8).view(1, -1, 1, 1) % 7

    forget_models()
    monkeypatch.setattr(StreetNet, "forward", shaken)
    yield asked
    forget_models()


def test_an_evaluation_says_when_the_check_is_red(segprox, tmp_path, noisy):
    arguments = ("evaluate", *FAST, "--limit", 1, "--out", tmp_path)
    words = " ".join(segprox(*arguments)[1].split())
    assert "Warning: segprox check is red for demo-standard on demo: " in words
    assert "repeatable" in words.split("is red for")[1].split(".")[0]
    noisy.clear()
    assert "Warning" not in segprox(*arguments)[1]
    assert noisy == []  # nothing is left to do
    events = [
        json.loads(line)
        for line in segprox(*arguments[:-4], "--limit", 2, "--log", "json", "--out", tmp_path)[1].splitlines()
    ]
    assert [event["event"] for event in events][:1] == ["warning"]


def test_in_python_it_is_a_warning(tmp_path, noisy):
    options = {"limit": 1, "steps": 2, "out": tmp_path, "progress": False}
    with pytest.warns(UserWarning, match=r"segprox check is red for demo-standard on demo: .*repeatable"):
        evaluate("demo-standard", "demo", "fmn", **options)
    noisy.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate("demo-standard", "demo", "fmn", **options)
    assert noisy == []


def test_no_warning_where_the_check_is_green(tmp_path):
    for model in ("demo-standard", "demo-robust"):
        assert Evaluation([a_run(model=model, limit=1)], tmp_path).red_checks() == []


def test_how_an_evaluation_is_done_does_not_change_where_it_goes(segprox, tmp_path, batch_sizes):
    assert segprox("evaluate", *FAST, "--limit", 2, "--out", tmp_path)[0] == 0
    ways = ("--no-lean", "--channels-last", "--device", "cpu", "--batch", 2)
    arguments = ("evaluate", "--model", "demo-standard", "--attack", "fmn", "--set", "steps=3", "--limit", 2)
    assert segprox(*arguments, *ways, "--out", tmp_path)[0] == 0
    assert len(batch_sizes) == len(only(tmp_path).latest()) == 2


def test_a_run_says_all_of_its_attack_and_a_record_its_version(tmp_path, monkeypatch):
    done(tmp_path, a_run(limit=1))
    store = only(tmp_path)
    assert store.header["attack"] == json.loads(json.dumps(make_attack("fmn", steps=3).described()))
    assert [record.version for record in store.records()] == [version]
    monkeypatch.setattr(Fmn, "revision", 2)
    assert len(done(tmp_path, a_run(limit=1))) == 1
    assert len(stores(tmp_path)) == 2


def test_a_list_of_epsilons(segprox, tmp_path):
    arguments = ("--model", "demo-standard", "--attack", "fgsm", "--set", "epsilon=1/255,2/255")
    assert segprox("evaluate", *arguments, "--limit", 1, "--log", "quiet", "--out", tmp_path)[0] == 0
    sizes = sorted(record.norm for store in stores(tmp_path) for record in store.records())
    assert sizes == [pytest.approx(1 / 255, rel=1e-4), pytest.approx(2 / 255, rel=1e-4)]


def test_each_record_is_on_the_disk_before_it_is_told(tmp_path):
    for count, (_, record) in enumerate(Evaluation([a_run(limit=2)], tmp_path).go(Local()), start=1):
        assert list(only(tmp_path).latest()) == ["scene-0000", "scene-0001"][:count]
        assert only(tmp_path).latest()[record.image] == record


def test_a_raised_limit_goes_on_and_a_lowered_one_loses_nothing(segprox, tmp_path, batch_sizes):
    done(tmp_path, a_run(limit=2))
    assert len(done(tmp_path, a_run(limit=4))) == 2
    assert len(batch_sizes) == 4
    assert only(tmp_path).run.settings.limit == 4
    assert done(tmp_path, a_run(limit=1)) == []
    assert len(only(tmp_path).latest()) == 4
    (status,) = Evaluation([a_run(limit=1)], tmp_path).status()
    assert (status.total, status.done, status.errors) == (1, 1, 0)
    assert " 4/4 " in segprox("runs", tmp_path)[1]


def test_batches_make_no_difference(tmp_path):
    done(tmp_path / "one", a_run(limit=3))
    done(tmp_path / "two", a_run(limit=3), execution=Execution(batch=2))
    one, two = (only(tmp_path / name).latest() for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(same(one[name], two[name]) for name in one)


def test_a_changed_image_is_done_again(tmp_path, folder, batch_sizes):
    run, out = a_run(dataset=f"folder:{folder}?classes=8"), tmp_path / "out"
    done(out, run)
    picture = np.array(Image.open(folder / "images/1.png"))
    picture[0, 0, 0] ^= 1
    Image.fromarray(picture).save(folder / "images/1.png")
    ((_, record),) = done(out, run)
    assert record.image == "1"
    assert len(batch_sizes) == 4
    assert [record.image for record in only(out).records()] == ["0", "1", "2", "1"]
    assert only(out).latest()["1"] == record


def test_a_label_that_the_model_has_no_class_for_is_an_error_of_its_image(tmp_path, folder):
    labels = np.array(Image.open(folder / "labels/1.png"))
    labels[0, 0] = 8
    Image.fromarray(labels).save(folder / "labels/1.png")
    run = a_run(dataset=f"folder:{folder}")
    Evaluation([run], tmp_path / "out").validate()
    done(tmp_path / "out", run)
    latest = only(tmp_path / "out").latest()
    assert [isinstance(latest[name], Record) for name in "012"] == [True, False, True]
    assert latest["1"].reason.startswith("label 8 is not one of the model's 8 classes (0 to 7)")
    done(tmp_path / "part", a_run(dataset=f"folder:{folder}", limit=1))
    assert same(only(tmp_path / "part").latest()["0"], latest["0"])  # whatever the others' labels are
    assert only(tmp_path / "out").header["classes"] == []


def test_errors_are_tried_again_when_asked_to(tmp_path, monkeypatch, batch_sizes):
    run = a_run(limit=3)
    with monkeypatch.context() as patch:
        fail_at(patch, 2, RuntimeError("bad luck"))
        events = done(tmp_path, run)
    assert [type(record) for _, record in events] == [Record, ImageError, Record]
    assert events[1][1].reason == "RuntimeError: bad luck"
    assert done(tmp_path, run) == []
    ((status, record),) = done(tmp_path, run, retry_errors=True)
    assert record.image == "scene-0001"
    assert isinstance(record, Record)
    assert status.errors == 0
    assert done(tmp_path, run, retry_errors=True) == []


def test_several_runs_have_a_folder_each(tmp_path):
    runs = a_run(limit=1), a_run(limit=1, goal="road"), a_run(limit=1, attack="pgd")
    done(tmp_path, *runs)
    assert {store.folder.name for store in stores(tmp_path)} == {run.folder for run in runs}
    assert all(len(store.latest()) == 1 for store in stores(tmp_path))


def test_the_header_says_what_a_report_needs(tmp_path):
    done(tmp_path, a_run(limit=1))
    header = only(tmp_path).header
    assert header["classes"][3] == "road"
    assert header["palette"][3] == [95, 90, 105]
    assert (header["images"], header["labels"], header["norm"]) == (100, "true", "linf")
    assert header["cost"] == {"forwards": 3, "backwards": 2}
    assert header["environment"]["torch"] == torch.__version__


def test_what_others_wrote_before_the_lock_was_free_counts(tmp_path, monkeypatch, batch_sizes):
    run = a_run(limit=1)
    enter = Store.__enter__

    def late(self):  # another process finishes in the very moment
        monkeypatch.setattr(Store, "__enter__", enter)
        done(tmp_path, run)
        return enter(self)

    monkeypatch.setattr(Store, "__enter__", late)
    assert done(tmp_path, run) == []
    assert len(batch_sizes) == 1


# --- the command line -------------------------------------------------------------------------------------------------
def test_evaluate_and_look_at_it(segprox, tmp_path):
    code, output, _ = segprox("evaluate", *FAST, "--limit", 2, "--save", "png", "--save", "float", "--out", tmp_path)
    assert code == 0
    assert re.search(r"median [0-9.]+/255, ", output)
    assert "2/2" in output
    assert "Results are in" in output
    files = {path.suffix for path in (only(tmp_path).folder / "images").iterdir()}
    assert files == {".png", ".safetensors"}
    code, output, _ = segprox("evaluate", *FAST, "--limit", 3, "--out", tmp_path)
    assert "2 of 3 images are done already." in output
    code, output, _ = segprox("runs", tmp_path)
    assert code == 0
    assert "3/3" in output
    assert "being written to" not in output
    with only(tmp_path):
        assert "being written to" in segprox("runs", tmp_path)[1]
    code, output, _ = segprox("verify", tmp_path)
    assert code == 0
    assert output.count(" 2/2 ") == 2  # both formats


def tamper_pixel(path):
    picture = np.array(Image.open(path))
    picture[5, 5] = 255 - picture[5, 5]
    Image.fromarray(picture).save(path)


@pytest.mark.parametrize(
    "tamper",
    [
        tamper_pixel,
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:500]),
        lambda path: Image.new("RGB", (8, 8)).save(path),
        lambda path: Image.new("L", (256, 128)).save(path),
    ],
    ids=["pixel", "missing", "torn", "size", "grey"],
)
def test_saved_images_that_are_not_what_was_found(segprox, tmp_path, tamper):
    done(tmp_path, a_run(limit=2, save=("png",)))
    tamper(sorted((only(tmp_path).folder / "images").iterdir())[0])
    code, output, _ = segprox("verify", tmp_path)
    assert code == 1
    assert "1/2" in output
    assert "1 saved images are not what their records say." in output


def test_saved_images_of_which_the_originals_are_gone(segprox, tmp_path, folder):
    out = tmp_path / "out"
    done(out, a_run(dataset=f"folder:{folder}?classes=8", save=("float",)))
    for file in (only(out).folder / "images").iterdir():
        file.write_bytes(b"nothing")
    code, output, _ = segprox("verify", out)
    assert code == 1
    assert "0/3" in output


def test_nothing_to_verify(segprox, tmp_path):
    done(tmp_path, a_run(limit=1))
    code, _, error = segprox("verify", tmp_path)
    assert code == 2
    assert "nothing is saved" in error


def test_images_without_labels_are_verified(segprox, tmp_path, folder):
    done(tmp_path / "out", a_run(dataset=f"images:{folder / 'images'}", save=("float", "png")))
    code, output, _ = segprox("verify", tmp_path / "out")
    assert code == 0
    assert output.count(" 3/3 ") == 2


def test_log_as_json(segprox, tmp_path, monkeypatch):
    fail_at(monkeypatch, 2, RuntimeError("bad luck"))
    code, output, _ = segprox("evaluate", *FAST, "--limit", 2, "--log", "json", "--out", tmp_path)
    assert code == 1
    lines = [json.loads(line) for line in output.splitlines()]
    assert [line["event"] for line in lines] == ["image", "image", "finished"]
    assert [line.get("status") for line in lines] == ["done", "error", None]
    assert lines[0]["run"] == only(tmp_path).folder.name
    assert lines[0]["linf"] == only(tmp_path).latest()["scene-0000"].found.linf
    assert lines[1]["reason"] == "RuntimeError: bad luck"
    assert lines[2]["errors"] == 1


def test_errors_end_with_1_and_are_named(segprox, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        fail_at(patch, 1, RuntimeError("bad luck"))
        code, output, _ = segprox("evaluate", *FAST, "--limit", 2, "--out", tmp_path)
    assert code == 1
    assert "scene-0000 could not be attacked: RuntimeError: bad luck" in output
    assert "1 images could not be attacked" in output
    assert segprox("evaluate", *FAST, "--limit", 2, "--out", tmp_path)[0] == 1
    assert segprox("evaluate", *FAST, "--limit", 2, "--retry-errors", "--out", tmp_path)[0] == 0


def test_quiet(segprox, tmp_path):
    assert segprox("evaluate", *FAST, "--limit", 1, "--log", "quiet", "--out", tmp_path) == (0, "", "")


def test_the_same_attack_twice_is_done_once(segprox, tmp_path):
    code, *_ = segprox("evaluate", *FAST, "--attack", "fmn", "--limit", 1, "--log", "quiet", "--out", tmp_path)
    assert code == 0
    assert len(only(tmp_path).latest()) == 1


def test_a_dry_run_writes_nothing(segprox, tmp_path):
    out = tmp_path / "out"
    code, output, _ = segprox("evaluate", *FAST, "--steps", 7, "--limit", 10, "--dry-run", "--out", out)
    assert code == 0
    words = " ".join(output.split())
    assert "70 60" in words  # forwards and backwards of 10 images
    assert "1 runs, 10 images, 130 forwards and backwards: at most 0:00:" in words
    assert not out.exists()
    done(out, a_run(limit=2, fields={"steps": 7}))
    before = (only(out).folder / "records.jsonl").read_bytes()
    output = segprox("evaluate", *FAST, "--steps", 7, "--limit", 10, "--max-queries", 4, "--dry-run", "--out", out)[1]
    assert "10 images, 40 forwards" in " ".join(output.split())  # another run, of at most 4 queries each
    output = segprox("evaluate", "--model", "demo-standard", "--dataset", "demo", "--attack", "fmn", "--steps", 7,
                     "--limit", 10, "--dry-run", "--out", out)[1]  # fmt: skip
    assert "8 images, 104 forwards" in " ".join(output.split())
    assert (only(out).folder / "records.jsonl").read_bytes() == before


def test_a_dry_run_without_an_image_to_time(segprox, tmp_path, folder):
    (folder / "images/0.png").write_bytes(b"no picture")
    code, output, _ = segprox(
        "evaluate", *FAST, "--dataset", f"folder:{folder}?classes=8", "--dry-run", "--out", tmp_path / "out"
    )
    assert code == 0
    assert "unknown" in output


def test_estimates_count_errors_only_if_they_are_tried_again(tmp_path, monkeypatch):
    fail_at(monkeypatch, 1, RuntimeError("bad luck"))
    done(tmp_path, a_run(limit=3))
    (status,) = Evaluation([a_run(limit=5)], tmp_path).status()
    assert estimate(status, {})[1:] == (2, 6, 4, None)
    assert estimate(status, {"demo-standard demo": (1.0, 10.0)}, retry_errors=True)[1:] == (3, 9, 6, 69.0)


SPEC = """
settings: {limit: 5, save: [png], seed: 3}
grids:
  - models: [demo-standard]
    datasets: [demo]
    attacks: [{name: fmn, set: {steps: 2}}, {name: pgd, set: {steps: 2}}]
    goals: [untargeted, road]
"""


def test_run_a_spec_with_overrides(segprox, tmp_path):
    (tmp_path / "spec.yaml").write_text(SPEC)
    out = tmp_path / "out"
    code, *_ = segprox("run", tmp_path / "spec.yaml", "--limit", 1, "--max-queries", 3, "--save", "float", "--out", out)
    assert code == 0
    found = stores(out)
    assert len(found) == 4
    assert {(store.run.attack.name, store.run.goal) for store in found} == {
        (name, goal) for name in ("fmn", "pgd") for goal in ("untargeted", "road")
    }
    for store in found:
        assert store.run.settings == Settings(limit=1, save=("float",), seed=3, max_queries=3)
        (record,) = store.latest().values()
        assert set(record.saved) == {"float"}
        assert record.forwards + record.backwards == 3
    code, *_ = segprox("run", tmp_path / "spec.yaml", "--limit", 1, "--device", "cpu", "--dry-run", "--out", out)
    assert code == 0


def test_a_spec_is_counted_without_models_and_data(segprox):
    code, text, _ = segprox("spec", "paper", "--count")
    assert code == 0
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip().startswith(("voc", "city"))}
    # 3 models x 2 goals x 11 attacks on the 1449 images of VOC's validation set, and so on
    assert rows["voc:data/VOCdevkit?split=val&size=short-512"][:3] == ["1,449", "66", f"{1449 * 66:,}"]
    assert rows["cityscapes:data/cityscapes?split=val"][:3] == ["500", "92", f"{500 * 92:,}"]
    assert "178 runs in all, 161,124 images to attack" in text


def test_a_spec_on_a_dataset_of_unknown_size_is_counted_too(segprox, tmp_path):
    grid = "grids: [{models: [m], datasets: ['folder:a', demo], attacks: [fmn]}]"
    (tmp_path / "spec.yaml").write_text(f"{grid}\nsettings: {{limit: 7}}")
    code, text, _ = segprox("spec", tmp_path / "spec.yaml", "--count")
    assert code == 0
    assert re.search(r"folder:a +\? +1 +\? +\?", text)
    assert re.search(r"demo +7 +1 +7 ", text)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "no-such"], "there is no model 'no-such'"),
        (["--dataset", "no-such"], "there is no dataset 'no-such'"),
        (["--attack", "no-such"], "there is no attack 'no-such'"),
        (["--set", "stepz=3"], "fmn has no field 'stepz'"),
        (["--attack", "asma"], "asma steps=3 needs a target"),
        (["--target", "elephant"], "there is no class 'elephant'"),
        (["--save", "jpg"], "save of an evaluation cannot be 'jpg'"),
        (["--threshold", "0"], "threshold of an evaluation cannot be 0.0"),
        (["--precision", "float8"], "precision of a model cannot be 'float8'"),
        (["--out", "/dev/null/folder"], "cannot write to /dev/null/folder: Not a directory"),
        (["--out", "/proc/folder"], "cannot write to /proc/folder"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(segprox, tmp_path, arguments, sentence):
    code, output, error = segprox("evaluate", *FAST, "--limit", 1, "--out", tmp_path / "out", *arguments)
    assert code == 2
    assert output == ""
    assert error.startswith(f"error: {sentence}")
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_everything_that_is_wrong_is_said_at_once(segprox, tmp_path, folder):
    (tmp_path / "spec.yaml").write_text(f"""
        grids:
          - models: [no-model, demo-standard]
            datasets: [no-data, demo, "folder:{folder}?classes=9"]
            attacks: [fmn, no-attack, {{name: fmn, set: {{stepz: 3}}}}, asma]
            goals: [untargeted, elephant]
    """)
    code, _, error = segprox("run", tmp_path / "spec.yaml", "--out", tmp_path / "out")
    assert code == 2
    for sentence in (
        "there is no model 'no-model'", "there is no dataset 'no-data'", "there is no attack 'no-attack'",
        "fmn has no field 'stepz'", "asma needs a target", "there is no class 'elephant'",
        f"demo-standard tells 8 classes apart but folder:{folder}?classes=9 has 9",
    ):  # fmt: skip
        assert error.count(sentence) >= 1, sentence
    assert not (tmp_path / "out").exists()


def test_models_that_are_not_what_they_should_be_are_refused_early(tmp_path):
    (tmp_path / "net.py").write_text("import torch\ndef net():\n    return torch.nn.Sequential("
                                     "torch.nn.Conv2d(3, 8, 1), torch.nn.Softmax(1))")  # fmt: skip
    with pytest.raises(SegproxError, match="seems to return probabilities"):
        Evaluation([a_run(model=f"python:{tmp_path}/net.py:net")], tmp_path).validate()


def test_every_device_is_checked_and_a_model_read_once(tmp_path, monkeypatch):
    built, build = [], worker.build_model
    monkeypatch.setattr(worker, "build_model", lambda *arguments: built.append(1) or build(*arguments))
    forget_models()
    Evaluation([a_run()], tmp_path, Execution(devices=("cpu", "cpu", "cpu"), workers=3)).validate()
    assert built == [1]
    with pytest.raises(SegproxError, match="device 'cuda:77' cannot be used"):
        Evaluation([a_run()], tmp_path, Execution(devices=("cpu", "cuda:77"), workers=2)).validate()


def test_a_first_image_that_cannot_be_used_does_not_stop_a_run(segprox, tmp_path, folder):
    (folder / "images/0.png").write_bytes(b"no picture")
    arguments = ("evaluate", *FAST, "--dataset", f"folder:{folder}?classes=8", "--out", tmp_path / "out")
    code, output, _ = segprox(*arguments)
    assert code == 1
    assert "0 could not be attacked: cannot read" in output
    assert [type(record) for record in only(tmp_path / "out").latest().values()] == [ImageError, Record, Record]


# --- being stopped ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "stop",
    [KeyboardInterrupt(), lambda: signal.raise_signal(signal.SIGINT), lambda: signal.raise_signal(signal.SIGTERM)],
)
def test_a_run_that_is_stopped_keeps_what_is_done(segprox, tmp_path, monkeypatch, stop):
    before = signal.getsignal(signal.SIGTERM)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
    try:
        with monkeypatch.context() as patch:
            fail_at(patch, 3, stop)
            code, output, _ = segprox("evaluate", *FAST, "--limit", 4, "--out", tmp_path)
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert code == 130
    assert "Interrupted: every finished image is recorded. The same command again goes on." in output
    assert signal.getsignal(signal.SIGTERM) == before
    assert list(only(tmp_path).latest()) == ["scene-0000", "scene-0001"]
    assert not only(tmp_path).locked
    assert segprox("evaluate", *FAST, "--limit", 4, "--out", tmp_path)[0] == 0
    assert len(list(only(tmp_path).records())) == 4


def test_interruptions_are_json_too(segprox, tmp_path, monkeypatch):
    fail_at(monkeypatch, 2, KeyboardInterrupt())
    code, output, _ = segprox("evaluate", *FAST, "--log", "json", "--out", tmp_path)
    assert code == 130
    assert [json.loads(line)["event"] for line in output.splitlines()] == ["image", "interrupted"]


def test_a_full_disk_is_one_sentence_and_loses_nothing(segprox, tmp_path, monkeypatch):
    append, calls = Store.append, []

    def full(self, *arguments):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "append", full)
        code, _, error = segprox("evaluate", *FAST, "--limit", 4, "--out", tmp_path)
    assert code == 2
    assert error.startswith("error: the evaluation stopped: No space left on device; every finished image is recorded")
    assert len(error.splitlines()) == 1
    assert len(only(tmp_path).latest()) == 2
    assert segprox("evaluate", *FAST, "--limit", 4, "--out", tmp_path)[0] == 0
    assert len(list(only(tmp_path).records())) == 4


def test_two_processes_cannot_write_to_one_run(segprox, tmp_path, batch_sizes):
    run = a_run(limit=1)
    with Store(tmp_path / run.folder):
        code, _, error = segprox("evaluate", *FAST, "--limit", 1, "--out", tmp_path)
    assert code == 2
    assert error.startswith(f"error: another process (pid {os.getpid()}) is writing to")
    assert batch_sizes == []


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(number) for number in found.stdout.split()]


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_run_that_is_killed_again_and_again_loses_nothing(tmp_path):
    chance, out = random.Random(0), tmp_path / "out"
    run = a_run(limit=12, fields={"steps": 10}, save=("png",))
    arguments = ["--model", run.model, "--dataset", run.dataset, "--attack", "fmn", "--steps", "10", "--save", "png"]
    for workers in ("1", "2", "1"):
        known = len(Store(out / run.folder).latest())
        command = [sys.executable, "-m", "segprox", "evaluate", *arguments, "--limit", "12", "--log", "json",
                   "--workers", workers, "--out", str(out)]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for _ in range(chance.randint(1, 3)):  # then at any moment
                assert json.loads(process.stdout.readline())["event"] == "image"
            time.sleep(chance.uniform(0, 0.3))
            hands = children(process.pid)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        assert len(Store(out / run.folder).latest()) > known
        assert not only(out).locked
        end = time.monotonic() + 60
        while not all(gone(pid) for pid in hands):
            assert time.monotonic() < end, "workers outlive the process that started them"
            time.sleep(0.05)
    missing = 12 - len(only(out).latest())
    assert missing > 0
    assert len(done(out, run)) == missing  # nothing twice
    done(tmp_path / "whole", run)
    found, expected = only(out).latest(), only(tmp_path / "whole").latest()
    assert len(list(only(out).records())) == 12
    assert found.keys() == expected.keys()
    assert all(same(found[name], expected[name]) for name in expected)
    for record in found.values():
        whole = tmp_path / "whole" / run.folder / record.saved["png"].file
        assert (only(out).folder / record.saved["png"].file).read_bytes() == whole.read_bytes()
