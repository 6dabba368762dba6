from types import SimpleNamespace

import pytest
import torch
from torch import nn

import segprox
from segprox import Segmenter


class Returns(nn.Module):
    """A network whose output is wrapped in some way."""

    def __init__(self, wrap, channels=4, stride=1):
        super().__init__()
        self.wrap = wrap
        self.conv = nn.Conv2d(3, channels, 3, stride, 1)

    def forward(self, x):
        return self.wrap(self.conv(x))


IMAGES = torch.rand(2, 3, 8, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda z: z,
        lambda z: (z, "auxiliary"),
        lambda z: [z],
        lambda z: {"out": z, "aux": None},
        lambda z: {"logits": z},
        lambda z: SimpleNamespace(logits=z),
    ],
)
def test_unwraps_outputs(wrap):
    model = Returns(wrap)
    torch.testing.assert_close(Segmenter(model)(IMAGES), model.conv(IMAGES))


def test_resizes_smaller_logits_bilinearly():
    model = Returns(lambda z: z, stride=2)
    expected = nn.functional.interpolate(model.conv(IMAGES), size=(8, 12), mode="bilinear", align_corners=False)
    torch.testing.assert_close(Segmenter(model)(IMAGES), expected)


def test_resizes_when_a_stride_does_not_divide_the_size():
    assert Segmenter(Returns(lambda z: z, stride=4))(torch.rand(1, 3, 33, 50)).shape == (1, 4, 33, 50)


def test_normalises_inside():
    seen = []

    class Spy(nn.Module):
        def forward(self, x):
            seen.append(x)
            return x

    mean, std = (10.0, 20.0, 30.0), (2.0, 4.0, 5.0)
    Segmenter(Spy(), mean=mean, std=std, bgr=True, scale_255=True)(IMAGES)
    expected = (IMAGES[:, [2, 1, 0]] * 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(seen[0], expected)


def test_keeps_a_subset_of_classes_in_the_given_order():
    model = Returns(lambda z: z)
    torch.testing.assert_close(Segmenter(model, classes=[3, 1])(IMAGES), model.conv(IMAGES)[:, [3, 1]])


def test_one_channel_is_seen_as_two_logits():
    model = Returns(lambda z: z, channels=1)
    two = Segmenter(model, binary=True)(IMAGES)
    torch.testing.assert_close(two.softmax(1)[:, 1:], model.conv(IMAGES).sigmoid())


def test_probabilities_become_logits_when_told():
    model = Returns(lambda z: z.softmax(1))
    logits = Segmenter(model, output="probabilities")(IMAGES)
    torch.testing.assert_close(logits.softmax(1), model(IMAGES))


def test_one_probability_becomes_two_logits_when_told():
    model = Returns(lambda z: z.sigmoid(), channels=1)
    logits = Segmenter(model, binary=True, output="probabilities")(IMAGES)
    torch.testing.assert_close(logits.softmax(1)[:, 1:], model(IMAGES))


@pytest.mark.parametrize("channels", [1, 4])
def test_what_looks_like_probabilities_passes_when_said_to_be_logits(channels):
    model = Returns(lambda z: z.softmax(1) if channels > 1 else z.sigmoid(), channels)
    logits = Segmenter(model, binary=channels == 1, output="logits")(IMAGES)
    torch.testing.assert_close(logits[:, -channels:], model(IMAGES))


def test_parameters_are_frozen_and_gradients_reach_the_images():
    segmenter = Segmenter(Returns(lambda z: z))
    images = IMAGES.clone().requires_grad_()
    segmenter(images).sum().backward()
    assert images.grad is not None
    assert not any(p.requires_grad for p in segmenter.parameters())


def test_eval_mode_is_enforced():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(0.5))
    segmenter = Segmenter(model)
    segmenter.train()
    assert not model.training
    model.train()  # behind the wrapper's back
    assert torch.equal(segmenter(IMAGES), segmenter(IMAGES))
    assert not model[1].training


def test_half_precision_yields_float32_logits():
    segmenter = Segmenter(Returns(lambda z: z).to(torch.bfloat16))
    assert segmenter(IMAGES).dtype == torch.float32


def test_attack_leaves_a_plain_network_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    model.train()
    model[0].bias.requires_grad_(False)
    before = model[1].running_mean.clone()
    segprox.attack(model, IMAGES, torch.zeros(2, 8, 12, dtype=torch.long), steps=2)
    assert model.training
    assert model[1].training
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
    assert torch.equal(model[1].running_mean, before)


def test_normalisation_is_not_part_of_the_weights():
    assert set(Segmenter(nn.Conv2d(3, 2, 1)).state_dict()) == {"model.weight", "model.bias"}
