"""The attack without gradients: squares, scores, and models that hide their gradients."""

import pytest
import torch
from torch import nn

import segprox
from segprox import Segmenter, make_attack
from segprox.attacks.square import propose
from tests.oracles import channels_as_logits


class Rounded(nn.Module):
    """A channel per class, seen in steps of 1/64: it has no gradient."""

    def forward(self, x):
        return 7 * (x * 64).round() / 64


def scene(size=16):
    image = 0.5 + 0.06 * (torch.rand(4, size, size, generator=torch.Generator().manual_seed(0)) - 0.5)
    return image, Segmenter(Rounded())(image[None]).argmax(1)[0]


def test_one_square_in_every_cell():
    images = torch.zeros(3, 2, 24, 32)
    sources = [torch.Generator().manual_seed(seed) for seed in range(3)]
    found = propose(images, 2, 8, sources)
    for cells, inside, signs in zip(found.cells, found.inside, found.signs):
        for cell in cells.unique():
            here = (cells == cell) & inside
            assert here.sum() <= 4  # less where the border of the image cuts it
            assert ((cells == cell).sum() < 64) or here.sum() == 4
            assert all(len(plane[here].unique()) <= 1 for plane in signs)
    assert set(found.signs.unique().tolist()) == {-1.0, 1.0}
    assert not torch.equal(found.inside[0], found.inside[1])


def test_cells_are_judged_each_on_its_own():
    found = propose(torch.zeros(1, 1, 16, 16), 2, 4, [torch.Generator().manual_seed(0)])
    before = torch.full((1, 16, 16), 5)
    worse = found.cells == found.cells[0, 8, 8]
    assert torch.equal(found.better_cells(before, before + worse.long()), ~worse)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_it_needs_no_gradient(norm):
    image, label = scene()
    model = Segmenter(Rounded())
    attack = make_attack("square-minimal", norm=norm, steps=600, side=1)
    with torch.inference_mode():
        found = attack(model, image[None], label[None], threshold=0.9)
    assert found.success.item()
    assert (found.forwards.item(), found.backwards.item()) == (600, 0)
    first = found.traces[0][0]
    assert found.norm.item() < 0.8 * first.norm


def test_it_comes_near_the_optimum_of_a_linear_model():
    image, _ = scene()
    model = channels_as_logits(4)
    label = model(image[None]).argmax(1)
    exact = segprox.attack(model, image[None], label, threshold=0.9).norm.item()
    found = make_attack("square-minimal", steps=600, side=1)(model, image[None], label, threshold=0.9)
    assert exact <= found.norm.item() < 2.5 * exact


@pytest.mark.filterwarnings("ignore:segprox check is red")  # as it should
@pytest.mark.parametrize(("epsilon", "masked"), [("16/255", True), ("0.1/255", False)])
def test_an_audit_says_that_gradients_are_masked(epsilon, masked):
    attacks = make_attack("palma", steps=10), make_attack("square", steps=300, side=1)
    audit = segprox.audit(Segmenter(Rounded()), [scene()], *attacks, epsilon=epsilon, threshold=0.9, progress=False)
    assert [finding.masked for finding in audit.findings] == [masked]
    name = audit.findings[0].image
    assert (f"Gradients are masked on {name}: square, which asks for no gradient," in audit.sentence) is masked


def test_an_audit_of_true_gradients_does_not_say_so():
    model, (image, _) = channels_as_logits(4), scene()
    data = [(image, model(image[None]).argmax(1)[0])]
    attacks = make_attack("palma", steps=60), make_attack("square", steps=60)
    audit = segprox.audit(model, data, *attacks, epsilon="16/255", progress=False)
    assert not any(finding.masked for finding in audit.findings)
    assert "masked" not in audit.sentence
