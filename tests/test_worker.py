"""What is recorded of an image, against computations of its own; and what may go wrong with one."""

import dataclasses
import io
import weakref

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load

from segprox import SegproxError, load_dataset, load_model
from segprox.attacks import ATTACKS, Fmn, make_attack
from segprox.data import Sample
from segprox.run.plan import AttackEntry, Run, Settings
from segprox.run.preview import decode_preview
from segprox.run.record import ImageError, Record, same, weights_digest
from segprox.run.worker import WORKER_DIED, Task, Worker, _file_name, image_error, prepare

STEPS = {"steps": 4}


def a_run(model="demo-standard", dataset="demo", attack="fmn", goal="untargeted", fields=None, **settings):
    entry = AttackEntry(name=attack, set=STEPS if fields is None else fields)
    return Run(model=model, dataset=dataset, attack=entry, goal=goal, settings=Settings(**settings))


def work(run, indices=(0,), known=None):
    return Worker().work(Task(run, tuple(indices), known or {}))


def records(results):
    return {result.image: result.record for result in results}


@pytest.fixture
def folder(tmp_path):
    """Five small pictures, two of them upright; `folder(...)` names the dataset."""
    random = np.random.default_rng(0)
    for part in ("images", "labels"):
        (tmp_path / part).mkdir()
    for i, size in enumerate([(32, 48), (48, 32), (32, 48), (48, 32), (32, 48)]):
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(tmp_path / f"images/{i}.png")
        Image.fromarray(random.integers(0, 8, size, dtype=np.uint8)).save(tmp_path / f"labels/{i}.png")
    return tmp_path


def network(folder, body):
    """A model of that forward, in a file; returns its name."""
    file = folder / "network.py"
    text = "import os, torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
    file.write_text(text + "".join(f"        {line}\n" for line in body.splitlines()))
    return f"python:{file}:Net"


EIGHT = "z = torch.cat([x, 1 - x, x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1) * 5\n"


# --- what a record says -----------------------------------------------------------------------------------------------
def expected(model, sample, image, wanted, targeted):
    """Scores by other means: numpy, argmax, a loop over classes."""
    with torch.no_grad():
        predicted = model(image[None]).argmax(1)[0].numpy()
    label = sample.label.numpy()
    counted = label != 255
    satisfied = (predicted == wanted if targeted else predicted != wanted)[counted]
    difference = (image - sample.image).numpy().astype(np.float64)
    counts = [
        [int(((predicted == k) & (label == k) & counted).sum()) for k in range(8)],
        [int(((predicted == k) & (label != k) & counted).sum()) for k in range(8)],
        [int(((predicted != k) & (label == k) & counted).sum()) for k in range(8)],
    ]
    score = {
        "linf": np.abs(difference).max(), "l2": np.sqrt((difference**2).sum()), "l1": np.abs(difference).sum(),
        "apsr": satisfied.mean(),
    }  # fmt: skip
    return score, counts, (predicted == label)[counted].mean(), int(counted.sum())


@pytest.mark.parametrize(("goal", "target", "attack"), [("untargeted", None, "fmn"), ("road", 3, "ddn")])
def test_a_record_says_what_is_so(goal, target, attack):
    run = a_run(goal=goal, attack=attack, threshold=0.6, save=("float", "png"))
    (result,) = work(run, [2])
    record, sample, model = result.record, load_dataset("demo")[2], load_model("demo-standard")
    assert isinstance(record, Record)
    files = {kind: result.files[saved.file] for kind, saved in record.saved.items()}
    assert set(files) == {"float", "png"}
    found = load(files["float"])["image"]
    png = torch.from_numpy(np.array(Image.open(io.BytesIO(files["png"])))).permute(2, 0, 1)
    wanted = sample.label.numpy() if target is None else target

    clean = expected(model, sample, sample.image, wanted, target is not None)
    after = expected(model, sample, found, wanted, target is not None)
    rounded = expected(model, sample, png.float() / 255, wanted, target is not None)
    pairs = [
        (record.found, after[0]), (record.saved["float"].score, after[0]),
        (record.rounded, rounded[0]), (record.saved["png"].score, rounded[0]),
    ]  # fmt: skip
    for score, (name, value) in [(score, item) for score, values in pairs for item in values.items()]:
        assert getattr(score, name) == pytest.approx(value, rel=1e-9), name
        assert score.success == (score.apsr >= 0.6)
    assert torch.equal((found * 255).round().to(torch.uint8), png)
    assert (record.clean_apsr, record.clean_accuracy) == (pytest.approx(clean[0]["apsr"]), pytest.approx(clean[2]))
    assert record.accuracy == pytest.approx(after[2])
    assert [list(part) for part in record.clean_counts] == clean[1]
    assert [list(part) for part in record.counts] == after[1]
    assert record.counted == clean[3]
    assert (record.image, record.height, record.width, record.labels) == ("scene-0002", 128, 256, "true")
    assert record.norm == pytest.approx(getattr(record.found, make_attack(attack).norm), rel=1e-4)
    assert (record.forwards, record.backwards) == (4, 3)
    assert record.seconds > 0
    assert record.found.apsr > record.clean_apsr


def test_the_float_file_is_what_was_found_bit_for_bit(monkeypatch):
    found, run = [], Fmn.run

    def kept(self, *arguments, **options):
        found.append(run(self, *arguments, **options))
        return found[-1]

    monkeypatch.setattr(Fmn, "run", kept)
    (result,) = work(a_run(save=("float",)))
    assert torch.equal(load(next(iter(result.files.values())))["image"], found[0].images[0])
    assert set(result.record.saved) == {"float"}


def test_nothing_is_saved_unless_asked_for():
    (result,) = work(a_run(save=()))
    assert result.record.saved == {}
    assert result.record.preview is None
    assert not result.files


def test_a_preview_is_kept_by_default():
    (result,) = work(a_run())
    assert list(result.files) == [result.record.preview]
    pictures = decode_preview(result.files[result.record.preview])
    sizes = {part: Image.open(io.BytesIO(content)).size for part, content in pictures.items()}
    assert set(sizes.values()) == {(result.record.width, result.record.height)}
    drawn = np.asarray(Image.open(io.BytesIO(pictures["label"])))
    assert np.array_equal(drawn, load_dataset("demo")[0].label.numpy())


def test_whoever_keeps_images_keeps_previews():
    (result,) = work(a_run(save=("png",)))
    assert set(result.files) == {result.record.saved["png"].file, result.record.preview}


def test_names_of_files_are_plain_and_different():
    names = ["a/b", "a-b", "../../etc/passwd", "é" * 300, "é" * 301, "a b", "."]
    files = [_file_name(name) for name in names]
    assert len(set(files)) == len(names)
    for file in files:
        assert "/" not in file
        assert len(f"{file}.safetensors".encode()) <= 255


def test_a_batch_is_as_each_image_alone(batch_sizes):
    run = a_run(save=("png",))
    together = work(run, [0, 1])
    assert batch_sizes == [2]
    alone = work(run, [0]) + work(run, [1])
    assert all(same(a.record, b.record) for a, b in zip(together, alone, strict=True))
    assert [result.files for result in together] == [result.files for result in alone]


def test_sizes_may_be_mixed(folder, batch_sizes):
    run = a_run(dataset=f"folder:{folder}?classes=8")
    together = work(run, [0, 2, 1, 3, 4])
    assert batch_sizes == [2, 2, 1]
    alone = records(result for i in range(5) for result in work(run, [i]))
    assert len(together) == 5
    assert all(same(alone[result.image], result.record) for result in together)
    assert (alone["1"].height, alone["1"].width) == (48, 32)


def test_images_without_labels_are_judged_by_the_models_own_prediction(folder):
    (result,) = work(a_run(dataset=f"images:{folder / 'images'}", fields={"steps": 20}))
    assert result.record.labels == "model"
    assert (result.record.clean_apsr, result.record.clean_accuracy) == (0, 1)
    assert result.record.accuracy == pytest.approx(1 - result.record.found.apsr)
    assert result.record.found.apsr > 0


def test_a_run_with_a_limit_on_queries_asks_no_more():
    (result,) = work(a_run(max_queries=4))
    assert result.record.forwards + result.record.backwards == 4


# --- what may go wrong ------------------------------------------------------------------------------------------------
def test_a_model_that_returns_nan(folder):
    name = network(folder, f"{EIGHT}return z * float('nan') if x.shape[2] == 48 else z")
    found = records(work(a_run(model=name, dataset=f"folder:{folder}?classes=8"), range(5)))
    assert {image for image, record in found.items() if isinstance(record, ImageError)} == {"1", "3"}
    assert found["1"].reason == "the model returns NaN for this image"


def test_a_model_that_cannot_take_an_image(folder):
    name = network(folder, f"{EIGHT}assert x.shape[2] != 48, 'too tall\\nby far'\nreturn z")
    found = records(work(a_run(model=name, dataset=f"folder:{folder}?classes=8"), range(5)))
    assert {image for image, record in found.items() if isinstance(record, ImageError)} == {"1", "3"}
    assert found["1"].reason == "AssertionError: too tall"


def test_labels_that_the_model_cannot_say(folder):
    Image.fromarray(np.full((48, 32), 11, dtype=np.uint8)).save(folder / "labels/3.png")
    found = records(work(a_run(dataset=f"folder:{folder}?classes=12"), range(5)))
    assert [image for image, record in found.items() if isinstance(record, ImageError)] == ["3"]
    assert "11" in found["3"].reason
    found = records(work(a_run(dataset=f"folder:{folder}?classes=8"), range(5)))
    assert [image for image, record in found.items() if isinstance(record, ImageError)] == ["3"]
    assert "has the value 11" in found["3"].reason


@pytest.mark.parametrize("ahead", [False, True])
def test_files_that_cannot_be_read(folder, ahead):
    content = (folder / "images/2.png").read_bytes()
    (folder / "images/2.png").write_bytes(content[: len(content) // 2])
    task, worker = Task(a_run(dataset=f"folder:{folder}?classes=8"), tuple(range(5))), Worker()
    if ahead:
        worker.read_ahead(task)
    found = records(worker.work(task))
    assert [image for image, record in found.items() if isinstance(record, ImageError)] == ["2"]
    assert "as a picture" in found["2"].reason
    again = work(task.run, range(5), {image: record.key for image, record in found.items()})
    assert [result.record for result in again] == [None] * 5
    (folder / "images/2.png").write_bytes(content)
    again = records(work(task.run, range(5), {image: record.key for image, record in found.items()}))
    assert isinstance(again.pop("2"), Record)
    assert set(again.values()) == {None}


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("can't allocate memory: 1 byte")],
)
def test_running_out_of_memory_halves_the_batch(monkeypatch, error):
    run, sizes, held = Fmn.run, [], []

    class Memory:
        pass

    def hungry(self, model, problem, *rest, **options):
        assert all(reference() is None for reference in held), "the memory of the failed attempt is still taken"
        mine = Memory()
        held.append(weakref.ref(mine))
        sizes.append(len(problem))
        if len(problem) > 1:
            raise type(error)(*error.args)
        return run(self, model, problem, *rest, **options)

    monkeypatch.setattr(Fmn, "run", hungry)
    found = work(a_run(), [0, 1, 2])
    assert sizes == [3, 1, 2, 1, 1]
    monkeypatch.undo()
    alone = work(a_run(), [0, 1, 2])
    assert all(same(a.record, b.record) for a, b in zip(found, alone, strict=True))


def test_an_image_for_which_there_is_no_memory(monkeypatch):
    def hungry(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr(Fmn, "run", hungry)
    found = records(work(a_run(), [0, 1]))
    assert {record.reason for record in found.values()} == {
        "out of memory: CUDA out of memory. Tried to allocate 2 GiB"
    }
    again = work(a_run(), [0, 1], {image: record.key for image, record in found.items()})
    assert [result.record for result in again] == [None, None]


def test_what_is_wrong_with_the_run_itself_is_raised():
    for run in (a_run(model="no-such"), a_run(dataset="no-such"), a_run(attack="no-such"), a_run(goal="no-such")):
        with pytest.raises(SegproxError, match="there is no"):
            work(run)


# --- what need not be done again --------------------------------------------------------------------------------------
def test_known_images_are_not_attacked(batch_sizes):
    first = records(work(a_run(), [0, 1]))
    assert batch_sizes == [2]
    again = work(a_run(limit=2, save=("png",)), [0, 1], {image: record.key for image, record in first.items()})
    assert [result.record for result in again] == [None, None]
    assert batch_sizes == [2]
    (zero, one) = work(a_run(), [0, 1], {"scene-0000": first["scene-0000"].key, "scene-0001": "other"})
    assert zero.record is None
    assert same(one.record, first["scene-0001"])
    assert batch_sizes == [2, 1]


def test_an_image_that_killed_its_workers_is_not_even_looked_at(folder, batch_sizes):
    name = network(folder, "raise AssertionError('looked at')")
    run = a_run(model=name, dataset=f"folder:{folder}?classes=8")
    (result,) = work(run, [0], {"0": image_error("0", WORKER_DIED).key})
    assert result.record is None
    (result,) = work(run, [0])
    assert result.record.reason == "AssertionError: looked at"


def key(run, change=None):
    prepared = prepare(run)
    sample = prepared.data[0]
    return prepared.key(sample if change is None else change(sample))


def changed(plane, value):
    plane = plane.clone()
    plane[..., 7, 7] = value
    return plane


def test_keys_change_with_whatever_changes_the_result():
    keys = [
        key(a_run()),
        key(a_run(), lambda s: s._replace(image=changed(s.image, s.image[0, 7, 7] + 1e-6))),
        key(a_run(), lambda s: s._replace(label=changed(s.label, (s.label[7, 7] + 1) % 8))),
        key(a_run(), lambda s: s._replace(label=changed(s.label, 255))),
        key(a_run(), lambda s: Sample(s.name, s.image[:, ::2], s.label[::2])),
        key(a_run(model="demo-robust")),
        key(a_run(goal="road")),
        key(a_run(goal="car")),
        key(a_run(goal="permute:1")),
        key(a_run(goal="erase:car")),
        key(a_run(goal="erase:car?protect=none")),
        key(a_run(goal="untargeted?only=car")),
        key(a_run(goal="untargeted?only=car&protect=rest")),
        key(a_run(goal="untargeted?only=car&share=0.9")),
        key(a_run(fields={"steps": 5})),
        key(a_run(threshold=0.98)),
        key(a_run(seed=1)),
        key(a_run(max_queries=100)),
        key(a_run(model_options={"precision": "bfloat16"})),
    ]
    assert len(set(keys)) == len(keys)


def test_a_target_is_not_the_same_as_labels():
    sample = load_dataset("demo")[0]
    labels = torch.full_like(sample.label, 3)
    away, towards = prepare(a_run()), prepare(a_run(goal="road"))
    sample = sample._replace(label=labels)
    assert torch.equal(away.problem(sample).labels, towards.problem(sample).labels)
    assert away.key(sample) != towards.key(sample)


def test_keys_do_not_change_with_what_does_not():
    first = key(a_run())
    assert first == key(a_run(limit=3)) == key(a_run(save=("png",)))
    assert first == key(a_run(fields={"steps": "4"})) == key(a_run(fields={"steps": 4, "norm": "linf"}))
    assert first == key(a_run(), lambda sample: sample._replace(name="other"))
    assert first == key(a_run(model_options={"channels_last": True})) == key(a_run(model="demo-standard?lean=true"))
    assert first == key(a_run(model="demo-standard?name=Short"))


def test_keys_of_attacks_differ_where_attacks_do():
    seen = {}
    for name in ATTACKS:
        goal = "road" if name == "asma" else "untargeted"
        prepared = prepare(a_run(attack=name, fields={}, goal=goal))
        seen[repr(prepared.attack), goal] = prepared.key(prepared.data[0])
    assert len(set(seen.values())) == len(seen) > 20


def test_the_hash_of_weights():
    model = load_model("demo-standard")
    first = weights_digest(model.model, model.described())
    assert first == weights_digest(load_model("demo-standard").model, model.described())
    weight = next(model.model.parameters())
    before = weight.flatten()[0].item()
    with torch.no_grad():
        weight.view(-1)[0] = np.nextafter(np.float32(before), np.float32(1)).item()
    assert weights_digest(model.model, model.described()) != first
    with torch.no_grad():
        weight.view(-1)[0] = before
    assert weights_digest(model.model, model.described()) == first
    assert weights_digest(model.model, model.described() | {"bgr": True}) != first
    model.model.stem[1].running_mean[0] += 1e-3  # buffers count as well
    assert weights_digest(model.model, model.described()) != first


def test_models_may_have_options_that_are_lists(folder):
    name = network(folder, f"{EIGHT}return z")
    keys = {key(a_run(model=name, model_options={"mean": [mean, 0.5, 0.5]})) for mean in (0.4, 0.5)}
    assert len(keys) == 2


def test_prepared_runs_are_plain_data():
    prepared = prepare(a_run(attack="bisect:pgd", fields={"rounds": 2}))
    described = prepared.attack.described()
    assert (described["class"], described["revision"]) == ("Bisection", 1)
    assert (described["attack"]["class"], described["attack"]["steps"]) == ("Pgd", 40)
    assert dataclasses.asdict(prepared.run)["attack"]["set"] == {"rounds": 2}
