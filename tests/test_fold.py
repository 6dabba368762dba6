"""Batch norms folded into convolutions."""

import copy

import pytest
import torch
from torch import nn

import segprox
from segprox import Segmenter, SegproxError
from segprox.models import fold_batch_norms
from segprox.models.lean import fold


def norm(channels):
    """A batch norm that is far from the identity."""
    made = nn.BatchNorm2d(channels)
    made.running_mean.normal_()
    made.running_var.uniform_(0.5, 2)
    nn.init.uniform_(made.weight, 0.5, 2)
    nn.init.normal_(made.bias)
    return made


class Wired(nn.Module):
    """Modules a, b, c with batch norms, connected as a function says."""

    def __init__(self, connect):
        super().__init__()
        self.connect = connect
        self.a, self.norm_a = nn.Conv2d(3, 3, 3, padding=1), norm(3)
        self.b, self.norm_b = nn.Conv2d(3, 3, 1, bias=False), norm(3)

    def forward(self, x):
        return self.connect(self, x)


def segmenter(connect):
    return Segmenter(Wired(connect).eval())


IMAGES = torch.rand(2, 3, 16, 24, generator=torch.Generator().manual_seed(0))
FOLDABLE = {
    "in a row": (lambda m, x: m.norm_b(m.b(m.norm_a(m.a(x)).relu())), 2),
    "a residual": (lambda m, x: x + m.norm_a(m.a(x)), 1),
    "an activation between": (lambda m, x: m.norm_a(m.a(x).relu()), 0),
    "a result used twice": (lambda m, x: m.norm_a(h := m.a(x)) + h, 0),
    "a result that two norms see": (lambda m, x: m.norm_a(h := m.a(x)) + m.norm_b(h), 0),
    "a convolution that runs twice": (lambda m, x: m.norm_a(m.a(x)) + m.a(x * 2), 0),
    "a norm that runs twice": (lambda m, x: m.norm_a(m.a(x)) + m.norm_a(m.b(x)), 0),
    "a norm before the convolution": (lambda m, x: m.a(m.norm_a(x)), 0),
    "a norm whose weights are read": (lambda m, x: m.norm_a(m.a(x)) + m.norm_a.weight[0], 0),
    "a result whose values are read": (lambda m, x: m.norm_a(h := m.a(x)) * h.detach().mean(), 0),
}


@pytest.mark.parametrize("kind", FOLDABLE)
def test_what_is_folded(kind):
    connect, expected = FOLDABLE[kind]
    model = segmenter(connect)
    before = model(IMAGES)
    assert fold_batch_norms(model) == expected
    torch.testing.assert_close(model(IMAGES), before)
    assert sum(isinstance(module, nn.Identity) for module in model.modules()) == expected
    assert {value.dtype for value in model.parameters()} == {torch.float32}


def test_groups_strides_and_transposed_convolutions():
    network = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, groups=3, padding=1), norm(6), nn.ReLU(),
        nn.ConvTranspose2d(6, 4, 2, stride=2, bias=False), norm(4), nn.ReLU(),
        nn.ConvTranspose2d(4, 4, 3, groups=2, padding=1), norm(4),
    ).eval()  # fmt: skip
    model, kept = Segmenter(copy.deepcopy(network)), Segmenter(network)
    assert fold_batch_norms(model) == 2  # torch cannot fuse transposed ones in groups
    torch.testing.assert_close(model(IMAGES), kept(IMAGES))


def test_nothing_stays_half_done(monkeypatch):
    model = segmenter(FOLDABLE["in a row"][0])
    before, modules = model(IMAGES), list(model.modules())
    fuse, fused = fold.fuse_conv_bn_eval, []

    def fails_later(*args):
        if fused:
            raise RuntimeError("no more")
        fused.append(fuse(*args))
        return fused[0]

    monkeypatch.setattr(fold, "fuse_conv_bn_eval", fails_later)
    assert fold_batch_norms(model) == 0
    assert list(model.modules()) == modules
    assert torch.equal(model(IMAGES), before)


def test_norms_in_train_mode_stay():
    model = segmenter(FOLDABLE["in a row"][0])
    model.model.norm_a.train()
    assert fold_batch_norms(model) == 1  # the other one
    assert isinstance(model.model.norm_a, nn.BatchNorm2d)


class Picky(nn.Module):
    def forward(self, x):
        if x.shape[-1] != 8:
            raise KeyError("eight or nothing")
        return x


@pytest.mark.parametrize(
    ("option", "complaint"),
    [("fold=true", "no batch norm"), ("lean=true", "small random image"), ("lean=recompute", "small random image")],
)
def test_what_is_asked_for_by_name_comes_true_or_fails(option, complaint):
    with pytest.raises(SegproxError, match=complaint):
        segprox.load_model(f"python:tests.test_fold:Picky?{option}")
    segprox.load_model("python:tests.test_fold:Picky?lean=auto")


def test_a_network_that_takes_no_random_image():
    assert fold_batch_norms(Segmenter(Picky())) == 0


def test_by_name():
    plain = segprox.load_model("demo-standard")
    folded = segprox.load_model("demo-standard?fold=true&lean=recompute")
    kinds = [type(module) for module in folded.modules()]
    assert nn.BatchNorm2d in [type(module) for module in plain.modules()]
    assert nn.BatchNorm2d not in kinds
    images = segprox.load_dataset("demo")[0].image[None]
    torch.testing.assert_close(folded(images), plain(images), rtol=1e-3, atol=1e-4)
