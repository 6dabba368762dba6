from types import SimpleNamespace

import pytest
import torch
from torch import nn

import segprox
from segprox import Segmenter, SegproxError


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
    torch.testing.assert_close(Segmenter(model, channels=[3, 1])(IMAGES), model.conv(IMAGES)[:, [3, 1]])


def test_one_channel_is_seen_as_two_logits():
    model = Returns(lambda z: z - z.mean(), channels=1)  # of both signs, so no probability
    two = Segmenter(model, binary=True)(IMAGES)
    torch.testing.assert_close(two.softmax(1)[:, 1:], model(IMAGES).sigmoid())


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


class NeedsMultiples(nn.Module):
    """Refuses sides that are not multiples of 8; sees one pixel each."""

    def __init__(self):
        super().__init__()
        self.seen = None

    def forward(self, x):
        assert x.shape[2] % 8 == 0
        assert x.shape[3] % 8 == 0
        self.seen = x
        return torch.cat([x, -x], dim=1)


def test_pads_to_a_multiple_with_normalised_zeros_and_crops():
    network = NeedsMultiples()
    images = torch.rand(1, 3, 9, 21)
    logits = Segmenter(network, mean=(0.5,), std=(0.25,), multiple=8)(images)
    assert network.seen.shape == (1, 3, 16, 24)
    assert network.seen[:, :, 9:].abs().sum() + network.seen[:, :, :, 21:].abs().sum() == 0
    torch.testing.assert_close(logits[:, :3], (images - 0.5) / 0.25)


def test_resizes_to_the_only_size_a_network_takes_and_back():
    network = NeedsMultiples()
    images = torch.rand(1, 3, 9, 21)
    logits = Segmenter(network, resize=(16, 8))(images)
    assert network.seen.shape == (1, 3, 16, 8)
    assert logits.shape == (1, 6, 9, 21)
    smooth = torch.linspace(0, 1, 21).expand(1, 3, 9, 21)
    assert (Segmenter(network, resize=(16, 16))(smooth)[:, :3] - smooth).abs().max() < 0.05


def test_channels_last_changes_no_logits():
    torch.manual_seed(0)
    network, images = nn.Conv2d(3, 4, 3, padding=1), torch.rand(2, 3, 8, 8)
    plain = Segmenter(network)(images)
    torch.testing.assert_close(Segmenter(network, channels_last=True)(images), plain)
    assert network.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("options", [{"multiple": 0}, {"multiple": 8, "resize": (8, 8)}])
def test_sizes_that_make_no_sense(options):
    with pytest.raises(SegproxError, match="multiple must be at least 1, and 1 beside resize"):
        Segmenter(nn.Conv2d(3, 2, 1), **options)


def test_precision_of_a_model_by_name(monkeypatch):
    images = torch.rand(1, 3, 32, 32)
    full = segprox.load_model("demo-standard")(images)
    double = segprox.load_model("demo-standard?precision=float64")
    assert next(double.parameters()).dtype == torch.float64
    assert double(images).dtype == torch.float32
    torch.testing.assert_close(double(images), full, rtol=1e-4, atol=1e-4)
    low = segprox.load_model("demo-standard", precision="bfloat16")
    assert not torch.equal(low(images), full)
    assert torch.equal(low.full_precision(images), full)
    assert low.autocast is torch.bfloat16
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda network: compiled.append(network) or network)
    segprox.load_model("demo-standard", compile=True)
    assert len(compiled) == 1
