"""Windows, scales and flips: averages and gradients against plain autograd, and against MMSegmentation's own."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import segprox
from segprox import Segmenter, SegproxError
from segprox.models import held_bytes, make_lean
from segprox.models.windows import places

from .oracles import channels_as_logits, smallest_norm, smallest_untargeted

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)


def network(classes=4):
    """Its logits depend on the whole window, by the pooled branch, so a wrong window shows everywhere in it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, classes, 1)

        def forward(self, x):
            x = torch.relu(self.first(x))
            return self.last(x + torch.sigmoid(x.mean((2, 3), keepdim=True)))

    torch.manual_seed(3)
    return Net()


def gradient(model, images, ask=None):
    images = images.clone().requires_grad_()
    logits = (ask or model.logits)(images)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)
    return torch.autograd.grad(logits, images, weights)[0]


def by_autograd(net, images, window, stride, multiple=1):
    """The definition, with every window in one graph."""
    mean, std = (torch.tensor(v, dtype=images.dtype).view(-1, 1, 1) for v in (MEAN, STD))
    height, width = images.shape[2:]
    fed = functional.pad((images - mean) / std, (0, -width % multiple, 0, -height % multiple))
    total, count = 0, 0
    for top in starts(fed.shape[2], window[0], stride[0]):
        for left in starts(fed.shape[3], window[1], stride[1]):
            piece = fed[:, :, top : top + window[0], left : left + window[1]]
            logits = functional.interpolate(net(piece), size=piece.shape[2:], mode="bilinear", align_corners=False)
            around = (
                left, fed.shape[3] - left - piece.shape[3], top, fed.shape[2] - top - piece.shape[2],
            )  # fmt: skip
            total, count = total + functional.pad(logits, around), count + functional.pad(logits * 0 + 1, around)
    return (total / count)[:, :, :height, :width]


def starts(length, window, stride):
    found = [0]
    while found[-1] + window < length:
        found.append(min(found[-1] + stride, length - window))
    return found


@pytest.mark.parametrize(
    ("size", "window", "stride", "multiple"),
    [
        ((20, 30), (8, 12), (8, 12), 1),
        ((20, 30), (8, 12), (5, 7), 1),  # strides that do not divide
        ((20, 30), (8, 40), (5, 9), 1),  # as wide as the image
        ((6, 30), (8, 12), (8, 5), 1),  # smaller than the window in one direction
        ((6, 7), (8, 12), (4, 4), 1),  # and in both
        ((21, 30), (8, 12), (4, 8), 4),
        ((3, 3), (8, 12), (4, 8), 4),
        ((8, 12), (8, 12), (1, 1), 1),
    ],
)
def test_windows_are_the_average_of_all_and_so_is_the_gradient(size, window, stride, multiple):
    net = network().double()
    model = Segmenter(net, mean=MEAN, std=STD, window=window, stride=stride, multiple=multiple)
    images = torch.rand(2, 3, *size, dtype=torch.float64)

    def ask(x):
        return by_autograd(net, x, window, stride, multiple)

    torch.testing.assert_close(model(images), ask(images), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient(model, images), gradient(model, images, ask), rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, (8, 12)])
@pytest.mark.parametrize("tta", [(1,), ("flip",), (0.75, 1, 1.25, "flip"), (0.5,)])
def test_views_are_the_mean_of_probabilities_and_so_is_the_gradient(tta, window):
    net = network().double()
    model = Segmenter(net, mean=MEAN, std=STD, window=window, stride=window and 6, tta=tta)
    images = torch.rand(1, 3, 18, 25, dtype=torch.float64)

    def ask(x):
        each, scales = [], [scale for scale in tta if scale != "flip"] or [1]
        for scale in scales:
            for flip in (False, True) if "flip" in tta else (False,):
                size = tuple(math.floor(side * scale + 0.5) for side in (18, 25))
                seen = functional.interpolate(x, size=size, mode="bilinear", align_corners=False)
                seen = seen.flip(3) if flip else seen
                logits = by_autograd(net, seen, window or size, (6, 6))
                logits = logits.flip(3) if flip else logits
                logits = functional.interpolate(logits, size=(18, 25), mode="bilinear", align_corners=False)
                each.append(logits.softmax(1))
        return torch.stack(each).mean(0).log()

    torch.testing.assert_close(model(images), ask(images), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient(model, images), gradient(model, images, ask), rtol=0, atol=1e-12)


def test_finite_differences():
    model = Segmenter(network(2).double(), window=(3, 4), stride=2, tta=(1.5, "flip"))
    assert torch.autograd.gradcheck(model.logits, torch.rand(1, 3, 3, 4, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("tta", [(), (0.5, 1, "flip")])
def test_images_of_a_batch_do_not_see_each_other(tta):
    model = Segmenter(network(), window=(8, 8), stride=5, tta=tta)
    images = torch.rand(3, 3, 20, 17)
    alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model(images), alone, rtol=1e-6, atol=1e-6)
    images[1] = 0.5
    torch.testing.assert_close(model(images)[[0, 2]], alone[[0, 2]], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_lean_within_windows_has_the_same_gradient(recompute):
    plain, lean = (Segmenter(network(), window=(32, 32), stride=20, tta=(1, 0.5)) for _ in range(2))
    made = make_lean(lean, recompute=recompute)
    assert made.plain == ()
    assert made.error < 1e-9
    images = torch.rand(1, 3, 50, 70)
    torch.testing.assert_close(gradient(lean, images), gradient(plain, images), rtol=1e-4, atol=1e-6)
    assert torch.equal(lean.logits(images), plain.logits(images))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network().double()

    def forward(self, x):
        return self.net(x + 0.1 * torch.randn_like(x)) * torch.rand(())


def test_random_numbers_of_a_network_are_drawn_again_in_the_backward():
    model = Segmenter(Noisy(), window=(8, 8), stride=5, tta=(1, "flip"))
    images, move = torch.rand(2, 1, 3, 15, 12, dtype=torch.float64)

    def ask(x):
        torch.manual_seed(5)
        return model.logits(x)

    def value(x):
        logits = ask(x)
        return (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)).sum()

    slope = (gradient(model, images, ask) * move).sum()
    difference = (value(images + 1e-6 * move) - value(images - 1e-6 * move)) / 2e-6
    assert slope.item() == pytest.approx(difference.item(), rel=1e-6)
    logits = model.logits(images.clone().requires_grad_())
    after = torch.get_rng_state()
    logits.sum().backward()
    assert torch.equal(torch.get_rng_state(), after)  # a backward takes no random numbers from others


def test_what_is_held_is_that_of_one_window():
    images = torch.rand(1, 3, 96, 128)
    model = Segmenter(network(), window=(16, 16), stride=16)
    one = held_bytes(model, images[:, :, :16, :16].clone())
    assert held_bytes(model, images) == one + images.nbytes
    assert held_bytes(Segmenter(network()), images) > 20 * one
    many = Segmenter(network(), window=(16, 16), stride=16, tta=(1, 2, "flip"))
    logits = many.logits(images)
    assert held_bytes(many, images) == one + images.nbytes + logits.nbytes
    assert held_bytes(many.to("meta"), images.to("meta")) == one + images.nbytes + logits.nbytes


def test_the_optimum_is_the_same_by_windows():
    """Logits of a pixel depend on its own channels only, so windows change nothing, and the answer is known."""
    plain = channels_as_logits(3)
    model = Segmenter(plain.model, window=(5, 6), stride=4)
    images = 0.3 + 0.4 * torch.rand(1, 3, 12, 11)
    labels = plain(images).argmax(1)
    result = segprox.attack(model, images, labels, "palma", steps=100)
    best = smallest_norm(smallest_untargeted(plain, images, labels), torch.ones_like(labels, dtype=torch.bool), 0.99)
    assert result.success.all()
    assert (result.norm / best).item() == pytest.approx(1, abs=0.02)


def test_attacks_in_lower_precision_and_by_name():
    @segprox.register_model("windowed-net")
    def make():
        return network()

    name = "windowed-net?window=16x24&stride=12&tta=0.5,1,flip&precision=bfloat16&lean=true"
    model = segprox.load_model(name)
    assert (model.window, model.stride, model.tta) == ((16, 24), (12, 12), (0.5, 1.0, "flip"))
    images = torch.rand(2, 3, 40, 50)
    result = segprox.attack(model, images, model(images).argmax(1), "fmn", steps=3)
    assert result.norm.isfinite().all()
    assert result.forwards.min() >= 3
    assert segprox.load_model("windowed-net?window=16&stride=8x4").stride == (8, 4)
    assert segprox.load_model("windowed-net?window=whole").window is None


def test_a_segmenter_by_name_is_used_by_windows_and_views():
    shared = Segmenter(network(), mean=MEAN, std=STD, window=(16, 16), stride=8)
    segprox.register_model("windowed-segmenter")(lambda: shared)
    images = torch.rand(1, 3, 40, 50)
    for options, expected in (
        ("window=16x24&stride=12", {"window": (16, 24), "stride": 12}),
        ("stride=4", {"window": (16, 16), "stride": 4}),
        ("window=whole&tta=0.5,flip", {"tta": (0.5, "flip")}),
    ):
        model = segprox.load_model(f"windowed-segmenter?{options}")
        assert model(images).equal(Segmenter(network(), mean=MEAN, std=STD, **expected)(images))
    assert (shared.window, shared.stride, shared.tta) == ((16, 16), (8, 8), ())
    with pytest.raises(segprox.SegproxError, match=r"stride=.* needs a window"):
        segprox.load_model("demo-standard?stride=4")


def test_what_describes_a_model_changes_only_where_windows_are_used():
    assert {"window", "stride", "tta"}.isdisjoint(Segmenter(network()).described())
    described = Segmenter(network(), window=(8, 8), tta=("flip",)).described()
    assert (described["window"], described["stride"], described["tta"]) == ((8, 8), (8, 8), ("flip",))


def test_probabilities_are_told_in_windows_and_views():
    for options in ({"window": (8, 8)}, {"tta": (1, "flip")}, {"window": (8, 8), "tta": (0.5,)}):
        model = Segmenter(nn.Sequential(network(), nn.Softmax(1)), **options)
        with pytest.raises(SegproxError, match="seems to return probabilities"):
            model(torch.rand(1, 3, 20, 20))


def test_a_network_without_gradients_has_none_by_windows():
    class Rounded(nn.Module):
        def forward(self, x):
            return x.detach().round()

    for options in ({"window": (8, 8)}, {"tta": (1, "flip")}):
        model = Segmenter(Rounded(), **options)
        assert not gradient(model, torch.rand(1, 3, 20, 20)).any()


def test_nan_stays_in_its_windows():
    class Brittle(nn.Module):
        def forward(self, x):
            return torch.where(x.amax() > 0.9, torch.nan, x)

    images = 0.5 * torch.rand(1, 3, 8, 24)
    images[..., 2] = 1
    logits = Segmenter(Brittle(), window=(8, 8))(images)
    assert logits[..., :8].isnan().all()
    assert logits[..., 8:].isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": 8}, r"stride=8 needs a window, such as window=\(1024, 1024\)"),
        ({"window": (8, 8), "stride": 9}, "between 1 and the window's 8x8, .* but is 9x9"),
        ({"window": (8, 8), "stride": (8, 0)}, "between 1 and the window's 8x8, .* but is 8x0"),
        ({"window": (0, 8)}, "between 1 and the window's 0x8"),
        ({"window": (8, 12), "multiple": 8}, "sides that are multiples of 8 but is 8x12"),
        ({"window": (8, 8), "resize": (8, 8)}, "neither windows nor scales"),
        ({"tta": (0.5,), "resize": (8, 8)}, "neither windows nor scales"),
        ({"tta": (1, 1)}, r"each of them once, but is \[1, 1\]"),
        ({"tta": (0,)}, r"scales between 0 and 16, and 'flip', .* but is \[0\]"),
        ({"tta": (math.nan,)}, "scales between 0 and 16"),
        ({"tta": ("mirror",)}, "scales between 0 and 16, and 'flip'"),
    ],
)
def test_refused(options, message):
    with pytest.raises(SegproxError, match=message):
        Segmenter(network(), **options)


def test_places_cover_the_image():
    for size in ((1, 1), (7, 20), (64, 65)):
        for window, stride in (((5, 8), (5, 8)), ((5, 8), (3, 1)), ((70, 70), (1, 1))):
            seen = torch.zeros(size)
            for place in places(size, window, stride):
                seen[place] += 1
            assert seen.min() >= 1
