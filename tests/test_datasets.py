"""Datasets: tiny trees in the official layouts, written here and read back."""

import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from segprox import SegproxError, load_dataset
from segprox.data import DATASETS, camvid, cityscapes, voc, with_own_labels
from segprox.data.base import colours
from segprox.data.files import read_image, read_index, resized

RANDOM = np.random.default_rng(0)


def save(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(np.asarray(pixels, dtype=np.uint8))
    picture.save(path, **options)
    return path


def photo(height=6, width=8):
    return RANDOM.integers(0, 256, (height, width, 3))


def palette_png(label):
    picture = Image.fromarray(np.asarray(label, dtype=np.uint8))
    picture.putpalette([part for colour in colours(256) for part in colour])
    return picture


def folder_dataset(root, names=("a", "b", "c"), height=6, width=8, classes=4):
    labels = {}
    for name in names:
        save(root / "images" / f"{name}.png", photo(height, width))
        labels[name] = RANDOM.integers(0, classes, (height, width))
        labels[name][0, 0] = classes - 1
        save(root / "labels" / f"{name}.png", labels[name])
    return labels


# Sizes


@pytest.mark.parametrize(
    ("size", "rule", "expected"),
    [
        ((500, 375), "native", (500, 375)),
        ((500, 375), "short-512", (682, 512)),  # 682.67, which torchvision's Resize rounds down
        ((375, 500), "short-512", (512, 682)),
        ((2048, 1024), "long-512", (512, 256)),
        ((7, 7), "short-3", (3, 3)),
        ((1000, 2), "long-10", (10, 1)),
        ((2048, 1024), "1024x512", (1024, 512)),
    ],
)
def test_size_rules(size, rule, expected):
    assert resized(size, rule) == expected


@pytest.mark.parametrize("rule", ["short", "short-0", "512", "0x3", "3x-1", "1024 x 512", "wide-3", ""])
def test_sizes_that_make_no_sense(tmp_path, rule):
    with pytest.raises(SegproxError, match=f"size of folder cannot be '{rule}': a size is native, short-512"):
        load_dataset(f"folder:{tmp_path}", size=rule)


def test_images_are_resized_with_antialiasing_and_labels_to_the_nearest(tmp_path):
    stripes = np.zeros((16, 16, 3))
    stripes[:, ::2] = 255
    label = np.repeat(np.arange(4), 4)[None].repeat(16, 0)  # four bands of four pixels
    save(tmp_path / "images" / "a.png", stripes)
    save(tmp_path / "labels" / "a.png", label)
    _, image, small = load_dataset(f"folder:{tmp_path}?size=4x4")[0]
    assert small.tolist() == [[0, 1, 2, 3]] * 4
    assert ((image > 0.3) & (image < 0.7)).all()  # the stripes blend; without antialiasing they alias to 0 or 1


def test_an_image_is_its_8_bit_values_over_255(tmp_path):
    pixels = photo()
    save(tmp_path / "a.png", pixels)
    image = load_dataset(f"images:{tmp_path}")[0].image
    assert image.dtype == torch.float32
    assert np.array_equal(image.numpy(), np.float32(pixels.transpose(2, 0, 1)) / np.float32(255))


# Choosing


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "abcde"),
        ({"subset": "2"}, "ab"),
        ({"subset": 3}, "abc"),
        ({"subset": "1:3"}, "bc"),
        ({"subset": "::2"}, "ace"),
        ({"subset": "-2:"}, "de"),
        ({"ids": "d,b"}, "db"),
        ({"ids": ["e", "a"], "subset": "1"}, "e"),
    ],
)
def test_subset_and_ids(tmp_path, options, expected):
    folder_dataset(tmp_path, "ebdca")
    dataset = load_dataset(f"folder:{tmp_path}", **options)
    assert dataset.names == tuple(expected)
    assert [dataset[i].name for i in range(len(dataset))] == list(expected)


def test_ids_from_a_file(tmp_path):
    folder_dataset(tmp_path, "abc")
    (tmp_path / "some.txt").write_text("c\n\nimages/a.png\n")
    assert load_dataset(f"folder:{tmp_path}?ids={tmp_path}/some.txt").names == ("c", "a")


def test_keywords_win_over_the_name(tmp_path):
    folder_dataset(tmp_path, "abc")
    assert len(load_dataset(f"folder:{tmp_path}?subset=1", subset=2)) == 2


@pytest.mark.parametrize("index", [-1, 3])
def test_a_dataset_ends(tmp_path, index):
    folder_dataset(tmp_path)
    with pytest.raises(IndexError):
        load_dataset(f"folder:{tmp_path}")[index]


def test_nothing_is_read_before_it_is_asked_for(tmp_path):
    folder_dataset(tmp_path, "ab")
    (tmp_path / "images" / "b.png").write_bytes(b"no picture")
    (tmp_path / "labels" / "b.png").write_bytes(b"no picture")
    dataset = load_dataset(f"folder:{tmp_path}?classes=4")
    assert dataset[0].name == "a"
    with pytest.raises(SegproxError, match=r"images/b\.png"):
        dataset[1]


def test_images_of_different_sizes(tmp_path):
    save(tmp_path / "a.png", photo(4, 5))
    save(tmp_path / "b.png", photo(9, 3))
    dataset = load_dataset(f"images:{tmp_path}")
    assert [tuple(dataset[i].image.shape) for i in range(2)] == [(3, 4, 5), (3, 9, 3)]


# Pictures of every kind


def test_kinds_of_images(tmp_path):
    grey = RANDOM.integers(0, 256, (6, 8)).astype(np.uint8)
    alpha = np.dstack([grey, grey, grey, np.full_like(grey, 7)])
    sixteen = Image.fromarray(grey.astype(np.uint16) << 8 | 0x7F)
    transparent = Image.fromarray(grey).convert("P")
    kinds = {"l.png": grey, "rgba.png": alpha, "p.png": Image.fromarray(grey).convert("P"), "b.bmp": grey}
    for name, pixels in kinds.items():
        save(tmp_path / name, pixels)
    save(tmp_path / "deep.png", sixteen)
    save(tmp_path / "deep.tif", sixteen)
    save(tmp_path / "q.png", transparent, transparency=bytes(range(256)))
    assert len(list(tmp_path.iterdir())) == 7
    for path in sorted(tmp_path.iterdir()):
        picture = read_image(path)
        assert picture.mode == "RGB"
        assert np.array_equal(np.array(picture), np.dstack([grey] * 3)), path.name


def test_exif_orientation_is_left_alone(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    path = save(tmp_path / "a.jpg", photo(6, 8), exif=exif)
    assert read_image(path).size == (8, 6)


def test_floating_point_images_are_refused(tmp_path):
    save(tmp_path / "a.tif", Image.fromarray(np.full((3, 4), 0.5, dtype=np.float32)))
    with pytest.raises(SegproxError, match=r"a\.tif holds 1 band of float32 from 0.5 to 0.5: declare"):
        load_dataset(f"images:{tmp_path}")[0]


@pytest.mark.filterwarnings("ignore")  # Pillow's, about damaged tags
@given(st.data())
def test_a_damaged_file_is_read_or_named(tmp_path_factory, data):
    """Bytes cut off or overwritten anywhere never escape as another error."""
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "BMP", "TIFF"]))
    file = io.BytesIO()
    Image.fromarray(np.arange(240, dtype=np.uint8).reshape(8, 10, 3)).save(file, kind)
    content = bytearray(file.getvalue())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:at]
    else:
        content[at] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("damaged") / "a.png"
    path.write_bytes(content)
    try:
        read_image(path)
    except SegproxError as error:
        assert str(path) in str(error)  # noqa: PT017 - both ends are fine, and only one has a message


# Pascal VOC


def voc_tree(home, names=("2007_000033", "2007_000042")):
    labels = {}
    for name in names:
        save(home / "JPEGImages" / f"{name}.jpg", photo(6, 8))
        labels[name] = RANDOM.choice([0, 1, 20, 255], (6, 8))
        save(home / "SegmentationClass" / f"{name}.png", palette_png(labels[name]))
    lists = home / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "val.txt").write_text("".join(f"{name}\n" for name in names))
    return labels


@pytest.mark.parametrize("root", ["", "VOCdevkit", "VOCdevkit/VOC2012"])
def test_voc_from_any_of_its_folders(tmp_path, root):
    labels = voc_tree(tmp_path / "VOCdevkit" / "VOC2012")
    dataset = load_dataset(f"voc:{tmp_path / root}?size=native")
    assert dataset.names == tuple(labels)
    assert dataset.ignore == (255,)
    for i, name in enumerate(labels):
        assert np.array_equal(dataset[i].label.numpy(), labels[name])


def test_voc_is_resized_as_in_the_paper_unless_told_otherwise(tmp_path):
    voc_tree(tmp_path)
    _, image, label = load_dataset(f"voc:{tmp_path}")[0]
    assert image.shape == (3, 512, 682)
    assert label.shape == (512, 682)


def test_voc_colours_are_the_official_ones(tmp_path):
    voc_tree(tmp_path)
    dataset = load_dataset(f"voc:{tmp_path}")
    of = dict(zip(dataset.classes, dataset.palette))
    assert len(of) == 21
    assert of["background"] == (0, 0, 0)
    assert of["person"] == (192, 128, 128)
    assert of["bottle"] == (128, 0, 128)
    assert of["tvmonitor"] == (0, 64, 128)


def test_voc_with_augmented_labels(tmp_path):
    labels = voc_tree(tmp_path)
    extra = RANDOM.choice([0, 5, 255], (6, 8))
    save(tmp_path / "JPEGImages" / "2008_000001.jpg", photo(6, 8))
    save(tmp_path / "SegmentationClassAug" / "2008_000001.png", extra)  # grey, as augmented labels are
    save(tmp_path / "SegmentationClassAug" / "2007_000033.png", np.full((6, 8), 7))
    (tmp_path / "ImageSets" / "Segmentation" / "train_aug.txt").write_text(
        "/JPEGImages/2007_000033.jpg /SegmentationClassAug/2007_000033.png\n2008_000001\n"
    )
    both = load_dataset(f"voc:{tmp_path}?split=train_aug&size=native")
    assert both.names == ("2007_000033", "2008_000001")
    assert np.array_equal(both[0].label.numpy(), labels["2007_000033"])
    assert np.array_equal(both[1].label.numpy(), extra)
    augmented = load_dataset(f"voc:{tmp_path}?split=train_aug&size=native&labels=SegmentationClassAug")
    assert (augmented[0].label == 7).all()


# Cityscapes


def square(label, x, y, side, **more):
    return {"label": label, "polygon": [[x, y], [x + side, y], [x + side, y + side], [x, y + side]], **more}


OBJECTS = [
    square("road", 0, 0, 40),
    square("cargroup", 4, 4, 10),
    square("license plate", 6, 6, 2),  # never drawn: the car stays
    square("sky", 20, 0, 9, deleted=1),
    square("polegroup", 20, 10, 5),  # a label of its own, and void
    square("out of roi", 0, 18, 3),
    square("persongroup", 8, 8, 4),  # over the cars
    square("caravan", 15, 15, 3),
]
IDS = {"road": 7, "cargroup": 26, "polegroup": 18, "out of roi": 3, "persongroup": 24, "caravan": 29}
TRAIN_IDS = {"road": 0, "cargroup": 13, "polegroup": 255, "out of roi": 255, "persongroup": 11, "caravan": 255}


def drawn(numbers, background):
    canvas = Image.new("L", (32, 24), background)
    for item in OBJECTS:
        if item["label"] in numbers:
            x, y = item["polygon"][0]
            side = item["polygon"][1][0] - x
            ImageDraw.Draw(canvas).rectangle([x, y, x + side, y + side], fill=numbers[item["label"]])
    return canvas


def city_tree(root, name="ulm_000000_000019", kinds=("labelTrainIds", "labelIds", "polygons"), split="val"):
    city = name.split("_")[0]
    save(root / "leftImg8bit" / split / city / f"{name}_leftImg8bit.png", photo(24, 32))
    folder = root / "gtFine" / split / city
    folder.mkdir(parents=True, exist_ok=True)
    if "labelTrainIds" in kinds:
        save(folder / f"{name}_gtFine_labelTrainIds.png", drawn(TRAIN_IDS, 255))
    if "labelIds" in kinds:
        save(folder / f"{name}_gtFine_labelIds.png", drawn(IDS, 0))
    if "polygons" in kinds:
        content = {"imgHeight": 24, "imgWidth": 32, "objects": OBJECTS}
        (folder / f"{name}_gtFine_polygons.json").write_text(json.dumps(content))


@pytest.mark.parametrize("kind", ["auto", "labelTrainIds", "labelIds", "polygons"])
def test_cityscapes_labels_of_all_kinds_agree(tmp_path, kind):
    city_tree(tmp_path)
    name, image, label = load_dataset(f"cityscapes:{tmp_path}", labels=kind)[0]
    assert name == "ulm_000000_000019"
    assert image.shape == (3, 24, 32)
    assert np.array_equal(label.numpy(), np.array(drawn(TRAIN_IDS, 255)))
    assert set(label.unique().tolist()) == {0, 11, 13, 255}


@pytest.mark.parametrize(("kinds", "value"), [(["labelIds", "polygons"], "labelIds"), (["polygons"], "polygons")])
def test_cityscapes_takes_the_labels_there_are(tmp_path, kinds, value):
    city_tree(tmp_path, kinds=kinds)
    dataset = load_dataset(f"cityscapes:{tmp_path}")
    assert value in str(dataset.entries[0].label)
    assert np.array_equal(dataset[0].label.numpy(), np.array(drawn(TRAIN_IDS, 255)))


def test_cityscapes_cities_and_splits_in_order(tmp_path):
    for name in ("ulm_000001_000019", "aachen_000002_000019", "ulm_000000_000019"):
        city_tree(tmp_path, name, split="train")
    city_tree(tmp_path, "bonn_000000_000019")
    assert load_dataset(f"cityscapes:{tmp_path}?split=train").names == (
        "aachen_000002_000019", "ulm_000000_000019", "ulm_000001_000019",
    )  # fmt: skip


def test_cityscapes_label_ids():
    """The official table, in short: 19 of 34 ids count, in this order."""
    counted = [7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]
    expected = dict.fromkeys((*range(34), 255), 255) | {label_id: k for k, label_id in enumerate(counted)}
    assert expected == cityscapes.FROM_LABEL_ID
    assert cityscapes.CLASSES[13] == "car"
    assert cityscapes.PALETTE_BY_CLASS["car"] == (0, 0, 142)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a Cityscapes annotation"),
        ("[]", "is not a Cityscapes annotation"),
        (json.dumps({"imgHeight": 24, "imgWidth": 32, "objects": [square("dragon", 1, 1, 2)]}), "an object 'dragon'"),
        (json.dumps({"imgHeight": 24, "imgWidth": 32, "objects": [{"label": "car", "polygon": [[1]]}]}), "is not a"),
        (json.dumps({"imgHeight": 24, "imgWidth": 31, "objects": []}), "is 31 x 24 pixels but its image"),
    ],
)
def test_cityscapes_annotations_that_are_none(tmp_path, content, message):
    city_tree(tmp_path)
    path = tmp_path / "gtFine" / "val" / "ulm" / "ulm_000000_000019_gtFine_polygons.json"
    path.write_text(content)
    with pytest.raises(SegproxError, match=message) as refusal:
        load_dataset(f"cityscapes:{tmp_path}?labels=polygons")[0]
    assert str(path) in str(refusal.value)


# CamVid


def test_camvid_as_in_segnets_tutorial(tmp_path):
    label = RANDOM.integers(0, 12, (6, 8))
    save(tmp_path / "test" / "0001TP_008550.png", photo())
    save(tmp_path / "testannot" / "0001TP_008550.png", label)
    save(tmp_path / "train" / "x.png", photo())
    save(tmp_path / "trainannot" / "x.png", label * 0)
    dataset = load_dataset(f"camvid:{tmp_path}")
    assert dataset.names == ("0001TP_008550",)
    assert len(dataset.classes) == 11
    assert np.array_equal(dataset[0].label.numpy(), np.where(label == 11, 255, label))
    assert load_dataset(f"camvid:{tmp_path}?split=train").names == ("x",)


def original_camvid(root):
    shown = ["Sky", "SUVPickupTruck", "Child", "LaneMkgsDriv", "MotorcycleScooter"]
    colour_of = {name: colour for group in camvid.GROUPS.values() for name, colour in group.items()}
    pixels = np.array([[colour_of[name] for name in shown] + [(0, 0, 0)]] * 2)
    for name in ("0001TP_006690", "Seq05VD_f00000"):
        save(root / "701_StillsRaw_full" / f"{name}.png", photo(2, 6))
        save(root / "LabeledApproved_full" / f"{name}_L.png", pixels)


def test_camvid_as_it_was_published(tmp_path):
    original_camvid(tmp_path)
    dataset = load_dataset(f"camvid:{tmp_path}")
    assert len(dataset) == 2
    names = [dataset.classes[k] if k < 255 else "void" for k in dataset[0].label[1].tolist()]
    assert names == ["sky", "car", "pedestrian", "road", "bicyclist", "void"]


def test_camvid_with_a_list(tmp_path):
    original_camvid(tmp_path)
    (tmp_path / "val.txt").write_text("Seq05VD_f00000.png\n")
    assert load_dataset(f"camvid:{tmp_path}?split=val").names == ("Seq05VD_f00000",)
    (tmp_path / "val.txt").write_text("nothing\n")
    with pytest.raises(SegproxError, match=r"the image .*/nothing\.png is missing"):
        load_dataset(f"camvid:{tmp_path}?split=val")


def test_camvid_has_32_colours():
    assert len(camvid.FROM_COLOUR) == 32
    assert len(set(camvid.PALETTE)) == 11


def test_camvid_colours_that_mean_nothing(tmp_path):
    original_camvid(tmp_path)
    save(tmp_path / "LabeledApproved_full" / "0001TP_006690_L.png", np.full((2, 6, 3), (1, 2, 3)))
    with pytest.raises(SegproxError, match=r"0001TP_006690_L\.png has the colour \(1, 2, 3\)"):
        load_dataset(f"camvid:{tmp_path}")[0]


# ADE20K


def ade_tree(root, label):
    save(root / "images" / "validation" / "ADE_val_00000001.jpg", photo())
    save(root / "annotations" / "validation" / "ADE_val_00000001.png", label)


@pytest.mark.parametrize("root", ["", "ADEChallengeData2016"])
def test_ade20k(tmp_path, root):
    label = RANDOM.integers(0, 151, (6, 8))
    label[0, :2] = 0, 150
    ade_tree(tmp_path / "ADEChallengeData2016", label)
    dataset = load_dataset(f"ade20k:{tmp_path / root}")
    assert dataset.classes[0] == "class 1"
    assert len(set(dataset.palette)) == len(dataset.classes) == 150
    assert np.array_equal(dataset[0].label.numpy(), np.where(label == 0, 255, label - 1))


def test_ade20k_class_names(tmp_path):
    ade_tree(tmp_path, np.ones((6, 8)))
    rows = [f"{k}\t0.1\t1\t1\tthing {k}, other name" for k in range(1, 151)]
    path = tmp_path / "objectInfo150.txt"
    path.write_text("\n".join(["Idx\tRatio\tTrain\tVal\tName", *rows]))
    assert load_dataset(f"ade20k:{tmp_path}").classes[149] == "thing 150"
    path.write_text("\n".join(["Idx\tRatio\tTrain\tVal\tName", *rows[:9]]))
    with pytest.raises(SegproxError, match=r"objectInfo150\.txt must have 150 rows"):
        load_dataset(f"ade20k:{tmp_path}")


def test_ade20k_values_that_mean_nothing(tmp_path):
    ade_tree(tmp_path, np.full((6, 8), 151))
    with pytest.raises(SegproxError, match=r"ADE_val_00000001\.png has the value 151, which is not one of 0 to 150"):
        load_dataset(f"ade20k:{tmp_path}")[0]


# A folder


def test_folder_with_nothing_said(tmp_path):
    labels = folder_dataset(tmp_path, classes=4)
    labels["c"][2, 2] = 255
    save(tmp_path / "labels" / "c.png", labels["c"])
    dataset = load_dataset(f"folder:{tmp_path}")
    assert (dataset.classes, dataset.palette, dataset.ignore) == ((), (), (255,))  # the model's
    assert dataset.labelled
    for i, name in enumerate("abc"):
        assert np.array_equal(dataset[i].label.numpy(), labels[name])


@pytest.mark.parametrize("said", ["[road, sky]", "{0: road, 1: sky}", "{1: sky, 0: road}"])
def test_folder_with_a_class_file(tmp_path, said):
    save(tmp_path / "images" / "a.jpg", photo(1, 4))
    save(tmp_path / "labels" / "a.png", [[0, 1, 7, 9]])
    (tmp_path / "classes.yaml").write_text(f"classes: {said}\npalette: [[1, 2, 3], [4, 5, 6]]\nignore: [7, 9]\n")
    dataset = load_dataset(f"folder:{tmp_path}")
    assert dataset.classes == ("road", "sky")
    assert dataset.palette == ((1, 2, 3), (4, 5, 6))
    assert dataset[0].label.tolist() == [[0, 1, 255, 255]]


def test_folder_with_options_that_win(tmp_path):
    save(tmp_path / "images" / "a.jpg", photo(1, 4))
    save(tmp_path / "labels" / "a.png", [[0, 1, 2, 3]])
    (tmp_path / "classes.yaml").write_text("classes: [road, sky, car, tree]\n")
    reduced = load_dataset(f"folder:{tmp_path}?classes=x,y&ignore=3&reduce_labels=true")
    assert reduced.classes == ("x", "y")
    assert reduced[0].label.tolist() == [[255, 0, 1, 255]]
    assert load_dataset(f"folder:{tmp_path}?classes=4&ignore=0,2")[0].label.tolist() == [[255, 1, 255, 3]]


def test_no_label_is_read_before_its_sample(tmp_path):
    folder_dataset(tmp_path)
    for name in "bc":
        (tmp_path / "labels" / f"{name}.png").write_bytes(b"no picture")
    whole, part = load_dataset(f"folder:{tmp_path}"), load_dataset(f"folder:{tmp_path}?subset=1")
    assert whole.classes == part.classes
    assert torch.equal(whole[0].label, part[0].label)
    with pytest.raises(SegproxError, match=r"cannot read .*b\.png as a picture"):
        whole[1]


def test_colours_say_how_many_classes_there_are(tmp_path):
    folder_dataset(tmp_path, classes=2)
    (tmp_path / "classes.yaml").write_text("palette: [[1, 2, 3], [4, 5, 6]]\n")
    assert load_dataset(f"folder:{tmp_path}").classes == ("class 0", "class 1")


def test_reduced_labels_keep_255_void(tmp_path):
    save(tmp_path / "images" / "a.jpg", photo(1, 4))
    save(tmp_path / "labels" / "a.png", [[0, 1, 3, 255]])
    dataset = load_dataset(f"folder:{tmp_path}?reduce_labels=yes")
    assert dataset[0].label.tolist() == [[255, 0, 2, 255]]
    (tmp_path / "classes.yaml").write_text("classes: {1: road, 2: sky, 3: car}\nreduce_labels: true\n")
    assert load_dataset(f"folder:{tmp_path}").classes == ("road", "sky", "car")


def test_more_classes_than_8_bits_hold(tmp_path):
    save(tmp_path / "images" / "a.png", photo(1, 4))
    save(tmp_path / "labels" / "a.png", Image.fromarray(np.array([[0, 255, 299, 999]], dtype=np.uint16)))
    dataset = load_dataset(f"folder:{tmp_path}?classes=300&ignore=999")
    assert dataset.ignore == (-1,)  # 255 is a class here
    assert dataset[0].label.tolist() == [[0, 255, 299, -1]]
    with pytest.raises(SegproxError, match=r"has the value 255, which is not one of 0 to 254, 999; correct"):
        load_dataset(f"folder:{tmp_path}?ignore=999")[0]


def test_folder_with_splits(tmp_path):
    for split, name in (("train", "a"), ("val", "b")):
        save(tmp_path / "images" / split / f"{name}.png", photo())
        save(tmp_path / "labels" / split / f"{name}.png", np.zeros((6, 8)))
    assert load_dataset(f"folder:{tmp_path}?split=val").names == ("b",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("classes: [a, b", r"classes\.yaml is not YAML"),
        ("- a", r"classes\.yaml must say what the classes are"),
        ("classes: {0: a, 2: b}", r"classes of .*classes\.yaml must be numbered from 0 without gaps, but are \[0, 2\]"),
        ("classes: [a]\npalette: [[0, 0, 300]]", r"palette of .*classes\.yaml cannot be 300"),
        ("classes: [a]\npalette: [[0, 0, 0], [1, 1, 1]]", r"palette of .* has 2 colours for 1 classes"),
        ("klasses: [a]", r"classes\.yaml has no option 'klasses'; its options are: classes, palette"),
    ],
)
def test_class_files_that_make_no_sense(tmp_path, content, message):
    folder_dataset(tmp_path)
    (tmp_path / "classes.yaml").write_text(content)
    with pytest.raises(SegproxError, match=message):
        load_dataset(f"folder:{tmp_path}")


def test_labels_that_never_count(tmp_path):
    save(tmp_path / "images" / "a.png", photo())
    save(tmp_path / "labels" / "a.png", np.full((6, 8), 255))
    assert load_dataset(f"folder:{tmp_path}")[0].label.unique().tolist() == [255]


# Images without labels


def test_images_without_labels(tmp_path):
    for name in ("b.jpg", "a.webp", "c.tif", "notes.txt", ".hidden.png"):
        (save(tmp_path / name, photo()) if name != "notes.txt" else (tmp_path / name).write_text("x"))
    dataset = load_dataset(f"images:{tmp_path}?size=4x3")
    assert dataset.names == ("a", "b", "c")
    assert not dataset.labelled
    assert dataset.classes == ()
    sample = dataset[1]
    assert (sample.label == 255).all()
    assert sample.label.shape == (3, 4)
    own = with_own_labels(sample, torch.full((3, 4), 2, dtype=torch.int32))
    assert own.name == "b"
    assert own.label.dtype == torch.int64
    assert (own.label == 2).all()
    with pytest.raises(SegproxError, match=r"the prediction of b must have shape \[3, 4\]"):
        with_own_labels(sample, torch.zeros(4, 3))


# Hugging Face


class Table(list):
    """As much of a Hugging Face table as is needed; `decoded` says which columns were read."""

    def __init__(self, rows, decoded):
        super().__init__(rows)
        self.decoded = decoded

    @property
    def column_names(self):
        return list(super().__getitem__(0))

    def select_columns(self, names):
        return Table([{name: row[name] for name in names} for row in self], self.decoded)

    def __getitem__(self, index):
        self.decoded.append(tuple(super().__getitem__(index)))
        return super().__getitem__(index)


@pytest.fixture
def fake_hugging_face(monkeypatch):
    def install(loaded):
        def load(path):
            if isinstance(loaded, Exception):
                raise loaded
            return loaded

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=load))

    return install


def rows(count=3, label="annotation"):
    maps = [RANDOM.integers(0, 4, (6, 8)).astype(np.uint8) for _ in range(count)]
    table = [{"image": Image.fromarray(photo().astype(np.uint8)), label: Image.fromarray(m), "id": 1} for m in maps]
    return maps, Table(table, [])


def test_hugging_face_table(tmp_path, fake_hugging_face):
    maps, table = rows()
    fake_hugging_face(table)
    dataset = load_dataset(f"hf-dataset:{tmp_path}?classes=4&subset=1:")
    assert dataset.names == ("row-000001", "row-000002")
    assert np.array_equal(dataset[1].label.numpy(), maps[2])
    assert table.decoded == [("image",), ("annotation",)]  # one sample, and no column beside it


def test_hugging_face_splits_and_columns(tmp_path, fake_hugging_face):
    maps, table = rows(label="mask")
    fake_hugging_face({"train": Table([], []), "val": table})
    dataset = load_dataset(f"hf-dataset:{tmp_path}?split=val&label=mask&reduce_labels=1&classes=3")
    assert np.array_equal(dataset[0].label.numpy(), np.where(maps[0] == 0, 255, maps[0].astype(int) - 1))


@pytest.mark.parametrize(
    ("loaded", "options", "message"),
    [
        ({"train": 0, "val": 0}, "", "there is no split '' in .*; say split= one of: train, val"),
        ({"train": 0}, "?split=test", "there is no split 'test' in"),
        (rows()[1], "?split=test", "has no splits, so there is no split 'test'"),
        (rows(label="mask")[1], "", "there is no column 'label' in .*; its columns are: image, mask, id"),
        (rows()[1], "?label=id&classes=2", "row 0, column id of .* holds no picture but int"),
        (FileNotFoundError("no dataset_info.json"), "", r"is not a dataset written by save_to_disk \(no dataset_info"),
    ],
)
def test_hugging_face_refusals(tmp_path, fake_hugging_face, loaded, options, message):
    fake_hugging_face(loaded)
    with pytest.raises(SegproxError, match=message):
        load_dataset(f"hf-dataset:{tmp_path}{options}")[0]


def test_hugging_face_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SegproxError, match=r"hf-dataset needs the package datasets: pip install 'segprox\[datasets\]'"):
        load_dataset(f"hf-dataset:{tmp_path}")


def test_hugging_face_for_real(tmp_path):
    datasets = pytest.importorskip("datasets")
    maps, table = rows()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Image()})
    content = {"image": [row["image"] for row in table], "label": [row["annotation"] for row in table]}
    datasets.Dataset.from_dict(content, features=features).save_to_disk(tmp_path / "saved")
    dataset = load_dataset(f"hf-dataset:{tmp_path / 'saved'}")
    assert dataset.classes == ()
    assert np.array_equal(dataset[2].label.numpy(), maps[2])


# Names and files that are wrong


@pytest.mark.parametrize("source", DATASETS)
def test_every_source_says_what_it_reads(source):
    assert len(DATASETS[source].layout) > 10


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("voc", "voc needs the folder it is in, as in voc:/path/to/folder"),
        ("demo:/data", "demo takes no folder but got '/data'"),
        ("demo?length=0", "length of demo cannot be '0'"),
        ("voc:/no/such/folder", "root of voc cannot be '/no/such/folder': there is no such folder"),
        ("images:.?colour=3", "images has no option 'colour'; its options are: root, size, subset, ids"),
        ("images:.?subset=0:x", "subset of images cannot be '0:x': a subset is a number"),
        ("images:.?subset=::0", "subset of images cannot be '::0': the step of a slice must be at least 1"),
        ("images:.?subset=0", "subset of images cannot be '0'"),
        ("images:.?ids=/no/such.txt", "ids of images cannot be '/no/such.txt': cannot read /no/such.txt"),
        ("cityscapes:.?labels=colours", "labels of cityscapes cannot be 'colours'"),
        ("cityscapes:.", "there is no leftImg8bit in .*, so it is not Cityscapes"),
        ("voc:.", "there is no ImageSets/Segmentation in .*, so it is not Pascal VOC"),
        ("camvid:.", "there is neither testannot nor 701_StillsRaw_full"),
        ("folder:.", "there is no folder labels; for images without labels say images:."),
        ("images:.", "there are no images of this dataset in"),
    ],
)
def test_names_that_make_no_sense(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SegproxError, match=message):
        load_dataset(name)


def break_label_size(root):
    save(root / "labels" / "b.png", np.zeros((6, 9)))


def break_label_value(root):
    save(root / "labels" / "b.png", np.full((6, 8), 9))


def break_label_mode(root):
    save(root / "labels" / "b.png", photo())


def truncate(kind):
    def cut(root):
        path = root / kind / "b.png"
        path.write_bytes(path.read_bytes()[:60])

    return cut


@pytest.mark.parametrize(
    ("break_it", "options", "message"),
    [
        (break_label_size, "", r"labels/b\.png is 9 x 6 pixels but its image .*images/b\.png is 8 x 6"),
        (break_label_value, "", r"labels/b\.png has the value 9, which is not one of 0 to 3, 255"),
        (break_label_mode, "", r"labels/b\.png is a picture of mode RGB, not a map of class numbers"),
        (truncate("images"), "", r"cannot read .*images/b\.png as a picture"),
        (truncate("labels"), "", r"cannot read .*labels/b\.png as a picture"),
        (lambda root: (root / "labels" / "b.png").unlink(), "", r"the label .*labels/b\.png is missing"),
        (lambda root: save(root / "images" / "b.jpg", photo()), "", r"image name 'b' occurs 2 times, as in .*/b\."),
        (lambda root: None, "&ids=a,x", "there is no image 'x' in .*; names are such as 'a'"),
        (lambda root: None, "&ids=a,b,a", "the image name 'a' occurs 2 times"),
        (lambda root: None, "&subset=7:", "subset '7:' leaves none of the 3 images in"),
        (lambda root: None, "&split=val", "there is no folder .*labels/val"),
    ],
)
def test_file_problems_name_the_file(tmp_path, break_it, options, message):
    folder_dataset(tmp_path)
    break_it(tmp_path)
    with pytest.raises(SegproxError, match=message):
        load_dataset(f"folder:{tmp_path}?classes=4{options}")[1]


def test_a_missing_split_is_named(tmp_path):
    voc_tree(tmp_path)
    city_tree(tmp_path)
    ade_tree(tmp_path, np.ones((6, 8)))
    with pytest.raises(SegproxError, match=r"cannot read .*Segmentation/nine\.txt"):
        load_dataset(f"voc:{tmp_path}?split=nine")
    with pytest.raises(SegproxError, match=r"there is no folder .*leftImg8bit/nine"):
        load_dataset(f"cityscapes:{tmp_path}?split=nine")
    with pytest.raises(SegproxError, match=r"there is no folder .*images/nine"):
        load_dataset(f"ade20k:{tmp_path}?split=nine")
    (tmp_path / "ImageSets" / "Segmentation" / "val.txt").write_text("\n")
    with pytest.raises(SegproxError, match="there are no images of this dataset in"):
        load_dataset(f"voc:{tmp_path}")


def test_a_missing_label_can_be_left_out(tmp_path):
    folder_dataset(tmp_path)
    (tmp_path / "labels" / "b.png").unlink()
    assert len(load_dataset(f"folder:{tmp_path}?ids=a,c")) == 2


def test_palette_pngs_are_read_as_numbers(tmp_path):
    label = RANDOM.integers(0, 256, (6, 8))
    assert np.array_equal(read_index(save(tmp_path / "a.png", palette_png(label))), label)


def test_official_numbers_of_classes():
    assert len(voc.CLASSES) == 21
    assert len(cityscapes.CLASSES) == 19
