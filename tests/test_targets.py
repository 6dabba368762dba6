"""Targets, against brute force and counting."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from segprox import Problem, Sample, SegproxError, load_dataset
from segprox.cli import main
from segprox.data import make_goal, make_target
from segprox.data.base import VOID_COLOUR, colours
from segprox.data.nearest import fill_nearest
from segprox.data.targets import box_sum, majority, permutation, shares, smooth, write_map


class Maps:
    """A dataset of label maps."""

    labelled = True
    ignore = (255,)

    def __init__(self, *maps, classes=("road", "sky", "car")):
        self.maps = [torch.as_tensor(np.asarray(m)).long() for m in maps]
        self.classes, self.palette = tuple(classes), colours(len(classes))
        self.names = [f"map-{i}" for i in range(len(maps))]

    def __len__(self):
        return len(self.maps)

    def __getitem__(self, index):
        label = self.maps[index]
        return Sample(self.names[index], torch.rand(3, *label.shape), label)


def nearest_labels(labels, known):
    """By brute force: for each pixel, all labels at the smallest distance."""
    points = np.argwhere(known)
    for y, x in np.ndindex(labels.shape):
        squared = ((points - (y, x)) ** 2).sum(1)
        yield (y, x), {labels[tuple(point)] for point in points[squared == squared.min()]}


@given(
    st.integers(1, 12).flatmap(
        lambda height: st.integers(1, 12).flatmap(
            lambda width: st.tuples(
                arrays.arrays(bool, (height, width), elements=st.sampled_from([True, False, False, False])),
                st.tuples(st.integers(0, height - 1), st.integers(0, width - 1)),
            )
        )
    )
)
def test_nearest_label_against_brute_force(drawn):
    known, one = drawn
    known[one] = True
    labels = np.arange(known.size).reshape(known.shape)  # every pixel its own label, so that a label is a place
    filled = fill_nearest(torch.from_numpy(labels), torch.from_numpy(known)).numpy()
    for place, allowed in nearest_labels(labels, known):
        assert filled[place] in allowed


def test_nearest_label_of_a_large_map():
    """Along a line the answer is known; the size is that of Cityscapes."""
    known = torch.zeros(1024, 2048, dtype=torch.bool)
    known[:, 300] = known[:, 1301] = True
    labels = torch.zeros(1024, 2048, dtype=torch.long)
    labels[:, 300], labels[:, 1301] = 1, 2
    filled = fill_nearest(labels, known)
    assert (filled[:, :801] == 1).all()
    assert (filled[:, 801:] == 2).all()


# A class


@pytest.mark.parametrize("text", ["sky", "1", "class:sky"])
def test_one_class_everywhere(text):
    data = Maps([[0, 255], [2, 1]])
    target = make_target(text, data)
    assert target.name == text
    assert target(data[0]).tolist() == [[1, 1], [1, 1]]


def test_void_stays_void_in_the_problem():
    data = Maps([[0, 255], [2, 1]])
    sample = data[0]
    problem = Problem.build(sample.image[None], sample.label[None], target=make_target("sky", data)(sample))
    assert problem.mask.tolist() == [[[True, False], [True, True]]]


def test_a_class_named_like_a_target():
    data = Maps([[0, 1]], classes=("road", "smooth"))
    assert make_target("class:smooth", data)(data[0]).tolist() == [[1, 1]]


# Majority


@given(arrays.arrays(np.int64, (5, 4, 3), elements=st.sampled_from([0, 1, 2, 255])))
def test_majority_against_counting(maps):
    found = None
    if (maps != 255).any():
        found = majority(Maps(*maps)).numpy()
    counts = np.stack([(maps == k).sum(0) for k in range(3)])
    counted = counts.sum(0) > 0
    if found is None:
        with pytest.raises(SegproxError, match="the dataset has no pixel with a label"):
            majority(Maps(*maps))
        return
    expected = counts.argmax(0)
    assert np.array_equal(found[counted], expected[counted])
    for place, allowed in nearest_labels(expected, counted):
        assert found[place] in allowed


def test_majority_needs_one_size():
    with pytest.raises(SegproxError, match="map-0 has 2 x 1 pixels and map-1 1 x 2; give the dataset a size"):
        make_target("majority", Maps([[0, 1]], [[0], [1]]))


def test_majority_needs_labels(tmp_path):
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    with pytest.raises(SegproxError, match="a majority target needs a dataset with labels"):
        make_target("majority", load_dataset(f"images:{tmp_path}"))


def test_majority_fits_only_images_of_its_size():
    target = make_target("majority", Maps([[0, 1]]))
    with pytest.raises(SegproxError, match="target majority has 2 x 1 pixels but image map-0 has 3 x 1"):
        target(Maps([[0, 1, 2]])[0])


# Smooth


@given(arrays.arrays(bool, (7, 9)), st.sampled_from([1, 3, 5, 21]))
def test_box_sums_against_slices(mask, window):
    found, half = box_sum(torch.from_numpy(mask), window), window // 2
    for y, x in np.ndindex(mask.shape):
        assert found[y, x] == mask[max(0, y - half) : y + half + 1, max(0, x - half) : x + half + 1].sum()


def test_smoothing_removes_specks_and_keeps_halves():
    halves = torch.zeros(64, 96, dtype=torch.long)
    halves[32:] = 1
    speckled = halves.clone()
    speckled[5, 7] = speckled[50:52, 60:62] = 2
    speckled[20, 20] = 1
    assert torch.equal(smooth(speckled), halves)
    assert torch.equal(smooth(halves), halves)


def test_smoothing_ends_where_nothing_changes():
    labels = torch.randint(0, 4, (40, 60), generator=torch.Generator().manual_seed(0))
    settled = smooth(labels, window=5, rounds=100)
    assert not torch.equal(settled, labels)
    assert torch.equal(smooth(settled, window=5), settled)
    neighbours = (settled[1:] != settled[:-1]).sum() + (settled[:, 1:] != settled[:, :-1]).sum()
    assert neighbours < 0.3 * ((labels[1:] != labels[:-1]).sum() + (labels[:, 1:] != labels[:, :-1]).sum())


def test_smooth_target_is_the_smoothed_majority():
    speck = np.zeros((40, 40), dtype=int)
    speck[20, 20] = 1
    data = Maps(speck, speck)
    assert make_target("majority", data)(data[0])[20, 20] == 1
    assert (make_target("smooth", data)(data[0]) == 0).all()


# Erase


@given(arrays.arrays(np.int64, (6, 5), elements=st.sampled_from([0, 1, 2, 255])))
def test_erasing_against_brute_force(label):
    label[0, 0] = 0  # something to take its place
    data = Maps(label)
    found = make_target("erase:car", data)(data[0]).numpy()
    assert np.array_equal(found[label != 2], label[label != 2])
    for place, allowed in nearest_labels(label, (label != 2) & (label != 255)):
        assert label[place] != 2 or found[place] in allowed


def test_erasing_the_only_class():
    data = Maps([[2, 2], [255, 2]])
    with pytest.raises(SegproxError, match="image map-0 without class 2 has no pixel with a label"):
        make_target("erase:car", data)(data[0])


def test_erasing_leaves_the_sample_alone():
    data = Maps([[0, 2]])
    make_target("erase:car", data)(data[0])
    assert data[0].label.tolist() == [[0, 2]]


# Permute


def test_permutation_in_full():
    data = Maps([[0, 1, 2, 255]])
    assert make_target("permute:1,2,0", data)(data[0]).tolist() == [[1, 2, 0, 255]]


@given(st.integers(0, 2**40), st.integers(2, 30))
def test_a_seeded_permutation_moves_every_class(seed, count):
    order = permutation(str(seed), count)
    assert sorted(order) == list(range(count))
    assert all(k != become for k, become in enumerate(order))
    assert order == permutation(str(seed), count)


def test_seeds_differ():
    assert len({tuple(permutation(str(seed), 8)) for seed in range(20)}) > 15
    assert permutation("3", 1) == [0]


# Drawn


def test_drawn_as_numbers_or_in_colours(tmp_path):
    data, drawn = Maps([[0, 0, 0, 0]]), np.array([[2, 1, 0, 255]], dtype=np.uint8)
    Image.fromarray(drawn).save(tmp_path / "grey.png")
    table = {**dict(enumerate(data.palette)), 255: VOID_COLOUR}
    Image.fromarray(np.array([[table[k] for k in drawn[0]]], dtype=np.uint8)).save(tmp_path / "colour.png")
    for name in ("grey", "colour"):
        assert make_target(f"png:{tmp_path}/{name}.png", data)(data[0]).tolist() == [[2, 1, 0, 255]]


def test_drawn_per_image(tmp_path):
    data = Maps([[0, 0]], [[0, 0]])
    for name, value in zip(data.names, (1, 2)):
        Image.fromarray(np.full((1, 2), value, dtype=np.uint8)).save(tmp_path / f"{name}.png")
    target = make_target(f"png:{tmp_path}", data)
    assert [target(data[i]).tolist() for i in range(2)] == [[[1, 1]], [[2, 2]]]
    (tmp_path / "map-1.png").unlink()
    with pytest.raises(SegproxError, match=r"there is no file .*map-1\.png"):
        target(data[1])


def test_drawn_and_smoothed(tmp_path):
    drawn = np.zeros((40, 40), dtype=np.uint8)
    drawn[10, 10], drawn[30:, 30:] = 1, 255
    Image.fromarray(drawn).save(tmp_path / "a.png")
    data = Maps(drawn)
    assert (make_target(f"smooth:{tmp_path}/a.png", data)(data[0]) == 0).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("elephant", "there is no class 'elephant'; the classes are: road, sky, car"),
        ("erase:7", "there is no class '7'; the classes are: road, sky, car"),
        ("permute:0,1", "permute:0,1 must name each class from 0 to 2 once"),
        ("permute:often", "permute takes a seed or all classes in another order, such as 1,2,0, but got 'often'"),
        ("png:nothing.png", r"there is no file nothing\.png"),
        ("png:five.png", r"label five\.png has the value 5, which is not one of 0 to 2, 255"),
        ("png:strange.png", r"label strange\.png has the colour \(9, 9, 9\)"),
        ("png:large.png", r"target png:large\.png has 5 x 1 pixels but image map-0 has 2 x 1"),
    ],
)
def test_targets_that_make_no_sense(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.full((1, 2), 5, dtype=np.uint8)).save("five.png")
    Image.fromarray(np.full((1, 2, 3), 9, dtype=np.uint8)).save("strange.png")
    Image.fromarray(np.zeros((1, 5), dtype=np.uint8)).save("large.png")
    data = Maps([[0, 1]])
    with pytest.raises(SegproxError, match=message):
        make_target(text, data)(data[0])


def test_colours_that_are_the_same_for_two_classes(tmp_path):
    Image.new("RGB", (2, 1)).save(tmp_path / "a.png")
    data = Maps([[0, 1]])
    data.palette = ((0, 0, 0),) * 3
    with pytest.raises(SegproxError, match="two classes of the dataset have the same colour"):
        make_target(f"png:{tmp_path}/a.png", data)


def test_shares():
    assert shares(torch.tensor([[0, 1, 1, 255]]), ["road", "sky"]) == {"sky": 0.5, "road": 0.25, "not counted": 0.25}
    assert shares(torch.tensor([[4]]), []) == {"class 4": 1.0}


# The command


@pytest.fixture
def segprox(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["segprox", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


def test_the_command_writes_what_can_be_read_again(segprox, tmp_path):
    out = tmp_path / "new" / "erased.png"
    code, output, _ = segprox("target", "erase:building", "--out", out, "--image", "scene-0003")
    assert code == 0
    assert "road" in output
    assert "building" not in output.split("scene-0003")[1]
    scenes = load_dataset("demo")
    expected = make_target("erase:building", scenes)(scenes[3])
    with Image.open(out) as picture:
        assert picture.mode == "P"
    for path in (out, tmp_path / "new" / "erased-colour.png"):
        assert torch.equal(make_target(f"png:{path}", scenes)(scenes[3]), expected)


def test_the_command_on_images_without_labels(segprox, tmp_path):
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    code, output, _ = segprox("target", "4", "--dataset", f"images:{tmp_path}", "--out", tmp_path / "b.png")
    assert code == 0
    assert "class 4" in output
    with Image.open(tmp_path / "b.png") as picture:
        assert np.array_equal(np.array(picture), np.full((2, 3), 4))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["elephant"], "there is no class 'elephant'"),
        (["road", "--image", "scene-9999"], "there is no image 'scene-9999' in demo; names are such as 'scene-0000'"),
        (["road", "--out", "a.jpg"], "--out must be a file that ends in .png but is a.jpg"),
        (["road", "--out", "/dev/null/a.png"], "cannot write to /dev/null: "),
        (["road", "--dataset", "voc:/no/such"], "root of voc cannot be '/no/such': there is no such folder"),
        (["road", "--dataset", "demo?length"], "after the ? of a name come options as option=value"),
    ],
)
def test_the_command_refuses_in_one_sentence(segprox, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    out = [] if "--out" in arguments else ["--out", "a.png"]
    code, _, error = segprox("target", *arguments, *out)
    assert code == 2
    assert error.startswith(f"error: {sentence}")
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_brackets_in_a_message_are_no_markup(segprox, tmp_path):
    (tmp_path / "labels").mkdir()
    (tmp_path / "images").mkdir()
    for kind in ("images", "labels"):
        Image.new("L", (2, 1)).save(tmp_path / kind / "a.png")
    (tmp_path / "classes.yaml").write_text("nothing")
    _, _, error = segprox("target", "0", "--dataset", f"folder:{tmp_path}", "--out", tmp_path / "a.png")
    assert "as in classes: [road, sky]" in error


def test_an_audit_of_images_without_labels(segprox, tmp_path):
    scene = load_dataset("demo")[0]
    pixels = (scene.image * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels[:64, :64].copy()).save(tmp_path / "street.png")
    arguments = ["--epsilon", "0.5", "--minimal", "dag-0.003", "--fixed", "i-fgsm", "--model", "demo-standard"]
    code, output, _ = segprox("audit", "--dataset", f"images:{tmp_path}", *arguments, "--out", tmp_path / "out")
    assert code == 0
    assert "0 of 1 images withstood both attacks" in output


def test_targets_of_a_folder_that_does_not_say_what_its_classes_are(tmp_path):
    for part in ("images", "labels"):
        (tmp_path / part).mkdir()
    for i, values in enumerate([[1, 5, 255], [1, 6, 255], [2, 6, 255]]):
        Image.fromarray(np.zeros((1, 3, 3), dtype=np.uint8)).save(tmp_path / f"images/{i}.png")
        Image.fromarray(np.array([values], dtype=np.uint8)).save(tmp_path / f"labels/{i}.png")
    data = load_dataset(f"folder:{tmp_path}")
    known = load_dataset(f"folder:{tmp_path}?classes=7")
    for text in ("majority", "smooth", "erase:5", "3", "untargeted?only=5"):
        one, other = make_goal(text, data)(data[0]), make_goal(text, known)(known[0])
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(one, other)), text
    coloured = write_map(data[1].label, data, tmp_path / "map.png")
    assert make_target(f"png:{coloured}", data)(data[0]).tolist() == [[1, 6, 255]]
    with pytest.raises(SegproxError, match=r"permute needs a dataset that says what its classes are; give .*classes=N"):
        make_target("permute:0", data)
