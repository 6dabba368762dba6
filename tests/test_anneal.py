"""Anneal: stages, balls that shrink to epsilon's, and what it promises as every attack does."""

import pytest
import torch

from segprox import Anneal, Problem, Segmenter, load_dataset, load_model, make_attack
from segprox.norms import distance
from segprox.tracker import Tracker
from tests.oracles import channels_as_logits

TWO, THREE = 60, 200  # steps from which on there are as many stages


def scene_problem(*indices, **options):
    scenes = [load_dataset("demo")[i] for i in indices]
    return Problem.build(torch.stack([s.image for s in scenes]), torch.stack([s.label for s in scenes]), **options)


def linear_problem(batch=2, threshold=1.0, **options):
    model = channels_as_logits(4)
    images = 0.5 + 0.06 * (torch.rand(batch, 4, 16, 16, generator=torch.Generator().manual_seed(0)) - 0.5)
    labels = model(images).argmax(1)
    return model, Problem.build(images, labels, threshold=threshold, **options)


def seen(attack, model, problem):
    """The norm and the radius at every query."""
    norms, radii = [], []

    def watch(query, radius):
        norms.append(query.norm)
        radii.append(radius)

    tracker = Tracker(model, problem, attack.norm, "most")
    attack.search(tracker, watch)
    return torch.stack(norms), torch.stack(radii), tracker


@pytest.mark.parametrize("steps", [1, 2, 3, TWO - 1, TWO, TWO + 1, THREE])
def test_steps_are_what_it_costs(steps):
    attack = Anneal(steps=steps, epsilon=0.01)
    model, problem = linear_problem()
    found = attack.run(model, problem)
    stages = 1 + (steps >= TWO) + (steps >= THREE)
    assert found.forwards.tolist() == [steps] * 2 == [attack.cost().forwards] * 2
    assert found.backwards.tolist() == [steps - stages] * 2 == [attack.cost().backwards] * 2


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_ball_shrinks_to_that_of_epsilon_where_alone_points_count(norm):
    model, problem = linear_problem()
    epsilon = 0.01 if norm == "linf" else 0.3
    norms, radii, tracker = seen(Anneal(steps=30, epsilon=epsilon, norm=norm), model, problem)
    assert (norms <= radii * (1 + 1e-5)).all()
    assert (norms[0] == 0).all()
    torch.testing.assert_close(norms[1], radii[1])  # the first step is longer than the ball is wide
    assert (radii[1] > 1.9 * epsilon).all()
    assert (radii[1:].diff(dim=0) <= 0).all()
    assert (radii[16:] == radii[-1]).all()
    assert radii[-1].tolist() == pytest.approx([epsilon] * 2)
    assert (tracker.best.norm <= epsilon * (1 + 1e-5)).all()
    assert (distance(tracker.best.images - problem.images, norm) <= epsilon * (1 + 1e-5)).all()


def test_the_second_stage_goes_on_from_the_best_point_of_the_first():
    model, problem = load_model("demo-standard"), scene_problem(5, threshold=1.0)
    points = []

    class Remembering(Tracker):
        def child(self, *args, **options):
            child = super().child(*args, **options)
            points.append(child)
            return child

    tracker = Remembering(model, problem, "linf", "most")
    norms = []
    Anneal(steps=TWO, epsilon="1/255").search(tracker, lambda query, radius: norms.append(query.apsr.item()))
    first, second = (child for child in points if child._shared and child._parent is tracker)
    assert norms[TWO // 2] == first.best.apsr.item()
    assert tracker.best.apsr.item() == max(first.best.apsr.item(), second.best.apsr.item())


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_leaves_less_than_apgd_with_as_many_queries(norm):
    model, problem = load_model("demo-robust"), scene_problem(4, threshold=1.0)
    epsilon = 6 / 255 if norm == "linf" else 2.0
    ours, theirs = (
        make_attack(name, steps=60, epsilon=epsilon, norm=norm).run(model, problem) for name in ("anneal", "apgd")
    )
    assert ours.apsr > theirs.apsr


def test_images_do_not_influence_each_other():
    model, whole = load_model("demo-standard"), scene_problem(0, 1, threshold=1.0)
    problem = Problem.build(whole.images[..., 32:96, 64:128], whole.labels[..., 32:96, 64:128], threshold=1.0)
    attack = Anneal(steps=TWO, epsilon="1/255")
    together = attack.run(model, problem)
    for i in range(2):
        alone = attack.run(model, problem.select([i]))
        assert torch.equal(alone.images[0], together.images[i])


@pytest.mark.parametrize("steps", [20, TWO])
def test_reaches_a_target(steps):
    model, problem = linear_problem()
    wanted = Problem.build(problem.images, target=2)
    found = Anneal(steps=steps, epsilon=0.06).run(model, wanted)
    assert found.success.all()
    assert Anneal(steps=steps, epsilon=0.001).run(model, wanted).apsr.max() < 0.5


def test_done_images_cost_nothing_where_successes_end_the_search():
    model, problem = linear_problem(threshold=0.99)
    attack = Anneal(steps=TWO)
    tracker = Tracker(model, problem, "linf", "most", stop_at_success=True)
    attack.run_within(tracker, torch.tensor([0.0001, 0.2]), lambda *_, **__: None)
    assert tracker.best.success.tolist() == [False, True]
    assert tracker.forwards[0] == TWO
    assert tracker.forwards[1] < TWO // 2


@pytest.mark.parametrize("steps", [20, TWO])
def test_void_images_and_nan_logits_are_survived(steps):
    class Nan(torch.nn.Module):
        def forward(self, x):
            return torch.where(x.mean((1, 2, 3), keepdim=True) > 0.5, torch.nan, x[:, :2])

    images = torch.stack([torch.full((3, 8, 8), 0.9), torch.rand(3, 8, 8) * 0.2, torch.rand(3, 8, 8) * 0.2])
    labels = torch.zeros(3, 8, 8, dtype=torch.long)
    labels[2] = 255
    found = Anneal(steps=steps).run(Segmenter(Nan()), Problem.build(images, labels))
    assert found.images.isfinite().all()
    assert found.success.tolist() == [False, False, False]
    assert found.apsr[0] == 0
    assert found.apsr[1] > 0
