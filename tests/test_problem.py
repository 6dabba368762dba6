import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segprox import Problem
from segprox.problem import predictions


def build(labels, **options):
    labels = torch.as_tensor(labels)
    return Problem.build(torch.rand(len(labels), 3, *labels.shape[1:]), labels, **options)


def one_hot(predicted, classes):
    return torch.nn.functional.one_hot(torch.as_tensor(predicted), classes).movedim(-1, 1).float()


@given(st.integers(0, 2**31), st.integers(2, 7))
def test_predictions_are_argmax_even_with_ties(seed, classes):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-2, 3, (2, classes, 5, 4), generator=generator).float()
    assert torch.equal(predictions(logits), logits.argmax(1))


def test_nan_is_no_prediction():
    logits = torch.zeros(1, 3, 1, 2)
    logits[0, 1, 0, 0] = torch.nan
    assert predictions(logits).tolist() == [[[3, 0]]]
    assert not build([[[0, 0]]]).satisfied(logits).any()
    assert not build([[[0, 0]]], target=1).satisfied(logits).any()


@pytest.mark.parametrize("ignore", [(255,), (-1,), (-1, 7), ()])
def test_any_set_of_ignore_labels(ignore):
    labels = torch.tensor([[[0, 1, *ignore]]])
    problem = build(labels, ignore=ignore)
    assert problem.mask.tolist() == [[[True, True, *[False] * len(ignore)]]]
    problem.check_classes(2)


def test_a_given_mask_adds_to_the_ignored_labels():
    problem = build([[[0, 1, 255]]], mask=torch.tensor([[[False, True, True]]]))
    assert problem.mask.tolist() == [[[False, True, False]]]


@pytest.mark.parametrize("target", [2, torch.tensor([[2, 2, 2]]), torch.tensor([[[2, 2, 2]]])])
def test_targets_keep_void_pixels_masked(target):
    problem = build([[[0, 1, 255]]], target=target)
    assert problem.targeted
    assert problem.mask.tolist() == [[[True, True, False]]]
    assert problem.labels.tolist() == [[[2, 2, 0]]]


def test_void_in_the_target_is_masked_too():
    problem = build([[[0, 1, 1]]], target=torch.tensor([[255, 2, 2]]))
    assert problem.mask.tolist() == [[[False, True, True]]]


def test_a_target_needs_no_labels():
    problem = Problem.build(torch.rand(2, 3, 4, 4), target=1)
    assert problem.mask.all()


def test_apsr_counts_wrong_pixels_or_pixels_on_target():
    labels = [[[0, 1, 2, 255]], [[255] * 4]]
    logits = one_hot([[[0, 0, 0, 0]], [[0, 0, 0, 0]]], 3)
    assert build(labels).apsr(logits).tolist() == [2 / 3, 0]
    assert build(labels, target=0).apsr(logits).tolist() == [1, 0]


def test_success_is_at_or_above_the_threshold_and_never_void():
    problem = build([[[0] * 100], [[255] * 100]], threshold=0.99)
    apsr = problem.apsr(one_hot([[[1] * 99 + [0]], [[1] * 100]], 2))
    assert apsr[0] == 0.99
    assert problem.succeeded(apsr).tolist() == [True, False]
    assert problem.succeeded(apsr + 1).tolist() == [True, False]


def test_rounding_outside_the_range_is_clamped():
    images = torch.tensor([-3e-8, 1 + 1e-7, 0.5]).view(1, 3, 1, 1)
    problem = Problem.build(images, torch.zeros(1, 1, 1, dtype=torch.long))
    assert problem.images.flatten().tolist() == [0, 1, 0.5]


def test_input_is_not_changed():
    images, labels = torch.rand(1, 3, 2, 2), torch.full((1, 2, 2), 255)
    Problem.build(images, labels)
    assert (labels == 255).all()
