"""The cross-check of two attacks, and the worst case of several."""

import itertools

import numpy as np
import pytest
import torch

from segprox import Sample, make_attack
from segprox.report import mean_iou, worst_case_miou
from segprox.run import Finding, audit_sample
from tests.oracles import channels_as_logits


def sample():
    image = 0.5 + 0.06 * (torch.rand(4, 16, 16, generator=torch.Generator().manual_seed(0)) - 0.5)
    return Sample("one", image, channels_as_logits(4)(image[None]).argmax(1)[0])


@pytest.mark.parametrize(
    ("minimal", "fixed", "epsilon", "robust", "too_weak"),
    [
        ({}, {}, "10/255", False, None),
        ({}, {}, "1/255", True, None),
        ({"steps": 2}, {}, "10/255", False, "minimal"),
        ({}, {"steps": 1}, "10/255", False, "fixed"),
        ({"steps": 2}, {"steps": 1}, "10/255", True, None),  # both too weak: nobody notices
    ],
)
def test_disagreement_names_the_weaker_attack(minimal, fixed, epsilon, robust, too_weak):
    attacks = make_attack("fmn", **minimal), make_attack("pgd", epsilon=epsilon, **fixed)
    found = audit_sample(channels_as_logits(4), sample(), *attacks)
    assert isinstance(found, Finding)
    assert found.robust is robust
    assert found.too_weak == too_weak
    assert found.epsilon == pytest.approx(float(epsilon.split("/")[0]) / 255)


def random_counts(seed, attacks=3, images=5, classes=4):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 50, (3, attacks, images, classes))


@pytest.mark.parametrize("seed", range(20))
def test_worst_case_is_no_better_than_any_attack_and_close_to_the_best_choice(seed):
    counts = random_counts(seed)
    found, chosen = worst_case_miou(*counts)
    everything = np.arange(5)
    assert found == pytest.approx(mean_iou(*counts[:, chosen, everything]))
    assert all(found <= mean_iou(*counts[:, a]) + 1e-12 for a in range(3))
    best = min(mean_iou(*counts[:, list(choice), everything]) for choice in itertools.product(range(3), repeat=5))
    assert best - 1e-12 <= found <= best + 0.01


def test_mean_iou_leaves_out_classes_that_never_occur():
    tp, fp, fn = np.array([[3, 0, 1]]), np.array([[1, 0, 0]]), np.array([[0, 0, 1]])
    assert mean_iou(tp, fp, fn) == pytest.approx((3 / 4 + 1 / 2) / 2)
    assert np.isnan(mean_iou(*np.zeros((3, 1, 2), dtype=int)))
