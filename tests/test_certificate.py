"""Never below a certificate: networks whose Lipschitz constants are known by construction, and all attacks on them."""

import math

import pytest
import torch
from torch import nn

from segprox import Problem, Sample, Segmenter, make_attack
from segprox.attacks import ATTACKS, norms
from segprox.norms import distance
from segprox.run import check_model
from segprox.run.certificate import certify, lipschitz

THRESHOLD = 0.5  # few steps reach it


def generator(seed):
    return torch.Generator().manual_seed(seed)


def orthogonal(channels, seed):
    """A 1x1 convolution that keeps l2 norms."""
    layer = nn.Conv2d(channels, channels, 1)
    layer.weight.data = torch.linalg.qr(torch.randn(channels, channels, generator=generator(seed)))[0][..., None, None]
    layer.bias.data.zero_()
    return layer


def row_sums_of_one(inputs, outputs, kernel, seed):
    """A convolution that never enlarges linf norms."""
    layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
    weight = torch.randn(layer.weight.shape, generator=generator(seed))
    layer.weight.data = weight / weight.abs().sum((1, 2, 3), keepdim=True)
    layer.bias.data.zero_()
    return layer


def isometry():
    return Segmenter(nn.Sequential(orthogonal(3, 0), orthogonal(3, 1)), std=(0.5, 0.5, 0.5))


def contraction():
    return Segmenter(nn.Sequential(row_sums_of_one(3, 6, 3, 0), nn.ReLU(), row_sums_of_one(6, 4, 3, 1)))


def linear():
    return Segmenter(row_sums_of_one(3, 4, 1, 2))


MODELS = {"isometry": isometry, "contraction": contraction, "linear": linear}


def scene(model, batch=2):
    images = torch.rand(batch, 3, 8, 10, generator=generator(3))
    labels = model(images).argmax(1)
    labels[:, 0] = 255
    return images, labels


def known(model):
    """What the construction says, in (linf, l2); None where it says nothing."""
    return {"isometry": (None, 2.0), "contraction": (1.0, None), "linear": (1.0, None)}[model]


@pytest.mark.parametrize("name", MODELS)
def test_constants_are_those_of_the_construction(name):
    for found, exact in zip(lipschitz(MODELS[name]()), known(name)):
        assert exact is None or found == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_no_perturbation_is_enlarged_by_more(name):
    model = MODELS[name]().double()
    images = torch.rand(20, 3, 8, 10, generator=generator(4)).double()
    for seed, size in enumerate((1e-3, 0.1)):
        moves = size * torch.randn(images.shape, generator=generator(seed)).double().sign()
        changes = model.logits(images + moves) - model.logits(images)
        for norm, constant in zip(("linf", "l2"), lipschitz(model)):
            assert (distance(changes, norm) <= constant * distance(moves, norm) * (1 + 1e-9)).all()


def test_the_radii_of_a_linear_model_by_hand():
    model = Segmenter(nn.Conv2d(2, 2, 1, bias=False))
    model.model.weight.data = torch.eye(2)[..., None, None]
    images = torch.tensor([0.9, 0.7, 0.6, 0.5, 0.1, 0.3, 0.4, 0.45]).view(1, 2, 1, 4)  # margins 0.8 0.4 0.2 0.05
    found = certify(model, Problem.build(images, torch.zeros(1, 1, 4, dtype=torch.long), threshold=0.75))
    assert found.linf.item() == pytest.approx(0.4 / 2, rel=1e-3)
    assert found.l2.item() == pytest.approx(math.sqrt((0.4**2 + 0.2**2 + 0.05**2) / 2), rel=1e-3)


def test_what_images_are_mapped_to_counts():
    network = nn.Conv2d(3, 4, 1)
    plain, wide = Segmenter(network), Segmenter(network, range=((0, 1), (0, 4), (0, 2)))
    assert lipschitz(wide) == pytest.approx([4 * constant for constant in lipschitz(plain)])
    for used in ({"window": (4, 4)}, {"tta": (0.5, "flip")}):
        assert lipschitz(Segmenter(network, **used)) is None


CASES = [(model, name, norm) for model in MODELS for name in ATTACKS if name != "asma" for norm in ("linf", "l2")]
CASES = [case for case in CASES if case[2] in norms(make_attack(case[1]))]


@pytest.mark.parametrize(("which", "name", "norm"), CASES)
def test_no_attack_is_below_the_certificate(which, name, norm):
    model = MODELS[which]()
    images, labels = scene(model)
    problem = Problem.build(images, labels, threshold=THRESHOLD)
    radii = getattr(certify(model, problem), norm)
    options = {"norm": norm} if norm != make_attack(name).norm else {}
    attack = make_attack(name, **options)
    if attack.family == "minimal":
        short = {"rounds": 6, "steps": 6} if "-13x" in name else {"steps": 50}
        found = make_attack(name, **options, **short).run(model, problem)
        assert (radii > 0).all()
        assert not (found.success & (found.norm < radii)).any()
    else:
        for share, radius in ((0.999, radii.min().item()), (40, radii.max().item())):
            short = {} if name == "fgsm" else {"steps": 12}
            found = make_attack(name, epsilon=share * radius, **options, **short).run(model, problem)
            assert not (found.success & (found.norm < radii)).any()
            assert share > 1 or not found.success.any()


def test_some_attacks_do_succeed():
    """Else the test above could not fail; of linear models the certificate is a fraction of what palma needs."""
    model = linear()
    problem = Problem.build(*scene(model), threshold=THRESHOLD)
    found, radii = make_attack("palma", steps=100).run(model, problem), certify(model, problem).linf
    assert found.success.all()
    assert (found.norm < 10 * radii).all()


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")),
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.Softplus()),
        nn.Sequential(nn.Conv2d(3, 4, 2, stride=2)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.Conv2d(3, 4, 1)),
    ],
)
def test_nothing_is_certified_that_is_not_known(network):
    model = Segmenter(network)
    images = torch.rand(1, 3, 8, 8)
    assert certify(model, Problem.build(images, torch.zeros(1, 8, 8, dtype=torch.long))) is None


def test_check_tells_the_certificate():
    model = linear()
    images, labels = scene(model, batch=1)
    (found,) = (c for c in check_model(model, [Sample("a", images[0], labels[0])]) if c.name == "certificate")
    radii = certify(model, Problem.build(images, labels))
    assert f"below {255 * radii.linf.item():.2g}/255 in linf or {radii.l2.item():.2g} in l2" in found.finding
