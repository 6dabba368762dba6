"""The embedded default: scenes and networks."""

import pytest
import torch

import segprox
from segprox.data.synthetic import CLASSES, StreetScenes
from segprox.models.demo import StreetNet


def test_scenes_are_deterministic_and_different():
    one, again, other = StreetScenes()[3], StreetScenes()[3], StreetScenes()[4]
    assert torch.equal(one.image, again.image)
    assert torch.equal(one.label, again.label)
    assert not torch.equal(one.image, other.image)
    assert not torch.equal(one.image, StreetScenes(split="train")[3].image)
    assert not torch.equal(one.image, StreetScenes(seed=1)[3].image)


def test_scenes_are_8_bit_images_with_every_class_and_void():
    labels = set()
    for i in range(12):
        _, image, label = StreetScenes()[i]
        assert image.shape == (3, 128, 256)
        assert label.shape == (128, 256)
        torch.testing.assert_close(image * 255, (image * 255).round(), rtol=0, atol=1e-4)
        labels |= set(label.unique().tolist())
    assert labels == {*range(len(CLASSES)), 255}


@pytest.mark.parametrize("index", [-1, 100])
def test_scenes_end(index):
    with pytest.raises(IndexError):
        StreetScenes()[index]


def unseen_accuracy(model, count=20, first=50):
    right = counted = 0
    for i in range(first, first + count):
        sample = segprox.load_dataset("demo")[i]
        valid = sample.label != 255
        right += (model(sample.image[None]).argmax(1)[0] == sample.label)[valid].sum().item()
        counted += valid.sum().item()
    return right / counted


@pytest.mark.parametrize(("name", "least"), [("demo-standard", 0.95), ("demo-robust", 0.88)])
def test_accuracy_on_unseen_scenes(name, least):
    assert unseen_accuracy(segprox.load_model(name)) >= least


def test_networks_are_small():
    assert sum(p.numel() for p in StreetNet().parameters()) * 4 < 1_000_000


def test_robust_model_needs_a_larger_perturbation():
    sample = segprox.load_dataset("demo")[0]
    norms = {}
    for name in ("demo-standard", "demo-robust"):
        model = segprox.load_model(name)
        # nine pixels of ten, so that fewer steps do
        found = segprox.attack(model, sample.image[None], sample.label[None], threshold=0.9, steps=60)
        assert found.success.all()
        norms[name] = found.norm.item()
    assert norms["demo-robust"] > 3 * norms["demo-standard"]
