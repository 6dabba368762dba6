import math

import pytest
import torch
from torch import nn

from segprox import Problem, Segmenter
from segprox.attacks.objectives import OBJECTIVES, gradient
from segprox.tracker import Tracker
from tests.oracles import Linear, channels_as_logits

LOG_2, LOG_4 = math.log(2), math.log(4)

# Two pixels of label (or target) 0 to compute with by hand: one is 0, the other 2.
RIGHT, WRONG = [4, 2, 2], [1, 1, 2]  # e^z, so p = (1/2, 1/4, 1/4) and (1/4, 1/4, 1/2)
CE = [LOG_2, LOG_4]
TO_LABEL = torch.tensor([[-1 / 2, 1 / 4, 1 / 4], [-3 / 4, 1 / 4, 1 / 2]]).double()  # p - e_y, the gradient of CE


def ask(odds, labels, model=None, **options):
    """A problem, and the answer of a model whose logits are log `odds`: `[B, H, W, K]`, between 1 and 4."""
    images = torch.tensor(odds, dtype=torch.float64).log().movedim(-1, 1) / LOG_4
    labels = torch.as_tensor(labels)
    wanted = {"target": labels} if options.pop("targeted", False) else {"labels": labels}
    problem = Problem.build(images, **wanted, **options)
    classes = images.shape[1]
    model = model or Segmenter(Linear(LOG_4 * torch.eye(classes).double(), torch.zeros(classes).double()))
    return Tracker(model, problem, "linf", "most").query(problem.images), problem


def check(name, expected, *case, progress=0.0, **options):
    values = OBJECTIVES[name](*ask(*case, **options), progress).values
    assert values.flatten().tolist() == pytest.approx(expected, rel=1e-6, abs=1e-12)


def check_both(name, untargeted, targeted, progress=0.0):
    """Values at a right and a wrong pixel; targeted, these are the satisfied and the pending one."""
    check(name, untargeted, [[[RIGHT, WRONG]]], [[[0, 0]]], progress=progress)
    check(name, targeted, [[[RIGHT, WRONG]]], [[[0, 0]]], progress=progress, targeted=True)


def check_weights(name, untargeted, targeted, progress=0.0):
    """Cross-entropy times these weights, which are constants to the gradient."""
    check_both(
        name,
        [w * ce for w, ce in zip(untargeted, CE)],
        [-w * ce for w, ce in zip(targeted, CE)],
        progress,
    )
    for weights, sign, is_targeted in ((untargeted, 1, False), (targeted, -1, True)):
        query, problem = ask([[[RIGHT, WRONG]]], [[[0, 0]]], targeted=is_targeted)
        pullback = OBJECTIVES[name](query, problem, progress).pullback
        expected = sign * torch.tensor([[2.0], [3.0]]) * torch.tensor(weights).double()[:, None] * TO_LABEL
        found = pullback(torch.tensor([[[2.0, 3.0]]]).double())[0, :, 0].T
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)


def test_ce_counts_every_pixel():
    check_weights("ce", [1, 1], [1, 1])


@pytest.mark.parametrize("progress", [0.0, 0.5, 0.8])
def test_segpgd_turns_from_pending_pixels_to_all(progress):
    pending, satisfied = 1 - progress / 2, progress / 2
    check_weights("segpgd", [pending, satisfied], [satisfied, pending], progress)


def test_cospgd_weighs_by_the_cosine_of_softmax_and_label():
    norm = math.sqrt(1 / 4 + 1 / 16 + 1 / 16)  # of either p
    check_weights("cospgd", [1 / 2 / norm, 1 / 4 / norm], [1 - 1 / 2 / norm, 1 - 1 / 4 / norm])


def test_masked_ce_counts_pending_pixels_only():
    check_weights("masked-ce", [1, 0], [0, 1])


def test_balanced_ce_divides_by_the_pixels_of_the_class_in_the_image():
    # The first image has two pixels of class 0 and one of class 1; the ignored one must not pass for class 0. The
    # second has one of class 0 and three of class 1, of which the last is no longer pending.
    zero, one, two = [4, 2, 2], [2, 4, 2], [1, 1, 2]
    labels = [[[0, 0], [1, 255]], [[1, 1], [0, 1]]]
    query, problem = ask([[[zero, zero], [one, zero]], [[one, one], [zero, two]]], labels)
    values = OBJECTIVES["balanced-ce"](query, problem, 0.0).values
    counted = values[problem.mask].tolist()
    assert counted == pytest.approx([LOG_2 / 2, LOG_2 / 2, LOG_2, LOG_2 / 3, LOG_2 / 3, LOG_2, 0.0])
    pulled = OBJECTIVES["balanced-ce"](query, problem, 0.0).pullback(torch.ones(2, 2, 2).double())
    at_label = pulled.gather(1, problem.labels[:, None])[:, 0][problem.mask].tolist()
    assert at_label == pytest.approx([-1 / 4, -1 / 4, -1 / 2, -1 / 6, -1 / 6, -1 / 2, 0.0])


def test_balanced_ce_counts_targets_when_there_are_targets():
    # Both reached and pending pixels of the target count, and only pending ones are in the loss.
    odds = [[[RIGHT, WRONG, WRONG, [4, 2, 2]]]]
    check("balanced-ce", [0, -LOG_4 / 3, -LOG_4 / 3, -LOG_4], odds, [[[0, 0, 0, 2]]], targeted=True)


def test_dl_is_how_far_the_attack_leads():
    check_both("dl", [-LOG_2, LOG_2], [LOG_2, -LOG_2])


def test_dlr_divides_by_the_range_of_logits():
    case = [[[[4, 2, 1, 1], [1, 2, 4, 1]]]], [[[0, 0]]]
    check("dlr", [-1 / 2, 1], *case)
    check("dlr", [1 / 2, -1], *case, targeted=True)


def test_js_flips_with_a_target():
    right = (math.log(2 / 3) / 2 + LOG_2 / 2 + math.log(4 / 3)) / 2  # p = (1/2, 1/4, 1/4), mean (3/4, 1/8, 1/8)
    wrong = (math.log(2 / 5) / 4 + 3 * LOG_2 / 4 + math.log(8 / 5)) / 2  # p = (1/4, 1/4, 1/2), mean (5/8, 1/8, 1/4)
    check_both("js", [right, wrong], [-right, -wrong])


def test_houdini_flips_with_a_target():
    chance = (1 + math.erf(LOG_2 / math.sqrt(2))) / 2  # class 2 leads by log 2
    check_both("houdini", [LOG_2 / 2, chance * LOG_4], [-LOG_2 / 2, -chance * LOG_4])


@pytest.mark.parametrize(
    ("progress", "values"),
    [
        (0.0, [(1 - 1 / 8) / 3, (1 - 1 / 64) / 3]),  # q = -2
        (1 / 3, [(1 - 1 / 4) / 2, (1 - 1 / 16) / 2]),  # q = -1
        (2 / 3, [1 - 1 / 2, 1 - 1 / 4]),  # q = 0
        (5 / 6, [2 * (1 - math.sqrt(1 / 2)), 2 * (1 - 1 / 2)]),  # q = 1/2
        (1.0, CE),
    ],
)
def test_tsallis_ends_as_cross_entropy(progress, values):
    check_both("tsallis", values, [-value for value in values], progress)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("targeted", [False, True])
def test_attacks_go_away_from_labels_and_towards_targets(name, targeted):
    query, problem = ask([[[[4, 2, 1], [1, 2, 4], [2, 4, 1]]]], [[[0, 0, 0]]], targeted=targeted)
    pulled = OBJECTIVES[name](query, problem, 0.5).pullback(torch.ones(1, 1, 3).double())[0, 0]
    towards = pulled if targeted else -pulled
    assert (towards >= -1e-15).all()  # 0 where DLR is as large as it gets
    assert towards.sum() > 0.1


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("targeted", [False, True])
def test_ignored_pixels_might_as_well_not_be_there(name, targeted):
    alone = gradient(OBJECTIVES[name], *ask([[[RIGHT, WRONG]]], [[[0, 0]]], targeted=targeted), 0.5)
    for void in ([4, 1, 1], [1, 1, 4]):  # as if right, as if wrong
        among = ask([[[RIGHT, void, WRONG]]], [[[0, 255, 0]]], targeted=targeted)
        found = gradient(OBJECTIVES[name], *among, 0.5)
        assert (found[..., 1] == 0).all()
        assert alone.abs().sum() > 0
        torch.testing.assert_close(found[..., [0, 2]], alone)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_image_without_counted_pixels_has_no_gradient(name):
    query, problem = ask([[[RIGHT, WRONG]], [[RIGHT, WRONG]]], [[[255, 255]], [[0, 0]]])
    found = gradient(OBJECTIVES[name], query, problem, 0.5)
    assert (found[0] == 0).all()
    assert (found[1] != 0).any()


class Neighbours(nn.Module):
    """Logits of a pixel depend on the pixel before it too; `hole` is added to those of the last pixel."""

    def __init__(self, hole):
        super().__init__()
        self.hole = nn.Parameter(torch.tensor(hole, dtype=torch.float64))

    def forward(self, x):
        mixed = 2 * x + 0.5 * x.roll(1, -1)
        return torch.cat([mixed[..., :-1], mixed[..., -1:] + self.hole], -1)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nan_at_a_pixel_counts_as_0_and_poisons_no_other(name):
    odds = [[[[4, 3, 2], [1, 3, 4]]]]
    query, problem = ask(odds, [[[0, 0]]], Segmenter(Neighbours(torch.nan)))
    assert query.logits[0, :, 0].isnan().all(0).tolist() == [False, True]
    found = gradient(OBJECTIVES[name], query, problem, 0.5)
    without = gradient(OBJECTIVES[name], *ask(odds, [[[0, 255]]], Segmenter(Neighbours(0.0))), 0.5)
    assert (without != 0).any(1).all()  # both pixels have a say in the first one's logits
    fewer = 4 if name == "balanced-ce" else 2  # the mean is over two pixels, and the class has two
    torch.testing.assert_close(found, without / fewer)


def random_case(targeted, dtype=torch.float64):
    """A model that sees each pixel's channels, and two images with different numbers of ignored pixels."""
    g = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(4, 3, dtype=dtype, generator=g), torch.randn(4, dtype=dtype, generator=g)
    images = torch.rand(2, 3, 3, 4, dtype=dtype, generator=g)
    labels = torch.randint(0, 4, (2, 3, 4), generator=g)
    labels[0, 0, :3] = 255
    wanted = {"target": labels} if targeted else {"labels": labels}
    return Segmenter(Linear(weight, bias)), Problem.build(images, **wanted)


def written_out(name, weight, bias, images, problem):
    """The sum over images of the mean over counted pixels, pixel by pixel."""
    total = 0.0
    for image, labels, mask in zip(images, problem.labels, problem.mask):
        pixels = []
        for i, j in mask.nonzero().tolist():
            odds = torch.exp(weight @ image[:, i, j] + bias)
            p = odds / odds.sum()
            label = nn.functional.one_hot(labels[i, j], len(p)).double()
            mean = (p + label) / 2
            js = ((p * (p / mean).log()).sum() - (label * mean.log()).sum()) / 2
            pixels.append(js if name == "js" else -(p * label).sum().log())
        total = total + torch.stack(pixels).mean()
    return -total if problem.targeted else total


@pytest.mark.parametrize("name", ["ce", "js"])
@pytest.mark.parametrize("targeted", [False, True])
def test_gradients_with_respect_to_images(name, targeted):
    model, problem = random_case(targeted)
    tracker = Tracker(model, problem, "linf", "most")
    found = gradient(OBJECTIVES[name], tracker.query(problem.images), problem, 0.5)
    leaf = problem.images.clone().requires_grad_()
    (expected,) = torch.autograd.grad(written_out(name, model.model.weight, model.model.bias, leaf, problem), leaf)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert tracker.backwards.tolist() == [1, 1]


@pytest.mark.parametrize("name", ["ce", "js", "tsallis", "houdini", "dl", "dlr"])  # no constants among these
@pytest.mark.parametrize("targeted", [False, True])
def test_gradients_match_finite_differences(name, targeted):
    model, problem = random_case(targeted)
    tracker, h = Tracker(model, problem, "linf", "most"), 1e-6
    inner = 0.01 + 0.98 * problem.images  # stay within the range
    direction = torch.randn(inner.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = (gradient(OBJECTIVES[name], tracker.query(inner), problem, 0.5) * direction).flatten(1).sum(1)

    def mean(images):
        values = OBJECTIVES[name](tracker.query(images), problem, 0.5).values
        return torch.stack([value[mask].mean() for value, mask in zip(values, problem.mask)])

    numeric = (mean(inner + h * direction) - mean(inner - h * direction)) / (2 * h)
    torch.testing.assert_close(found, numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("targeted", [False, True])
def test_gradients_do_not_depend_on_the_batch(name, targeted):
    model, problem = random_case(targeted, torch.float32)

    def of(chosen):
        part = Problem(problem.images[chosen], problem.labels[chosen], problem.mask[chosen], targeted)
        query = Tracker(model, part, "linf", "most").query(part.images)
        return gradient(OBJECTIVES[name], query, part, 0.5)

    together = of([0, 1])
    for i in range(2):
        assert torch.equal(of([i])[0], together[i])


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("targeted", [False, True])
def test_certain_pixels_have_finite_gradients(name, targeted):
    model = channels_as_logits(3, scale=1e4)  # every p is 0 or 1 in float32
    images = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [0.0, 0.0, 0.5]]).view(1, 3, 1, 3)
    labels = torch.zeros(1, 1, 3, dtype=torch.long)
    problem = Problem.build(images, **{"target" if targeted else "labels": labels})
    query = Tracker(model, problem, "linf", "most").query(images)
    for progress in (0.0, 0.5, 1.0):
        _, pullback = OBJECTIVES[name](query, problem, progress)
        assert pullback(torch.ones(1, 1, 3)).isfinite().all()


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_smooth_apsr_is_a_sigmoid_of_the_margin_that_gets_steeper(progress):
    margins = [math.log(4 / 2), math.log(1 / 2)]  # of the right and the wrong pixel; their mean size is log 2
    width = 0.03**progress * LOG_2
    wrong = [1 / (1 + math.exp(m / width)) for m in margins]
    check_both("smooth-apsr", wrong, [1 - share for share in wrong], progress)


def test_smooth_apsr_does_not_depend_on_the_scale_of_logits():
    weights, factor = torch.full((1, 1, 2), 0.5).double(), 1e3
    gradients = []
    for scale in (1.0, factor):
        model = Segmenter(Linear(scale * LOG_4 * torch.eye(3).double(), torch.zeros(3).double()))
        query, problem = ask([[[RIGHT, WRONG]]], [[[0, 0]]], model=model)
        gradients.append(OBJECTIVES["smooth-apsr"](query, problem, 0.5).pullback(weights))
    torch.testing.assert_close(gradients[0], factor * gradients[1])
