"""The attack against closed-form optima, and the promises every attack makes."""

import pytest
import torch

import segprox
from segprox import AlmaProx, Problem, Segmenter
from tests.oracles import (
    Linear,
    channels_as_logits,
    random_linear,
    smallest_norm,
    smallest_targeted,
    smallest_untargeted,
)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def grey_images(batch, channels, seed=0, spread=0.03):
    """So close to mid-grey that norms are of real size and the box does not matter."""
    return 0.5 + spread * (2 * torch.rand(batch, channels, 32, 32, generator=generator(seed)) - 1)


def holes(labels, seed=0):
    return labels.masked_fill(torch.rand(labels.shape, generator=generator(seed)) < 0.3, 255)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("masked", [False, True])
class TestClosedForm:
    def test_untargeted(self, batch, masked):
        # With one channel per class all classes are equally hard to reach: the nearest is the one with the second
        # largest logit, and there are no other local minima.
        model, images = channels_as_logits(4), grey_images(batch, 4)
        labels = model(images).argmax(1)
        sizes = smallest_untargeted(model, images, labels)
        given = holes(labels) if masked else labels
        problem = Problem.build(images, given)
        found = AlmaProx().run(model, problem)
        assert found.success.all()
        best = smallest_norm(sizes, problem.mask, 0.99)
        assert (found.norm <= 1.05 * best).all(), (found.norm / best).tolist()
        assert (found.norm >= 0.999 * best).all()

    def test_targeted(self, batch, masked):
        model, images = channels_as_logits(4), grey_images(batch, 4)
        targets = torch.randint(0, 4, images[:, 0].shape, generator=generator(1))
        problem = Problem.build(images, holes(targets) if masked else None, target=targets)
        found = AlmaProx().run(model, problem)
        assert found.success.all()
        best = smallest_norm(smallest_targeted(images, targets), problem.mask, 0.99)
        assert (found.norm <= 1.05 * best).all(), (found.norm / best).tolist()
        assert (found.norm >= 0.999 * best).all()


def test_norm_is_never_below_the_optimum():
    model, images = random_linear(5, 3), grey_images(2, 3)
    labels = model(images).argmax(1)
    found = AlmaProx(steps=200).run(model, Problem.build(images, labels))
    assert found.success.all()
    assert (found.norm >= 0.999 * smallest_norm(smallest_untargeted(model, images, labels), labels >= 0, 0.99)).all()


@pytest.mark.parametrize("classes", [2, 3])
def test_few_classes(classes):
    model, images = channels_as_logits(classes), grey_images(2, classes)
    labels = model(images).argmax(1)
    best = smallest_norm(smallest_untargeted(model, images, labels), labels >= 0, 0.99)
    found = AlmaProx().run(model, Problem.build(images, labels))
    assert (found.norm <= 1.05 * best).all(), (found.norm / best).tolist()
    target = AlmaProx(steps=300).run(model, Problem.build(images, target=0))
    assert target.success.all()


@pytest.mark.parametrize("field", ["masking", "derivative", "multiplier_of"])
def test_every_choice_breaks_an_easy_model(field):
    model, images = random_linear(5, 3), grey_images(1, 3)
    labels = model(images).argmax(1)
    choices = {"masking": ["none", "fixed"], "derivative": ["authors"], "multiplier_of": ["unscaled"]}
    norms = [
        AlmaProx(steps=300, **{field: choice}).run(model, Problem.build(images, labels, threshold=0.9))
        for choice in choices[field]
    ]
    assert all(found.success.all() for found in norms)


def small_network(seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3, padding=1)
    return Segmenter(torch.nn.Sequential(*layers))


@pytest.mark.parametrize("threads", [1, 2])
def test_batch_equals_alone_bit_for_bit(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model, images = small_network(), torch.rand(4, 3, 24, 20, generator=generator(3))
        labels = holes(model(images).argmax(1))
        attack = AlmaProx(steps=40, step_size=5e-3)
        together = attack.run(model, Problem.build(images, labels))
        for i in range(4):
            alone = attack.run(model, Problem.build(images[i : i + 1], labels[i : i + 1]))
            for name in ("images", "norm", "apsr", "success", "forwards", "backwards"):
                assert torch.equal(getattr(together, name)[i : i + 1], getattr(alone, name)), name
    finally:
        torch.set_num_threads(before)


def test_order_of_images_does_not_matter():
    model, images = small_network(), torch.rand(3, 3, 16, 16, generator=generator(4))
    labels, attack = model(images).argmax(1), AlmaProx(steps=20, step_size=5e-3)
    forth = attack.run(model, Problem.build(images, labels))
    back = attack.run(model, Problem.build(images.flip(0), labels.flip(0)))
    assert torch.equal(forth.images, back.images.flip(0))


def test_void_pixels_have_no_influence():
    model, images = small_network(), torch.rand(2, 3, 16, 16, generator=generator(5))
    labels = model(images).argmax(1)
    void = torch.rand(labels.shape, generator=generator(6)) < 0.4
    attack = AlmaProx(steps=30, step_size=5e-3)
    marked = attack.run(model, Problem.build(images, labels.masked_fill(void, 255)))
    otherwise = attack.run(model, Problem.build(images, labels.masked_fill(void, 3), mask=~void))
    assert torch.equal(marked.images, otherwise.images)
    assert torch.equal(marked.apsr, otherwise.apsr)


def test_mixed_batch_of_void_already_wrong_and_normal():
    model, images = random_linear(4, 3), grey_images(3, 3)
    labels = model(images).argmax(1)
    labels[0] = 255
    labels[1] = (labels[1] + 1) % 4
    found = AlmaProx(steps=150).run(model, Problem.build(images, labels))
    assert found.success.tolist() == [False, True, True]
    assert found.apsr[0] == 0
    assert found.norm[:2].tolist() == [0, 0]
    assert torch.equal(found.images[:2], images[:2])
    assert found.norm[2] > 0


@pytest.mark.parametrize("threshold", [0.5, 0.99, 1.0])
@pytest.mark.parametrize("target", [None, 2])
def test_report_equals_recomputation(threshold, target):
    model, images = small_network(), torch.rand(3, 3, 16, 16, generator=generator(8))
    labels = holes(model(images).argmax(1))
    options = {"target": target, "threshold": threshold, "steps": 120, "step_size": 5e-3}
    found = segprox.attack(model, images, labels, "alma-prox", **options)
    assert found.images.min() >= 0
    assert found.images.max() <= 1
    predicted, counted = model(found.images).argmax(1), labels != 255
    right = predicted != labels if target is None else predicted == target
    apsr = torch.stack([r[c].double().mean() for r, c in zip(right, counted)])
    torch.testing.assert_close(found.apsr, apsr)
    assert torch.equal(found.success, apsr >= threshold)
    assert torch.equal(found.norm, (found.images - images).abs().amax((1, 2, 3)))
    assert found.forwards.tolist() == [120] * 3
    assert found.backwards.tolist() == [119] * 3


def test_saturated_images_stay_in_the_box():
    images = torch.rand(2, 3, 16, 16, generator=generator(9)).round()  # every value 0 or 1
    model = small_network()
    found = AlmaProx(steps=100, step_size=1e-2).run(model, Problem.build(images, model(images).argmax(1)))
    assert found.images.min() >= 0
    assert found.images.max() <= 1
    assert (found.norm > 0).all()


def test_scale_of_logits_does_not_matter():
    images = grey_images(1, 3)
    weight = torch.randn(5, 3, generator=generator(0))
    small, large = Segmenter(Linear(weight)), Segmenter(Linear(1024 * weight))  # a power of two: no rounding
    labels = small(images).argmax(1)
    attack = AlmaProx(steps=50)
    norms = [attack.run(model, Problem.build(images, labels)).norm for model in (small, large)]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-3, atol=0)


def test_more_steps_find_no_larger_norms():
    model, images = random_linear(5, 3), grey_images(1, 3)
    labels = model(images).argmax(1)
    few, many = (AlmaProx(steps=n).run(model, Problem.build(images, labels)).norm for n in (150, 500))
    assert (many <= few).all()


def test_callback_sees_every_iteration():
    seen = []
    model, images = random_linear(4, 3), grey_images(2, 3)
    problem = Problem.build(images, model(images).argmax(1))
    AlmaProx(steps=12, step_size=0.02).run(model, problem, seen.append)
    assert [progress.iteration for progress in seen] == list(range(1, 13))
    assert seen[0].norm.tolist() == [0, 0]
    assert all(set(progress.details) == {"scale", "step_size", "multiplier"} for progress in seen)
    assert all(values.shape == (2,) for values in seen[-1].details.values())
    assert (seen[-1].norm > 0).all()


def test_step_sizes_fall_from_the_first_success_to_the_decayed_value():
    seen = []
    model, images = random_linear(4, 3), grey_images(1, 3)
    AlmaProx(steps=200, step_size=1e-3).run(model, Problem.build(images, model(images).argmax(1)), seen.append)
    sizes = torch.stack([progress.details["step_size"] for progress in seen]).flatten()
    first = next(i for i, progress in enumerate(seen) if progress.apsr >= 0.99)
    assert first < 100
    torch.testing.assert_close(sizes[: first + 1], torch.full((first + 1,), 1e-3))
    assert (sizes[first:].diff() < 0).all()
    assert sizes[-1].item() == pytest.approx(1e-4, rel=0.1)


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_an_automatic_step_grows_with_the_distance_to_go(scale):
    # The same problem, further apart: the step follows, and so does the norm.
    model, images, seen = channels_as_logits(4), grey_images(2, 4, spread=0.02 * scale), []
    labels = model(images).argmax(1)
    best = smallest_norm(smallest_untargeted(model, images, labels), labels >= 0, 0.99)
    found = AlmaProx().run(model, Problem.build(images, labels), seen.append)
    first = next(progress.details["step_size"] for progress in seen if "step_size" in progress.details)
    assert (first > 3e-3).all() if scale > 1 else (first <= 2e-3).all()
    assert (found.norm <= 1.1 * best).all(), (found.norm / best).tolist()
    assert (found.forwards <= 500).all()


def test_a_fixed_step_is_the_papers_and_spends_every_query():
    model, images, seen = random_linear(4, 3), grey_images(1, 3), []
    found = AlmaProx(steps=150, step_size=1e-3).run(model, Problem.build(images, model(images).argmax(1)), seen.append)
    assert seen[0].details["step_size"].item() == pytest.approx(1e-3)
    assert found.forwards.item() == 150


class NanAbove(torch.nn.Module):
    """A network that breaks down for bright images."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit
        self.inner = random_linear(4, 3).model

    def forward(self, x):
        logits = self.inner(x)
        return torch.where(x.amax((1, 2, 3), keepdim=True) > self.limit, torch.nan, logits)


def test_nan_logits_spoil_only_their_own_image():
    model, images = Segmenter(NanAbove(0.95)), grey_images(2, 3)
    labels = model(images).argmax(1)
    images[0, 0, 0, 0] = 1.0
    attack = AlmaProx(steps=150)
    found = attack.run(model, Problem.build(images, labels))
    assert found.success.tolist() == [False, True]
    assert found.apsr[0] == 0
    assert found.images.isfinite().all()
    alone = attack.run(model, Problem.build(images[1:], labels[1:]))
    assert torch.equal(found.images[1:], alone.images)


def test_empty_batch():
    found = AlmaProx(steps=2).run(
        small_network(), Problem.build(torch.rand(0, 3, 8, 8), torch.zeros(0, 8, 8, dtype=torch.long))
    )
    assert found.images.shape == (0, 3, 8, 8)
    assert found.norm.shape == (0,)


def test_works_under_no_grad_and_in_float64():
    model, images = small_network().double(), torch.rand(1, 3, 16, 16, dtype=torch.float64, generator=generator(11))
    with torch.no_grad():
        found = AlmaProx(steps=20, step_size=5e-3).run(model, Problem.build(images, model(images).argmax(1)))
    assert found.norm.dtype == torch.float64
    assert found.norm > 0
