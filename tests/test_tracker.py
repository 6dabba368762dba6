import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from segprox import Problem, Segmenter, SegproxError
from segprox.norms import distance, per_image
from segprox.trace import Improvement, thin
from segprox.tracker import QueriesExhausted, Tracker
from tests.oracles import channels_as_logits


def tracked(points, threshold=1.0):
    """Query points of an image of 2 channels and 2 pixels, both of class 0; a pixel is wrong if channel 1 leads."""
    image = torch.tensor([[0.6, 0.6], [0.5, 0.5]]).view(1, 2, 1, 2)
    problem = Problem.build(image, torch.zeros(1, 1, 2, dtype=torch.long), threshold=threshold)
    tracker = Tracker(channels_as_logits(2), problem, "linf")
    query = None
    for second in points:
        point = image.clone()
        point[0, 1, 0] = torch.tensor(second)
        query = tracker.query(point)
    return tracker, query


def test_keeps_the_smallest_success():
    tracker, _ = tracked([[0.9, 0.9], [0.7, 0.8], [0.95, 0.9], [0.5, 0.9]])
    result = tracker.result()
    assert result.success.tolist() == [True]
    torch.testing.assert_close(result.norm, torch.tensor([0.3]))
    torch.testing.assert_close(result.images[0, 1, 0], torch.tensor([0.7, 0.8]))
    assert result.forwards.tolist() == [4]
    assert result.backwards.tolist() == [0]


def test_a_query_without_a_graph_has_no_gradient():
    tracker, _ = tracked([])
    query = tracker.query(tracker.problem.images, differentiable=False)
    assert not query.logits.requires_grad
    with pytest.raises(SegproxError, match="queried without differentiable=True"):
        query.gradient(torch.ones_like(query.logits))


def test_keeps_the_highest_apsr_before_a_success():
    result = tracked([[0.5, 0.5], [0.5, 0.9], [0.5, 0.95], [0.5, 0.5]])[0].result()
    assert result.success.tolist() == [False]
    assert result.apsr.tolist() == [0.5]
    torch.testing.assert_close(result.images[0, 1, 0], torch.tensor([0.5, 0.9]))  # the first of equals


def test_a_later_success_replaces_a_higher_apsr():
    result = tracked([[0.9, 0.9], [0.5, 0.65]], threshold=0.5)[0].result()
    assert result.apsr.tolist() == [0.5]
    torch.testing.assert_close(result.norm, torch.tensor([0.15]))


@pytest.mark.parametrize("judged", [False, True])
def test_a_part_with_a_radius_is_judged_by_it_and_by_apsr(judged):
    tracker, _ = tracked([[0.5, 0.5]], threshold=0.5)
    for radius, points in [
        (0.6, [[0.5, 0.65], [0.95, 0.9]]),
        (0.5, [[0.5, 0.7], [0.8, 0.85], [0.9, 0.9], [0.5, 0.75]]),
    ]:
        part = tracker.child("most", radius=torch.tensor([radius]) if judged else None)
        for second in points:
            point = tracker.problem.images.clone()
            point[0, 1, 0] = torch.tensor(second)
            part.query(point)
    result = tracker.result()
    # In the smaller radius two points make both pixels wrong; without radii the first point is the smallest of all.
    assert result.apsr.tolist() == [1.0 if judged else 0.5]
    torch.testing.assert_close(result.norm, torch.tensor([0.4 if judged else 0.15]))
    assert [step.norm for step in result.traces[0]] == pytest.approx([0.15, 0.45, 0.2, 0.35, 0.4] if judged else [0.15])


def test_the_image_itself_needs_no_radius():
    tracker, _ = tracked([], threshold=0.5)
    tracker.problem.labels[0, 0, 0] = 1  # wrong as it is
    part = tracker.child("most", radius=torch.tensor([0.5]))
    part.query(tracker.problem.images)
    far = tracker.problem.images.clone()
    far[0, 1, 0, 1] = 0.9
    part.query(far)
    assert part.best.apsr.tolist() == [1.0]
    assert tracker.result().norm.tolist() == [0]


def test_gradient_is_counted_and_pulled_back():
    tracker, query = tracked([[0.5, 0.5]])
    cotangent = torch.rand(1, 2, 1, 2)
    torch.testing.assert_close(query.gradient(cotangent), 7 * cotangent)
    assert tracker.result().backwards.tolist() == [1]


def test_distances():
    delta = torch.zeros(2, 3, 2, 2)
    delta[0, 0, 0, 0], delta[0, 1, 0, 0], delta[0, 2, 1, 1] = 0.3, -0.4, 0.1
    expected = {"l0": 2.0, "l1": 0.8, "l2": (0.09 + 0.16 + 0.01) ** 0.5, "linf": 0.4}
    for norm, value in expected.items():
        torch.testing.assert_close(distance(delta, norm), torch.tensor([value, 0.0]))


def test_reductions_of_no_image():
    assert per_image(torch.sum, torch.zeros(0, 5)).shape == (0,)
    assert distance(torch.zeros(0, 3, 2, 2), "l2").shape == (0,)


def test_a_trace_has_the_smallest_success_after_each_query():
    tracker, query = tracked([[0.9, 0.5], [0.9, 0.9], [0.7, 0.8], [0.95, 0.9]])
    query.gradient(torch.zeros(1, 2, 1, 2))
    image = tracker.problem.images.clone()
    image[0, 1] = 0.65
    tracker.query(image)
    (trace,) = tracker.result().traces
    assert [step.queries for step in trace] == [2, 3, 6]
    assert [step.norm for step in trace] == pytest.approx([0.4, 0.3, 0.15])
    assert trace[-1].norm == tracker.result().norm.item()
    assert tracked([[0.9, 0.5]])[0].result().traces == ((),)
    assert limited(3)[1].result().traces == ((), ())  # nothing was asked


@given(st.lists(st.floats(0, 1), max_size=400), st.integers(2, 80))
def test_thin_traces_begin_and_end_as_they_were(norms, most):
    steps = [Improvement(2 * n, norm) for n, norm in enumerate(norms)]
    kept = thin(steps, most)
    assert len(kept) <= most
    assert set(kept) <= set(steps)
    assert (kept[:1], kept[-1:]) == (tuple(steps[:1]), tuple(steps[-1:]))
    assert list(kept) == sorted(kept)


def test_a_long_trace_stays_close_and_short():
    steps = [Improvement(n, 0.99**n) for n in range(1, 900)]  # five orders of magnitude
    kept = thin(steps)
    assert len(json.dumps(kept)) < 3000
    for step in steps:
        last = [k for k in kept if k.queries <= step.queries][-1]
        assert step.norm <= last.norm < 1.3 * step.norm


class Liar(nn.Module):
    """In low precision every pixel is of class 1; in full precision channel 1 has to lead by a tenth."""

    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            return x * torch.tensor([0.0, 1.0]).view(-1, 1, 1)
        return x - torch.tensor([0.0, 0.1]).view(-1, 1, 1)


@pytest.mark.parametrize("goal", ["smallest", "most"])
def test_successes_in_low_precision_are_verified(goal):
    image = torch.full((1, 2, 1, 2), 0.5)
    model = Segmenter(Liar())
    model.autocast = torch.bfloat16
    tracker = Tracker(model, Problem.build(image, torch.zeros(1, 1, 2, dtype=torch.long)), "linf", goal)
    for second, believed in [(0.55, False), (0.9, True), (0.58, False), (0.7, goal == "smallest")]:
        point = image.clone()
        point[:, 1] = second
        query = tracker.query(point)
        if believed:
            assert query.success.tolist() == [True]
    result = tracker.result()
    assert result.success.tolist() == [True]
    assert result.apsr.tolist() == [1.0]
    torch.testing.assert_close(result.norm, torch.tensor([0.2 if goal == "smallest" else 0.4]))
    assert result.forwards.item() > 4  # each look in full precision is counted


def test_unbroken_images_in_low_precision_are_measured_in_full():
    image = torch.full((1, 2, 1, 2), 0.5)
    model = Segmenter(Liar())
    model.autocast = torch.bfloat16
    tracker = Tracker(model, Problem.build(image, torch.zeros(1, 1, 2, dtype=torch.long)), "linf")
    tracker.query(image)
    result = tracker.result()
    assert result.success.tolist() == [False]
    assert result.apsr.tolist() == [0.0]


def limited(max_queries, size=2):
    image = torch.tensor([[0.6, 0.6], [0.5, 0.5]]).view(1, 2, 1, 2).expand(size, -1, -1, -1).clone()
    problem = Problem.build(image, torch.zeros(size, 1, 2, dtype=torch.long), threshold=1.0)
    return image, Tracker(channels_as_logits(2), problem, "linf", max_queries=max_queries)


def test_used_up_queries_end_the_attack():
    image, tracker = limited(3)
    query = tracker.query(image)
    query.gradient(torch.ones_like(query.logits))
    query = tracker.query(image)
    with pytest.raises(QueriesExhausted):
        query.gradient(torch.ones_like(query.logits))
    with pytest.raises(QueriesExhausted):
        tracker.query(image)
    result = tracker.result()
    assert (result.forwards.tolist(), result.backwards.tolist()) == ([2, 2], [1, 1])


def test_an_image_without_queries_left_gets_no_answer():
    image, tracker = limited(3)
    tracker.query(image)
    tracker.count_forwards(torch.tensor([True, False]))
    good = image.clone()
    good[:, 1] = 0.9
    query = tracker.query(good)
    assert query.success.tolist() == [True, True]
    assert query.gradient(torch.ones_like(query.logits))[0].count_nonzero() == 0
    assert tracker.result().forwards.tolist() == [3, 2]
    assert tracker.result().backwards.tolist() == [0, 1]


def test_points_of_a_part_that_may_not_be_returned_leave_a_forward_for_the_image_itself():
    image, tracker = limited(3)
    part = tracker.child(share=False)
    far = image.clone()
    far[:, 1] = 0.9
    part.query(far)
    part.query(far)
    with pytest.raises(QueriesExhausted):
        part.query(far)
    result = tracker.result()
    assert torch.equal(result.images, image)
    assert result.forwards.tolist() == [3, 3]
    assert (result.norm.tolist(), result.apsr.tolist(), result.success.tolist()) == ([0, 0], [0, 0], [False, False])


def test_the_image_itself_may_be_a_success():
    image, _ = limited(1)
    problem = Problem.build(image, torch.ones(2, 1, 2, dtype=torch.long))
    tracker = Tracker(channels_as_logits(2), problem, "linf", max_queries=1)
    with pytest.raises(QueriesExhausted):
        tracker.query(image)
    result = tracker.result()
    assert result.success.tolist() == [True, True]
    assert result.apsr.tolist() == [1, 1]
    assert result.norm.tolist() == [0, 0]
