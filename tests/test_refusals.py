"""Every refusal: one clear sentence that names the value and what was expected."""

import pytest
import torch
from torch import nn

import segprox
from segprox import Problem, Segmenter, SegproxError

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
