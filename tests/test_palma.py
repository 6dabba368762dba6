"""PALMA: the ball that fits itself, 8-bit images, patience."""

import math
from types import SimpleNamespace

import pytest
import torch

from segprox import Palma, Problem, load_dataset, load_model
from segprox.attacks.palma import SHORTEST, TRIMS, Ball, Patience
from segprox.tracker import Tracker
from tests.oracles import channels_as_logits, smallest_norm, smallest_untargeted


def linear_problem(scale=1.0, threshold=0.99, batch=2):
    """Images around grey on a model whose smallest perturbations are known; `scale` stretches them all."""
    noise = torch.rand(batch, 4, 24, 24, generator=torch.Generator().manual_seed(0))
    model, images = channels_as_logits(4), 0.5 + scale * (noise - 0.5)
    return model, Problem.build(images, model(images).argmax(1), threshold=threshold)


def scene_problem(index=0, **options):
    scene = load_dataset("demo")[index]
    return Problem.build(scene.image[None], scene.label[None], **options)


@pytest.mark.parametrize("scale", [0.001, 0.03, 0.9])
def test_the_same_defaults_fit_every_scale(scale):
    model, problem = linear_problem(scale)
    found = Palma(steps=60).run(model, problem)
    best = smallest_norm(smallest_untargeted(model, problem.images, problem.labels), problem.mask, 0.99)
    assert found.success.all()
    assert (found.norm <= 1.1 * best).all()


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_the_scale_of_logits_does_not_matter(factor):
    """Up to rounding: all that is compared with the logits is measured in them."""
    images = linear_problem()[1].images
    norms = []
    for scale in (7.0, 7.0 * factor):
        model = channels_as_logits(4, scale)
        norms.append(Palma(steps=15).run(model, Problem.build(images, model(images).argmax(1))).norm)
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-3, atol=0)


@pytest.mark.parametrize("steps", [1, 2, 3, 25])
def test_steps_are_what_it_costs(steps):
    attack = Palma(steps=steps)
    model, problem = linear_problem()
    found = attack.run(model, problem)
    assert found.forwards.tolist() == [steps] * 2 == [attack.cost().forwards] * 2
    assert found.backwards.tolist() == [steps - 1] * 2 == [attack.cost().backwards] * 2


def test_rounds_begin_at_the_image_with_another_ball_and_other_steps():
    model, problem = linear_problem(0.03)
    radii, norms = [], []

    def watch(query, radius):
        radii.append(radius.clone())
        norms.append(query.norm.clone())

    attack, first = Palma(steps=127, round_steps=41), Palma(steps=41).run(model, problem)
    tracker = Tracker(model, problem, "linf")
    attack.search(tracker, watch)
    assert tracker.forwards.tolist() == [127, 127] == [attack.cost().forwards] * 2
    assert tracker.backwards.tolist() == [124, 124] == [attack.cost().backwards] * 2
    assert [i for i, norm in enumerate(norms) if not norm.any()] == [0, 41, 84]
    torch.testing.assert_close(radii[42], 2 * first.norm)  # the first round is an attack of its own
    torch.testing.assert_close(norms[42], radii[42] / 2, rtol=1e-2, atol=0)  # steps of half a radius
    for t in (1, 85):
        torch.testing.assert_close(norms[t], radii[t], rtol=1e-4, atol=0)  # of two, cut
    assert (radii[85] >= 3.9 * tracker.best_norm).all()
    assert (tracker.best_norm <= first.norm).all()


def test_a_round_after_failures_begins_where_the_last_one_ended():
    _, ball = a_ball(1)
    ball.start(torch.tensor([0.1]))
    assert ball.radius.tolist() == pytest.approx([0.1])
    ball.radius, ball.pace = torch.tensor([0.3]), torch.tensor([0.5])
    ball.start(torch.tensor([0.1]))
    assert ball.radius.tolist() == pytest.approx([0.3])
    assert ball.pace.tolist() == [1]


def fake_query(apsr, success):
    return SimpleNamespace(apsr=torch.tensor(apsr, dtype=torch.float64), success=torch.tensor(success))


def a_ball(batch, threshold=0.99):
    model, problem = linear_problem(threshold=threshold, batch=batch)
    tracker = Tracker(model, problem, "linf")
    tracker.best_norm.fill_(0.2)
    ball = Ball(tracker, 0.8)
    ball.start(torch.full((batch,), 0.1))
    ball.missing = torch.full((batch,), 0.5, dtype=torch.float64)
    return tracker, ball


def test_the_ball_shrinks_after_successes_by_how_clear_they_are():
    _, ball = a_ball(3)
    allowed = ball.allowed[0].item()
    ball.fit(fake_query([1.0, 1 - allowed / math.e, 1 - allowed], [True, True, True]), 0.1)
    wanted = [0.1 * math.exp(-0.2), 0.1 * math.exp(-0.1), 0.1 * math.exp(-0.03)]
    torch.testing.assert_close(ball.radius, torch.tensor(wanted))


def test_the_ball_grows_only_where_nothing_gets_better():
    _, ball = a_ball(3)
    ball.fit(fake_query([0.5, 0.6, 0.4], [False, False, False]), 0.1)
    torch.testing.assert_close(ball.radius, torch.tensor([0.1 * math.exp(0.1), 0.1, 0.1 * math.exp(0.1)]))
    torch.testing.assert_close(ball.pace, torch.tensor([0.8, 1.0, 0.8]))


def test_steps_keep_their_length_once_there_was_a_success():
    tracker, ball = a_ball(2)
    tracker.success[0] = True
    ball.fit(fake_query([0.5, 0.5], [False, False]), 0.1)
    torch.testing.assert_close(ball.pace, torch.tensor([1.0, 0.8]))


def test_calm_steps_have_a_least_length_within_the_ball():
    """The ball grows; its steps are measured by less and less of it, but not by less than a share of the first."""
    _, ball = a_ball(1)
    assert ball.stride.item() == pytest.approx(0.1)
    ball.radius, ball.pace = torch.tensor([0.3]), torch.tensor([0.5])
    assert ball.stride.item() == pytest.approx(0.15)
    ball.pace = torch.tensor([0.01])
    assert ball.stride.item() == pytest.approx(0.1 * SHORTEST)
    ball.radius = torch.tensor([0.01])
    assert ball.stride.item() == pytest.approx(0.01)
    ball.radius = ball.first = torch.zeros(1)
    assert ball.stride.item() == 0  # nothing to do is no NaN


def test_calm_steps_still_follow_the_ball():
    """The first ball is far too small, and each step that leads nowhere makes the next ones a billion times shorter."""
    model, problem = linear_problem()
    tracker, norms = Tracker(model, problem, "linf"), []
    Palma(steps=10, radius=1e-3, calm=1e-9).search(tracker, lambda query, radius: norms.append(query.norm))
    assert not tracker.success.any()
    assert (norms[5] > 1.5 * norms[1]).all()


def test_the_ball_is_never_larger_than_the_best_or_than_the_box():
    tracker, ball = a_ball(2)
    tracker.best_norm[0] = 0.05
    ball.start(torch.tensor([0.1, 5.0]))
    assert ball.radius[1] == ball.farthest[1] <= 1
    ball.fit(fake_query([1.0, 0.2], [True, False]), 0.1)
    torch.testing.assert_close(ball.radius, torch.tensor([0.05 * math.exp(-0.2), ball.farthest[1]]))


def test_all_pixels_may_be_asked_for():
    model, problem = linear_problem(0.03, threshold=1.0)
    found = Palma(steps=80).run(model, problem)
    best = smallest_norm(smallest_untargeted(model, problem.images, problem.labels), problem.mask, 1.0)
    assert found.success.all()
    assert (found.norm <= 1.1 * best).all()


def test_patience_leaves_out_what_no_longer_improves():
    model, problem = linear_problem(0.03)
    patient, hasty = Palma(steps=120).run(model, problem), Palma(steps=120, patience=8).run(model, problem)
    assert (hasty.forwards < patient.forwards).all()
    assert hasty.success.all()
    assert (hasty.norm <= 1.2 * patient.norm).all()


def test_patience_waits_for_a_first_success():
    tracker, _ = a_ball(1)
    idle = Patience(tracker, 2)
    assert not any(idle() for _ in range(10))
    tracker.success[0] = True
    assert [idle() for _ in range(4)] == [False, False, True, True]


def test_8_bit_images_are_valid_and_succeed():
    model, problem = load_model("demo-standard"), scene_problem(1)
    found = Palma(steps=60, bits=8).run(model, problem)
    levels = found.images * 255
    assert found.success.all()
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-4)
    assert problem.apsr(model(found.images.mul(255).round().div(255)).detach()) >= 0.99  # as a file would hold them
    assert found.forwards.item() == 60
    assert found.backwards.item() == 60 - TRIMS - 1 == Palma(steps=60, bits=8).cost().backwards


@pytest.mark.parametrize("rounds", [1, 2])
def test_trimming_undoes_changes_that_matter_least_and_keeps_the_norm(rounds, monkeypatch):
    model, problem = load_model("demo-standard"), scene_problem(1)
    trimmed, whole = (Palma(steps=steps, bits=8, round_steps=50 // rounds) for steps in (60, 60 - TRIMS))
    object.__setattr__(whole, "_searched", lambda: whole.steps)  # the same search without the end
    few, many = trimmed.run(model, problem), whole.run(model, problem)
    trim = Palma._trim
    monkeypatch.setattr(Palma, "_trim", lambda self, tracker, watch, d: trim(self, tracker, watch, torch.zeros_like(d)))
    blind = trimmed.run(model, problem)  # any changes, not those that matter least
    assert few.norm <= many.norm
    shares = [(found.images != problem.images).float().mean().item() for found in (few, blind, many)]
    assert shares[0] < 0.9 * shares[1]
    assert shares[0] < shares[2]


def test_8_bits_where_the_image_itself_is_not_on_the_grid():
    model, problem = load_model("demo-standard"), scene_problem(1)
    between = Problem.build((problem.images + 0.4 / 255).clamp(0, 1), problem.labels)
    found = Palma(steps=30, bits=8).run(model, between)
    levels = found.images * 255
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-4)


def test_an_image_that_is_broken_already_stays_as_it_is():
    model, problem = linear_problem()
    wrong = Problem.build(problem.images, (problem.labels + 1) % 4)
    found = Palma(steps=10).run(model, wrong)
    assert found.norm.tolist() == [0, 0]
    assert torch.equal(found.images, problem.images)
