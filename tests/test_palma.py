"""PALMA: rounds, the ball that fits itself, steps that are trusted, 8-bit images, patience."""

import math
from types import SimpleNamespace

import pytest
import torch

from segprox import Palma, Problem, load_dataset, load_model
from segprox.attacks.lagrangian import ConstraintMask
from segprox.attacks.palma import RESERVE, TRIMS, Patience
from segprox.attacks.rounds import GRACE, HASTE, LEAP, LEEWAY, LONGER, LOOK, PATIENCE, Ball, Penalty, Rounds, Trust
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


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_a_longer_run_begins_with_the_shorter_one(norm):
    """Nothing depends on the number of steps, so more of them never give more."""
    model, problem = load_model("demo-standard"), scene_problem(1)
    seen, found = {}, {}
    for steps in (60, 120):
        seen[steps] = []
        attack = Palma(steps=steps, norm=norm, sweep=20)
        found[steps] = attack.run(model, problem, callback=seen[steps].append)
    for short, long in zip(seen[60], seen[120], strict=False):
        assert (short.norm, short.apsr, short.details["radius"]) == (long.norm, long.apsr, long.details["radius"])
    assert len(seen[60]) == 60
    assert found[120].success.all()
    assert found[120].norm <= found[60].norm or not found[60].success.all()


def test_sweeps_begin_at_the_image_in_a_ball_that_is_a_little_larger_than_the_best():
    model, problem = linear_problem(0.03, batch=1)
    tracker, seen = Tracker(model, problem, "linf"), []

    def watch(query, radius):
        seen.append((query.norm.item(), radius.item(), tracker.best.norm.item()))

    Palma(steps=150, sweep=20).search(tracker, watch)
    starts = [t for t, (norm, _, _) in enumerate(seen) if norm == 0]
    assert len(starts) >= 3  # the first descent, and two sweeps
    for t in starts[1:]:
        assert seen[t][1] == pytest.approx(LEEWAY * seen[t][2])
    after = starts[1] + 20  # the sweep is over: a descent from the best point
    assert seen[after][0] == pytest.approx(seen[after][2], rel=1e-5)


def a_tracker(batch, best=0.2, success=True):
    model, problem = linear_problem(batch=batch)
    tracker = Tracker(model, problem, "linf")
    tracker.best.norm.fill_(best)
    tracker.best.success.fill_(success)
    return tracker


def nobody(batch):
    """No image leaps."""
    return torch.zeros(batch, dtype=torch.bool)


def test_a_descent_is_over_when_it_has_settled_and_a_sweep_after_its_steps():
    tracker = a_tracker(2)
    rounds, over = Rounds(tracker, sweep=4), []
    for _ in range(2 * LOOK):
        rounds.count()
        tracker.best.norm[0] *= 0.99  # the other image does not get any further
        over.append(rounds.over(nobody(2)).tolist())
    assert over == [[False, False]] * (2 * LOOK - 1) + [[False, True]]
    rounds.restart(torch.tensor([False, True]))
    assert rounds.sweeping.tolist() == [False, True]
    ages = []
    for lengths in (4, 8):  # each sweep has twice as many steps as the last
        for age in range(1, lengths + 1):
            rounds.count()
            ages.append(rounds.anneal(2.0, 1.0)[1].item())
            assert rounds.over(nobody(2))[1] == (age == lengths)
        rounds.restart(torch.tensor([False, True]))
        rounds.sweeping[1] = True
    assert ages[0] == ages[4] == 2
    assert ages[3] == ages[11] == pytest.approx(1)
    assert ages[:4] == sorted(ages[:4], reverse=True)


def test_a_descent_without_a_success_is_never_over():
    rounds = Rounds(a_tracker(1, success=False), sweep=4)
    for _ in range(5 * LOOK):
        rounds.count()
        assert not rounds.over(nobody(1)).any()


def test_a_descent_goes_on_while_it_leaps_and_is_looked_at_twice_afterwards():
    rounds, over = Rounds(a_tracker(1), sweep=4), []
    for t in range(1, 5 * LOOK + 1):
        rounds.count()
        over.append(rounds.over(torch.tensor([t < 3 * LOOK])).item())
    assert over.index(True) + 1 == 4 * LOOK


def test_a_descent_after_a_fruitless_sweep_goes_on_while_anything_is_gained():
    tracker = a_tracker(2)
    rounds = Rounds(tracker, sweep=2)
    rounds.sweeping[:] = True
    rounds.mark = torch.tensor([0.2, 0.3])  # the second image's sweep has gained a third
    for _ in range(2):
        rounds.count()
        over = rounds.over(nobody(2))
    rounds.restart(over)
    assert over.tolist() == [True, True]
    for _ in range(LOOK):
        rounds.count()
        tracker.best.norm *= 0.999
        over = rounds.over(nobody(2))
    assert over.tolist() == [False, True]


def test_the_penalty_has_the_derivative_it_says():
    d = torch.linspace(-2, 2, 24, dtype=torch.float64).view(2, 3, 4)
    penalty = Penalty(torch.rand(2, 3, 4, dtype=torch.float64), torch.tensor([0.1, 0.7]).double().view(2, 1, 1))
    direction, h = torch.randn(2, 3, 4, dtype=torch.float64), 1e-6
    change = penalty.values(d + h * direction) - penalty.values(d - h * direction)
    numeric = change.flatten(1).sum(1) / (2 * h)
    torch.testing.assert_close((penalty.derivative(d) * direction).sum((1, 2)), numeric, rtol=1e-6, atol=1e-8)


def test_steps_get_longer_where_they_keep_their_promise_and_shorter_where_they_do_not():
    tracker = a_tracker(5)
    rounds, trust = Rounds(tracker, sweep=4), Trust(tracker, least=0.0)
    rounds.sweeping[4] = True  # a sweep has steps of its own
    penalty = Penalty(torch.ones(5, 1, 1), torch.full((5, 1, 1), 1e-3))
    trust.length = torch.full((5,), 0.1)
    trust.predict(penalty, torch.ones(5, 1, 1), torch.ones(5, 1, 1, 1), torch.full((5, 1, 1, 1), -0.5))
    trust.predicted = torch.full((5,), -1.0)  # the penalty is 2 d where d is large
    d = torch.tensor([0.5, 0.9, 2.0, 0.5, 0.5]).view(-1, 1, 1)  # all of it, just enough of it, the wrong way
    trust.judge(d, torch.tensor([1.0, 1.0, 1.0, 0.11, 1.0]), rounds)
    torch.testing.assert_close(trust.length, torch.tensor([0.14, 0.1, 0.06, 0.11, 0.1]))


def test_8_bit_steps_stay_visible():
    tracker = a_tracker(1)
    trust = Trust(tracker, least=0.5 / 255)
    penalty = Penalty(torch.ones(1, 1, 1), torch.ones(1, 1, 1))
    trust.length = torch.full((1,), 0.5 / 255)
    trust.predict(penalty, torch.ones(1, 1, 1), torch.ones(1, 1, 1, 1), -torch.ones(1, 1, 1, 1))
    trust.judge(torch.full((1, 1, 1), 3.0), torch.ones(1), Rounds(tracker, sweep=4))
    assert trust.length.item() == pytest.approx(0.5 / 255)


def fake_query(apsr, success, norm=0.1):
    size = len(apsr)
    return SimpleNamespace(
        apsr=torch.tensor(apsr, dtype=torch.float64), success=torch.tensor(success), norm=torch.full((size,), norm)
    )


FAR = 1.0  # a length of steps that cross the ball


def a_ball(batch, success=True):
    tracker = a_tracker(batch, success=success)
    ball, rounds = Ball(tracker, 0.15), Rounds(tracker, sweep=50)
    ball.start(torch.full((batch,), 0.1))
    ball.pace.fill_(0.1)
    ball.missing = torch.full((batch,), 0.5, dtype=torch.float64)
    ball.since += 20
    rounds.age += 5
    return tracker, ball, rounds


def fit(ball, rounds, query, length=FAR, kept=True):
    return ball.fit(query, rounds, torch.full_like(ball.radius, length), torch.tensor(kept).expand(len(ball.radius)))


def test_the_ball_shrinks_after_successes_by_how_clear_they_are():
    _, ball, rounds = a_ball(3)
    allowed = ball.allowed[0].item()
    longer = fit(ball, rounds, fake_query([1.0, 1 - allowed / math.e, 1 - allowed], [True, True, True]))
    wanted = [0.1 * math.exp(-0.2), 0.1 * math.exp(-0.1), 0.1 * math.exp(-0.03)]
    torch.testing.assert_close(ball.radius, torch.tensor(wanted))
    assert longer.tolist() == [1, 1, 1]


def test_the_ball_grows_only_where_pixels_would_take_too_long():
    """The mean of missing pixels is five steps old, so it has to fall by 5 log(missing / allowed) / PATIENCE."""
    _, ball, rounds = a_ball(4)
    needed = 5 * math.log(0.3 / ball.allowed[0].item()) / PATIENCE
    ball.missing = 0.3 * torch.tensor([1.0, 1.1 * needed, 0.9 * needed, -1.0], dtype=torch.float64).exp()
    ball.missing[0] = 0.3
    longer = fit(ball, rounds, fake_query([0.7] * 4, [False] * 4))
    grown = 0.1 * math.exp(0.1)
    torch.testing.assert_close(ball.radius, torch.tensor([grown, 0.1, grown, grown]))
    torch.testing.assert_close(longer, (ball.radius / 0.1).sqrt())


def test_steps_that_are_too_short_get_longer_before_the_ball_grows():
    _, ball, rounds = a_ball(2)
    rounds.sweeping[1] = True  # a sweep has steps of its own
    longer = fit(ball, rounds, fake_query([0.5, 0.5], [False, False]), length=0.004)
    assert longer.tolist() == [LONGER, 1]
    assert ball.radius[0] == pytest.approx(0.1)
    assert ball.radius[1] > 0.1
    # steps that do not keep their promise are long enough, however short, and the ball is large enough for them
    ball.radius[:] = 0.1
    longer = fit(ball, rounds, fake_query([0.5, 0.5], [False, False]), length=0.004, kept=False)
    assert longer.tolist() == [1, 1]
    assert ball.radius[0] == pytest.approx(0.1)


def test_where_steps_are_short_a_success_is_followed_by_a_leap_that_gets_shorter_when_it_led_too_far():
    tracker, ball, rounds = a_ball(2)
    tracker.best.norm[:] = 0.1
    fit(ball, rounds, fake_query([1.0, 1.0], [True, True]), length=0.009)
    assert ball.leaping.all()
    torch.testing.assert_close(ball.radius, torch.full((2,), 0.1 * math.exp(-LEAP)))
    for _ in range(GRACE):  # it takes some steps to see whether a leap succeeds
        fit(ball, rounds, fake_query([0.5, 0.5], [False, False]))
    torch.testing.assert_close(ball.radius, torch.full((2,), 0.1 * math.exp(-LEAP)))
    fit(ball, rounds, fake_query([0.5, 0.98], [False, False]))
    assert ball.regrown.tolist() == [True, False]
    assert ball.radius[0] == pytest.approx(0.1 * math.exp(0.15 - LEAP))
    tracker.best.norm[:] = ball.radius
    fit(ball, rounds, fake_query([1.0, 1.0], [True, True]), length=0.001)
    torch.testing.assert_close(ball.leap, torch.tensor([LEAP / 2, LEAP]))
    torch.testing.assert_close(ball.radius, 0.1 * torch.tensor([0.15 - 1.5 * LEAP, -2 * LEAP]).exp())


def test_some_pixels_that_need_not_give_way_are_pushed_all_the_same():
    d = torch.arange(1000.0).view(1, 20, 50)
    for threshold, discarded in ((0.99, 5), (0.9, 95), (1.0, 0)):
        problem = Problem.build(torch.rand(1, 3, 20, 50), torch.zeros(1, 20, 50, dtype=torch.long), threshold=threshold)
        assert ConstraintMask(problem, "fixed", 10, RESERVE)(d, 1).sum() == 1000 - discarded


def test_the_pace_follows_successes_and_losses():
    _, ball, rounds = a_ball(2)
    fit(ball, rounds, fake_query([1.0, 0.5], [True, False]))
    torch.testing.assert_close(ball.pace, torch.tensor([0.11, 0.085]))


def test_before_the_first_success_the_ball_grows_by_the_rate_and_in_haste_where_all_pixels_are_missing():
    _, ball, rounds = a_ball(2, success=False)
    ball.missing = torch.tensor([0.2, 1.0], dtype=torch.float64)
    longer = fit(ball, rounds, fake_query([0.8, 0.0], [False, False]))
    grown = torch.tensor([0.15 * (1 + HASTE * 0.2**4), 0.15 * (1 + HASTE)]).exp()
    torch.testing.assert_close(ball.radius, 0.1 * grown)
    torch.testing.assert_close(longer, grown ** torch.tensor([(1 + 0.2**2) / 2, 1.0]))
    assert ball.pace.tolist() == pytest.approx([0.1, 0.1])


def test_the_point_that_a_round_begins_at_does_not_change_its_ball():
    _, ball, rounds = a_ball(1)
    rounds.age.fill_(1)
    ball.since.fill_(1)
    fit(ball, rounds, fake_query([0.0], [False], norm=0.0))
    assert ball.radius.item() == pytest.approx(0.1)
    assert ball.missing.item() == 1  # but the mean begins with it


def test_the_ball_is_never_much_larger_than_the_best_or_larger_than_the_box():
    tracker, ball, rounds = a_ball(3)
    tracker.best.norm[0] = 0.05
    tracker.best.success[1] = False
    ball.start(torch.tensor([0.1, 5.0, 0.1]))
    assert ball.radius[1] == ball.farthest[1] <= 1
    tracker.best.norm[2] = 0.08
    fit(ball, rounds, fake_query([1.0, 0.2, 0.2], [True, False, False]))
    torch.testing.assert_close(ball.radius, torch.tensor([0.05 * math.exp(-0.2), ball.farthest[1], LEEWAY * 0.08]))


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
    tracker = a_tracker(1, success=False)
    idle = Patience(tracker, 2)
    assert not any(idle() for _ in range(10))
    tracker.best.success[0] = True
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


@pytest.mark.parametrize("sweep", [10, 50])
def test_trimming_undoes_changes_that_matter_least_and_keeps_the_norm(sweep, monkeypatch):
    model, problem = load_model("demo-standard"), scene_problem(1)
    trimmed, whole = (Palma(steps=steps, bits=8, sweep=sweep) for steps in (60, 60 - TRIMS))
    object.__setattr__(whole, "_searched", lambda: whole.steps)  # the same search without the end
    few, many = trimmed.run(model, problem), whole.run(model, problem)
    trim = Palma._trim
    monkeypatch.setattr(Palma, "_trim", lambda self, *args: trim(self, *args[:3], torch.zeros_like(args[3])))
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
