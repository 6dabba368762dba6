"""Counts and metrics, against scikit-learn and what must hold for any label map."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, jaccard_score, recall_score

from segprox import SegproxError
from segprox.counts import Counts, class_counts
from segprox.problem import predictions
from segprox.report import mean_class_accuracy, mean_image_iou, mean_iou, pixel_accuracy

K, VOID = 5, 255


def maps(seed, shape=(12, 9), classes=K, void=0.2):
    """A label map with void pixels, and a prediction that is right at about half of the others."""
    draw = torch.Generator().manual_seed(seed)
    label, guess = (torch.randint(0, classes, shape, generator=draw) for _ in range(2))
    prediction = torch.where(torch.rand(shape, generator=draw) < 0.4, label, guess)
    return prediction, label.masked_fill(torch.rand(shape, generator=draw) < void, VOID)


def stacked(pairs, num_classes=K):
    """Counts `[images, classes]`."""
    return Counts(*np.stack([class_counts(*pair, num_classes) for pair in pairs], axis=1))


def flat(pairs):
    """Predictions and labels of all counted pixels."""
    prediction, label = (torch.cat([pair[i].flatten() for pair in pairs]) for i in range(2))
    return prediction[label != VOID].numpy(), label[label != VOID].numpy()


@pytest.mark.parametrize("seed", range(5))
def test_pooled_metrics_agree_with_scikit_learn(seed):
    pairs = [maps(10 * seed + i, shape=(7 + i, 11)) for i in range(3)]  # images of several sizes
    counts, (prediction, label) = stacked(pairs), flat(pairs)
    assert counts.tp.shape == (3, K)
    options = {"average": "macro", "labels": range(K)}
    assert pixel_accuracy(*counts) == pytest.approx(accuracy_score(label, prediction))
    assert mean_iou(*counts) == pytest.approx(jaccard_score(label, prediction, **options))
    assert mean_class_accuracy(*counts) == pytest.approx(recall_score(label, prediction, **options))
    per_class = Counts(*(values.sum(0) for values in counts)).iou()
    np.testing.assert_allclose(per_class, jaccard_score(label, prediction, average=None, labels=range(K)))


@pytest.mark.parametrize(("absent", "zero_division"), [("zero", 0.0), ("one", 1.0)])
def test_absent_classes_agree_with_scikit_learn(absent, zero_division):
    pairs = [maps(seed, classes=3) for seed in range(2)]  # classes 3 and 4 never occur
    counts, (prediction, label) = stacked(pairs), flat(pairs)
    options = {"average": "macro", "labels": range(K), "zero_division": zero_division}
    assert mean_iou(*counts, absent=absent) == pytest.approx(jaccard_score(label, prediction, **options))
    assert mean_class_accuracy(*counts, absent=absent) == pytest.approx(recall_score(label, prediction, **options))


def test_skipped_classes_agree_with_scikit_learn():
    pairs = [maps(seed, classes=3) for seed in range(2)]
    expected = jaccard_score(*reversed(flat(pairs)), average="macro", labels=range(3))
    assert mean_iou(*stacked(pairs), absent="skip") == pytest.approx(expected)


def test_mean_image_iou_agrees_with_scikit_learn_image_by_image():
    pairs = [maps(seed, shape=(3, 4)) for seed in range(6)]  # so small that images miss classes
    each = []
    for pair in pairs:
        prediction, label = flat([pair])
        present = sorted({*prediction.tolist(), *label.tolist()})
        each.append(jaccard_score(label, prediction, average="macro", labels=present))
    assert mean_image_iou(*stacked(pairs)) == pytest.approx(np.mean(each))
    assert mean_image_iou(*stacked(pairs)) != pytest.approx(mean_iou(*stacked(pairs)))


def test_a_class_that_is_predicted_but_not_there_counts_for_iou_and_not_for_accuracy():
    counts = stacked([(torch.tensor([[0, 1]]), torch.tensor([[0, 0]]))], num_classes=2)
    assert mean_iou(*counts) == pytest.approx((1 / 2 + 0) / 2)
    assert mean_class_accuracy(*counts) == pytest.approx(1 / 2)


def test_nan_logits_are_wrong_and_of_no_class():
    logits = torch.zeros(1, 2, 1, 3)
    logits[0, 0, 0, :2] = 1
    logits[0, 1, 0, 1] = torch.nan
    counts = class_counts(predictions(logits)[0], torch.tensor([[0, 0, VOID]]), 2)
    assert [values.tolist() for values in counts] == [[1, 0], [0, 0], [1, 0]]
    assert counts.pixel_accuracy() == 0.5


def test_images_without_counted_pixels():
    void = (torch.zeros(2, 2, dtype=torch.long), torch.full((2, 2), VOID))
    right = (torch.zeros(2, 2, dtype=torch.long), torch.zeros(2, 2, dtype=torch.long))
    assert np.isnan(mean_image_iou(*stacked([void])))
    assert np.isnan(pixel_accuracy(*stacked([void])))
    for absent, expected in (("skip", 1), ("one", 1), ("zero", 1 / K)):
        assert mean_image_iou(*stacked([void, right]), absent=absent) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "label", "message"),
    [
        (0, K, "label 5 is not one of the 5 classes"),
        (0, -1, "label -1 is not one of the 5 classes"),
        (K + 1, 0, "prediction 6 is not one of the 5 classes"),
    ],
)
def test_classes_that_do_not_exist(prediction, label, message):
    with pytest.raises(SegproxError, match=message):
        class_counts(torch.full((2, 2), prediction), torch.full((2, 2), label), K)


@given(seed=st.integers(0, 10**6), void=st.sampled_from([0.0, 0.5, 1.0]), missing=st.booleans())
def test_every_counted_pixel_is_counted_once(seed, void, missing):
    prediction, label = maps(seed, void=void)
    if missing:
        prediction[::2] = K
    tp, fp, fn = class_counts(prediction, label, K)
    counted = label != VOID
    assert (tp + fn).sum() == counted.sum()
    assert (tp + fp).sum() == (counted & (prediction < K)).sum()
    assert min(values.min() for values in (tp, fp, fn)) >= 0


@given(seed=st.integers(0, 10**6), absent=st.sampled_from(["skip", "zero", "one"]))
def test_metrics_do_not_depend_on_the_order_of_classes_and_images(seed, absent):
    pairs = [maps(seed + i, shape=(4, 4)) for i in range(3)]
    order = torch.randperm(K, generator=torch.Generator().manual_seed(seed))
    renamed = torch.cat([order, torch.arange(K, 256)])
    shuffled = [(renamed[prediction], renamed[label]) for prediction, label in reversed(pairs)]
    for metric in (mean_iou, mean_image_iou, mean_class_accuracy):
        value = metric(*stacked(pairs), absent=absent)
        assert metric(*stacked(shuffled), absent=absent) == pytest.approx(value)
        assert 0 <= value <= 1
    assert mean_iou(*stacked(pairs)) <= mean_class_accuracy(*stacked(pairs)) + 1e-12  # the union is never smaller


@given(seed=st.integers(0, 10**6))
def test_a_perfect_prediction_is_worth_one(seed):
    _, label = maps(seed, classes=3, void=0.3)
    counts = stacked([(label.masked_fill(label == VOID, 4), label)])
    assert pixel_accuracy(*counts) == mean_iou(*counts) == mean_image_iou(*counts) == mean_class_accuracy(*counts) == 1
    assert mean_iou(*counts, absent="zero") == pytest.approx((label.unique() != VOID).sum() / K)
