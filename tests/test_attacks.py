"""What every attack promises, and how close each comes to optima known in closed form."""

import math

import pytest
import torch

import segprox
from segprox import Problem, Segmenter, SegproxError, make_attack
from segprox.attacks import ATTACKS, PAPER_ATTACKS, Apgd, Bisection, Dag, FixedEpsilonAttack, Pgd, Sea
from segprox.attacks.apgd import StepRule
from segprox.attacks.objectives import OBJECTIVES
from segprox.norms import distance
from segprox.tracker import Tracker
from tests.oracles import channels_as_logits, random_linear, smallest_norm, smallest_targeted, smallest_untargeted

MINIMAL = [name for name in ATTACKS if make_attack(name).family == "minimal"]
FIXED = [name for name in ATTACKS if make_attack(name).family == "fixed-epsilon"]
SHORT = {  # few steps, for promises that do not depend on how many there are
    **{name: {"steps": 12} for name in ATTACKS},
    **{name: {"rounds": 3, "steps": 4} for name in ATTACKS if name.endswith(("x20", "x40", "x10"))},
}
NORMS = [
    (name, norm)
    for name in ("palma", "fmn", "pdpgd", "alma", "pgd", "apgd", "anneal")
    for norm in ("l0", "l1", "l2", "linf")
    if norm in segprox.attacks.norms(make_attack(name))
]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def grey_images(batch, channels, seed=0, spread=0.03):
    return 0.5 + spread * (2 * torch.rand(batch, channels, 32, 32, generator=generator(seed)) - 1)


def small_network(classes=4, seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, classes, 3, padding=1)
    return Segmenter(torch.nn.Sequential(*layers))


def small_problem(name, model, batch=3, **options):
    images = torch.rand(batch, 3, 12, 10, generator=generator(1))
    labels = model(images).argmax(1)
    labels[:, :2] = 255
    target = 1 if name == "asma" else None
    return Problem.build(images, labels, target=target, **options)


# How far above the optimum of a linear model each attack ends, at most, as measured. The model has a channel per class,
# so that the smallest perturbation is known for every norm.
FACTORS = {
    ("palma", "linf"): 1.05,
    ("palma", "l2"): 1.1,
    ("palma", "l1"): 1.15,
    ("alma-prox", "linf"): 1.05,
    ("fmn", "linf"): 1.05,
    ("pdpgd", "linf"): 1.05,
    ("dag-0.003", "linf"): 1.15,  # stops at a multiple of its step
    ("dag-0.001", "linf"): 1.05,
    ("i-fgsm-13x20", "linf"): 1.05,
    ("mi-fgsm-13x20", "linf"): 1.05,
    ("pgd-ce-13x40", "linf"): 1.05,
    ("pgd-ce-13x4x10", "linf"): 1.05,
    ("pgd-dlr-13x40", "linf"): 1.05,
    ("pgd-dlr-13x4x10", "linf"): 1.05,
    ("bisect:apgd", "linf"): 1.05,
    ("bisect:anneal", "linf"): 1.05,
    # In l1 and l2 an attack must also spread its perturbation over the pixels, which few are made for.
    ("pdpgd", "l2"): 1.5,
    ("pdgd", "l2"): 2.0,
    ("alma", "l2"): 2.5,
    ("fmn", "l2"): 2.8,
    ("ddn", "l2"): 3.6,
    ("pgd-ce-13x40", "l2"): 4.0,
    ("pdpgd", "l1"): 3.5,
    ("fmn", "l0"): 1.05,
}
QUICKER = {
    "alma": {"first_move": 0.1},  # its first step is made for larger images
    "bisect:anneal": {"steps": 60},
    "bisect:apgd": {"steps": 60},
}


def optimum(model, images, labels, mask, norm):
    """The smallest norm that makes 99 % of the counted pixels wrong (the easiest ones), one per image."""
    sizes = smallest_untargeted(model, images, labels)  # linf: both channels move by half of the gap
    if norm == "linf":
        return smallest_norm(sizes, mask, 0.99)
    found = []
    for size, counted in zip(sizes, mask):
        easiest = size[counted].sort().values[: math.ceil(0.99 * int(counted.sum()) - 1e-9)].double()
        per_pixel = {"l0": torch.ones_like(easiest), "l1": 2 * easiest, "l2": 2 * easiest.square()}[norm]
        found.append(per_pixel.sum().sqrt() if norm == "l2" else per_pixel.sum())
    return torch.stack(found)


@pytest.mark.parametrize(("name", "norm"), FACTORS)
def test_minimal_attacks_come_within_their_factor_of_the_optimum(name, norm):
    model, images = channels_as_logits(4), grey_images(2, 4)
    labels = model(images).argmax(1)
    labels[1, :4] = 255
    problem = Problem.build(images, labels)
    options = QUICKER.get(name, {}) | ({} if make_attack(name).norm == norm else {"norm": norm})
    found = make_attack(name, **options).run(model, problem)
    best = optimum(model, images, problem.labels, problem.mask, norm)
    assert found.success.all()
    assert (found.norm <= FACTORS[name, norm] * best).all(), (found.norm / best).tolist()
    assert (found.norm >= 0.999 * best).all()
    torch.testing.assert_close(found.norm, distance(found.images - images, norm))


@pytest.mark.parametrize("name", [*PAPER_ATTACKS, "alma", "pdgd", "palma"])
def test_minimal_attacks_reach_a_target(name):
    model, images = channels_as_logits(4), grey_images(1, 4)
    targets = torch.randint(0, 4, images[:, 0].shape, generator=generator(1))
    found = make_attack(name).run(model, Problem.build(images, target=targets))
    assert found.success.all()
    if make_attack(name).norm == "linf":
        best = smallest_norm(smallest_targeted(images, targets), torch.ones_like(targets, dtype=torch.bool), 0.99)
        # without multipliers, the pixels that lead pull as hard as those that trail
        assert (found.norm <= (1.05 if name in ("alma-prox", "palma", "pdpgd") else 1.6) * best).all()


def test_asma_moves_towards_its_target():
    model, images = channels_as_logits(4), grey_images(2, 4)
    problem = Problem.build(images, target=1)
    found = make_attack("asma", rate=3e-3, rate_min=3e-4).run(model, problem)
    assert (found.apsr > 0.95).all()


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("target", [None, 2])
def test_fixed_epsilon_attacks_reach_the_optimum_of_a_linear_model(name, target):
    # Two classes: the loss is a monotone function of one difference of logits, largest at the corner of the ball.
    weight = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, -1.0]])
    model = Segmenter(torch.nn.Conv2d(3, 2, 1, bias=False))
    model.model.weight.data = weight.view(2, 3, 1, 1)
    images, epsilon = grey_images(1, 3), 4 / 255
    labels = model(images).argmax(1)
    target = None if target is None else 1 - labels
    problem = Problem.build(images, labels, target=target, threshold=1.0)
    attack = make_attack(name, epsilon=epsilon, **({} if name == "fgsm" else {"steps": 40}))
    found = attack.run(model, problem)
    gap = (model(images)[:, 1] - model(images)[:, 0]).abs()
    within_reach = gap < epsilon * (weight[1] - weight[0]).abs().sum()
    share = 0.95 if "fgsm" in name and name != "fgsm" else 1.0  # they stop one step short of the ball's surface
    surely = gap < share * epsilon * (weight[1] - weight[0]).abs().sum()
    assert surely.double().mean() - 1e-9 <= found.apsr.item() <= within_reach.double().mean() + 1e-9
    assert (found.norm <= epsilon + 1e-6).all()


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", FIXED)
def test_epsilon_and_the_box_are_respected(name, norm):
    model = small_network()
    images = torch.rand(2, 3, 12, 10, generator=generator(2)).round()  # every value on the border of the box
    problem = Problem.build(images, model(images).argmax(1), threshold=1.0)
    epsilon = 0.1 if norm == "linf" else 1.5
    found = make_attack(name, epsilon=epsilon, norm=norm, **(SHORT[name] if name != "fgsm" else {})).run(model, problem)
    assert found.images.min() >= 0
    assert found.images.max() <= 1
    assert (distance(found.images - images, norm) <= epsilon * (1 + 1e-5)).all()
    assert (found.apsr > problem.apsr(model(images))).all()


@pytest.mark.parametrize("name", ATTACKS)
def test_batch_equals_alone_and_order_does_not_matter(name):
    model = small_network()
    problem, attack = small_problem(name, model), make_attack(name, **SHORT[name])
    together = attack.run(model, problem)
    for i in (2, 0):
        alone = attack.run(
            model,
            Problem(problem.images[i : i + 1], problem.labels[i : i + 1], problem.mask[i : i + 1], problem.targeted),
        )
        for field in ("images", "norm", "apsr", "success", "forwards", "backwards"):
            assert torch.equal(getattr(together, field)[i : i + 1], getattr(alone, field)), field
        assert together.traces[i : i + 1] == alone.traces


@pytest.mark.parametrize("name", ["alma-prox", "fmn", "dag-0.003", "pgd", "pgd-ce-13x40"])
def test_a_trace_says_what_fewer_queries_would_have_given(name, monkeypatch):
    monkeypatch.setattr("segprox.trace.FINEST", 0.0)  # every improvement
    model = small_network()
    problem, attack = small_problem(name, model, threshold=0.05), make_attack(name, **SHORT[name])
    found = attack.run(model, problem)
    spent = (found.forwards + found.backwards).tolist()
    assert any(found.traces)
    for queries in range(1, max(spent) + 1):
        stopped = attack.run(model, problem, max_queries=queries)
        for i, trace in enumerate(found.traces):
            reached = [step.norm for step in trace if step.queries <= queries]
            assert stopped.success[i] == bool(reached)
            assert not reached or stopped.norm[i] == reached[-1]


@pytest.mark.parametrize(("name", "norm"), NORMS)
def test_every_norm_is_measured_as_it_says(name, norm):
    model = small_network()
    problem = small_problem(name, model, threshold=0.5)
    found = make_attack(name, norm=norm, steps=40).run(model, problem)
    torch.testing.assert_close(found.norm, distance(found.images - problem.images, norm))
    assert found.images.min() >= 0
    assert found.images.max() <= 1


@pytest.mark.parametrize("name", ATTACKS)
def test_queries_are_those_announced(name):
    model = small_network()
    problem, attack = small_problem(name, model, threshold=1.0), make_attack(name, **SHORT[name])
    found = attack.run(model, problem)
    forwards, backwards = attack.cost()
    if name.startswith("dag-0.003"):  # stops at success
        assert (found.forwards <= forwards).all()
    else:
        assert found.forwards.tolist() == [forwards] * 3
        assert found.backwards.tolist() == [backwards] * 3


def test_the_papers_attacks_cost_what_the_paper_says():
    forwards = {name: make_attack(name).cost().forwards for name in PAPER_ATTACKS}
    assert forwards == {
        "i-fgsm-13x20": 260, "mi-fgsm-13x20": 260, "pgd-ce-13x40": 520, "pgd-ce-13x4x10": 520, "pgd-dlr-13x40": 520,
        "pgd-dlr-13x4x10": 520, "dag-0.003": 500, "dag-0.001": 500, "fmn": 500, "pdpgd": 500, "alma-prox": 500,
    }  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_void_pixels_have_no_influence(name):
    model = small_network()
    images = torch.rand(1, 3, 12, 10, generator=generator(3))
    labels = model(images).argmax(1)
    void = torch.rand(labels.shape, generator=generator(4)) < 0.4
    target = 1 if name == "asma" else None
    attack = make_attack(name, **SHORT[name])
    marked = attack.run(model, Problem.build(images, labels.masked_fill(void, 255), target=target))
    otherwise = attack.run(model, Problem.build(images, labels.masked_fill(void, 3), mask=~void, target=target))
    assert torch.equal(marked.images, otherwise.images)


@pytest.mark.parametrize("name", ATTACKS)
def test_two_classes_void_images_and_empty_batches(name):
    model = small_network(classes=2)
    problem = small_problem(name, model)
    problem.mask[0] = False
    found = make_attack(name, **SHORT[name]).run(model, problem)
    assert found.success[0].item() is False
    assert found.apsr[0] == 0
    assert found.images.isfinite().all()
    nothing = Problem(problem.images[:0], problem.labels[:0], problem.mask[:0], problem.targeted)
    assert len(make_attack(name, **SHORT[name]).run(model, nothing).norm) == 0


@pytest.mark.parametrize("name", [*ATTACKS, "bisect:apgd"])
def test_the_layout_of_the_images_in_memory_does_not_matter(name):
    # What works in place on a flattened tensor works on a copy, if the tensor is strided.
    model, images = random_linear(4, 3).double(), grey_images(2, 3).double()
    labels = model(images).argmax(1)
    strided = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert not strided.is_contiguous()
    attack, target = spender(name), 1 if name == "asma" else None
    found = [attack.run(model, Problem.build(x, labels, target=target, threshold=0.9)) for x in (images, strided)]
    torch.testing.assert_close(found[0].norm, found[1].norm)
    torch.testing.assert_close(found[0].apsr, found[1].apsr)


class NanAbove(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = random_linear(4, 3).model

    def forward(self, x):
        return torch.where(x.amax((1, 2, 3), keepdim=True) > 0.95, torch.nan, self.inner(x))


@pytest.mark.parametrize("name", ATTACKS)
def test_nan_logits_spoil_only_their_own_image(name):
    model, images = Segmenter(NanAbove()), grey_images(2, 3)
    labels = model(images).argmax(1)
    images[0, 0, 0, 0] = 1.0
    target = 1 if name == "asma" else None
    attack = make_attack(name, **SHORT[name])
    found = attack.run(model, Problem.build(images, labels, target=target))
    alone = attack.run(model, Problem.build(images[1:], labels[1:], target=target))
    assert found.images.isfinite().all()
    assert torch.equal(found.images[1:], alone.images)


def test_random_starts_differ_by_seed_and_image_only():
    model = small_network()
    attack = make_attack("pgd", steps=1, random_start=True)
    images = torch.rand(2, 3, 12, 10, generator=generator(5))
    runs = [attack.run(model, Problem.build(images, model(images).argmax(1), seed=seed)).images for seed in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0][0] - images[0], runs[0][1] - images[1])


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("dag-0.003", {"norm": "l2"}, "norm of dag-0.003 cannot be 'l2'"),
        ("alma", {"norm": "linf"}, "norm of alma cannot be 'linf'"),
        ("pgd", {"norm": "l1"}, "norm of pgd cannot be 'l1'"),
        ("pgd", {"epsilon": "8/0"}, "epsilon of pgd cannot be '8/0'"),
        ("pgd-ce-13x40", {"epsilon": 0.1}, "pgd-ce-13x40 has no field 'epsilon'"),
        ("pgd", {"objective": "hinge"}, "objective of pgd cannot be 'hinge'"),
        ("bisect:fmn", {}, "fmn is a minimal attack already"),
        ("bisect:nothing", {}, "there is no attack 'nothing'"),
        ("pgd", {"rounds": 3}, "pgd has no field 'rounds'"),
        ("pgd", {"keep": "smallest-radius"}, "pgd has no field 'keep'"),
        ("bisect:pgd", {"keep": "all"}, "keep of bisect:pgd cannot be 'all'"),
    ],
)
def test_impossible_wishes_are_refused(name, options, sentence):
    with pytest.raises(SegproxError, match=sentence):
        make_attack(name, **options)


def test_asma_refuses_to_be_untargeted():
    model = small_network()
    with pytest.raises(SegproxError, match="asma needs a target"):
        make_attack("asma").run(model, small_problem("pgd", model))


def smallest_point(series, threshold):
    successes = [(norm, apsr) for one in series for norm, apsr in one if apsr >= threshold]
    least = min(norm for norm, _ in successes)
    return [point for point in successes if point[0] == least][-1]


def most_in_the_smallest_radius(series, threshold):
    successes = [one for one in series if any(apsr >= threshold for _, apsr in one)]  # each smaller than the one before
    highest = max(apsr for _, apsr in successes[-1])
    return [point for point in successes[-1] if point[1] == highest][-1]


KEPT_BY = {"smallest-point": smallest_point, "smallest-radius": most_in_the_smallest_radius}
KEYS = "norm", "apsr"


class TestBisection:
    def test_resolution(self):
        model, images = channels_as_logits(4), grey_images(1, 4)
        labels = model(images).argmax(1)
        best = smallest_norm(smallest_untargeted(model, images, labels), labels >= 0, 0.99)
        for rounds in (8, 13):
            found = make_attack("pgd-ce-13x40", rounds=rounds).run(model, Problem.build(images, labels))
            assert 0 <= found.norm.item() - best.item() <= 2.0 ** (1 - rounds) + 1e-6

    def test_images_have_their_own_intervals(self):
        model = channels_as_logits(4)
        images = torch.cat([grey_images(1, 4, spread=0.01), grey_images(1, 4, spread=0.2)])
        labels = model(images).argmax(1)
        found = make_attack("pgd-ce-13x40").run(model, Problem.build(images, labels))
        best = smallest_norm(smallest_untargeted(model, images, labels), labels >= 0, 0.99)
        assert (found.norm <= best + 2.0**-12 + 1e-6).all()

    @pytest.mark.parametrize("keep", ["smallest-point", "smallest-radius"])
    def test_finished_images_cost_no_queries(self, keep):
        model, images = channels_as_logits(4), grey_images(3, 4)
        labels = model(images).argmax(1)
        labels[1] = (labels[1] + 1) % 4  # wrong from the start
        labels[2] = 255  # nothing to make wrong
        found = make_attack("pgd-ce-13x40", keep=keep).run(model, Problem.build(images, labels))
        assert found.forwards.tolist() == [520, 40, 0]
        assert found.norm[1] == 0

    def test_stopping_early_finds_the_same_for_less(self):
        model, images = channels_as_logits(4), grey_images(2, 4)
        problem = Problem.build(images, model(images).argmax(1))
        full, early = (make_attack("pgd-ce-13x40", stop_early=stop).run(model, problem) for stop in (False, True))
        assert (early.norm <= full.norm + 2.0**-12).all()
        assert (early.forwards < full.forwards).all()

    @pytest.mark.parametrize("name", ["pgd-ce-13x4x10", "bisect:apgd"])
    def test_what_is_kept_is_what_the_rule_says_of_the_queries(self, name):
        model, rounds, steps = small_network(), 4, 9
        problem = small_problem(name, model, threshold=0.5)
        attacks = [make_attack(name, rounds=rounds, steps=steps, keep=keep) for keep in KEPT_BY]
        queries = [[], []]
        found = [attack.run(model, problem, seen.append) for attack, seen in zip(attacks, queries)]
        norms, rates = ([torch.stack([getattr(one, key) for one in seen], 1) for seen in queries] for key in KEYS)
        assert torch.equal(*norms)
        assert torch.equal(*rates)
        last_stage = steps - 6 if name == "bisect:apgd" else 0  # whose points alone are within the radius
        for i in range(3):
            series = [part.view(rounds, -1)[:, -last_stage:].tolist() for part in (norms[0][i], rates[0][i])]
            series = [list(zip(*one)) for one in zip(*series)]  # per round, the norm and APSR of each point
            for result, rule in zip(found, KEPT_BY.values()):
                assert (result.norm[i].item(), result.apsr[i].item()) == rule(series, 0.5)
        assert not torch.equal(found[0].images, found[1].images)

    def test_the_smallest_radius_keeps_the_last_of_equals(self):
        model, images = channels_as_logits(4), grey_images(2, 4)
        problem = Problem.build(images, model(images).argmax(1))
        point, radius = (make_attack("i-fgsm-13x20", rounds=1, keep=keep).run(model, problem) for keep in KEPT_BY)
        torch.testing.assert_close(point.norm, torch.full((2,), 1 / 20))  # the first step makes every pixel wrong
        farther = torch.maximum(images, 1 - images).amax((1, 2, 3))
        assert (radius.norm > 0.45).all()  # the last step ends at a face of the box
        assert (radius.norm <= farther).all()

    def test_a_limit_that_ends_amid_a_round_leaves_what_the_rule_says_by_then(self):
        model = small_network()
        problem = small_problem("pgd", model, threshold=0.7)
        attacks = [make_attack("bisect:pgd", rounds=4, steps=5, keep=keep) for keep in KEPT_BY]
        for max_queries in range(1, 38, 2):
            point, radius = (attack.run(model, problem, max_queries=max_queries) for attack in attacks)
            assert torch.equal(point.forwards, radius.forwards)
            assert torch.equal(point.success, radius.success)
            assert (point.norm <= radius.norm)[point.success].all()
            assert_consistent(radius, model, problem, "linf")
        assert torch.equal(radius.norm, attacks[1].run(model, problem).norm)

    def test_of_l2_starts_at_the_far_corner(self):
        images = grey_images(1, 4)
        corner = Bisection(attack=Pgd(norm="l2"))._farthest(images)
        assert corner.item() == pytest.approx(torch.maximum(images, 1 - images).norm().item())

    def test_wraps_any_fixed_epsilon_attack(self):
        attack = make_attack("bisect:sea", rounds=2, steps=6)
        assert isinstance(attack, Bisection)
        assert isinstance(attack.attack, FixedEpsilonAttack)
        assert attack.cost().forwards == 2 * 3 * 6


class TestApgd:
    def test_stages_shrink_and_only_the_last_counts(self):
        model = small_network()
        problem = small_problem("apgd", model, threshold=1.0)
        norms = []
        attack = Apgd(steps=20, epsilon=0.02)
        found = attack.run(model, problem, lambda progress: norms.append(progress.norm.max().item()))
        assert max(norms[:6]) == pytest.approx(0.04, rel=1e-3)
        assert max(norms[6:12]) <= 0.03 + 1e-6
        assert max(norms[12:]) <= 0.02 + 1e-6
        assert (found.norm <= 0.02 + 1e-6).all()

    def test_checkpoints_come_ever_closer(self):
        rule, at = StepRule(100, torch.zeros(1)), []
        for k in range(100):
            rule.see(torch.tensor([float(k)]))
            if rule.halve(k, torch.tensor([float(k)])) is not None:
                at.append(k)
        assert at == [22, 41, 57, 70, 80, 87, 93, 99]

    def test_step_is_halved_when_the_loss_does_not_grow(self):
        rule = StepRule(100, torch.zeros(3))
        best = torch.full((3,), -math.inf)
        for k in range(42):
            # grows always; grows in every second step; grows for 22 steps, then never
            loss = torch.tensor([k, k + 3 * (k % 2), min(k, 22)], dtype=torch.float32)
            rule.see(loss)
            best = torch.maximum(best, loss)
            halved = rule.halve(k, best)
            if k == 22:
                assert halved.tolist() == [False, True, False]
        assert halved.tolist() == [False, True, True]

    @pytest.mark.parametrize(("attack", "ends"), [
        (Apgd(steps=20, objective="tsallis"), {5, 11, 19}),
        (Apgd(steps=20, objective="tsallis", reduce_radius=False), {19}),
    ])  # fmt: skip
    def test_an_objective_sees_the_progress_of_the_whole_attack_once(self, attack, ends, monkeypatch):
        seen, tsallis = [], OBJECTIVES["tsallis"]

        def recorded(query, problem, progress):
            seen.append(progress)
            return tsallis(query, problem, progress)

        monkeypatch.setitem(OBJECTIVES, "tsallis", recorded)
        model = small_network()
        attack.run(model, small_problem("apgd", model, threshold=1.0))
        assert seen == [k / 20 for k in range(20) if k not in ends]  # the last point of a stage needs no gradient

    @pytest.mark.parametrize("objective", OBJECTIVES)
    def test_every_objective_does_damage(self, objective):
        model = small_network()
        problem = small_problem("apgd", model, threshold=1.0)
        found = Apgd(steps=30, epsilon=0.05, objective=objective).run(model, problem)
        assert (found.apsr > problem.apsr(model(problem.images)) + 0.1).all()


def test_sea_is_never_weaker_than_its_members():
    model = small_network()
    problem = small_problem("sea", model, batch=4, threshold=1.0)
    sea = Sea(steps=10, epsilon=0.02)
    together = sea.run(model, problem)
    apart = torch.stack([member.run(model, problem).apsr for member in sea.members])
    assert torch.equal(together.apsr, apart.amax(0))


def test_dag_stops_each_image_at_its_first_success():
    model, images = channels_as_logits(4), torch.cat([grey_images(1, 4), grey_images(1, 4, spread=0.1)])
    found = Dag(step_size=0.002).run(model, Problem.build(images, model(images).argmax(1)))
    assert found.success.all()
    assert found.forwards[0] < found.forwards[1] < 100
    torch.testing.assert_close(found.norm, 0.002 * (found.forwards - 1).float(), rtol=1e-3, atol=0)


class TestTracker:
    def test_parts_count_and_remember_for_the_whole(self):
        model = small_network()
        problem = small_problem("pgd", model, threshold=0.3)
        whole = Tracker(model, problem, "linf")
        aside, part = whole.child(share=False), whole.child(skipped=torch.tensor([True, False, False]))
        wild = torch.rand(problem.images.shape, generator=generator(6))
        aside.query(wild)
        assert not whole.best.success.any()
        query = part.query(wild)
        query.gradient(torch.ones_like(query.logits))
        assert whole.forwards.tolist() == [1, 2, 2]
        assert whole.backwards.tolist() == [0, 1, 1]
        assert torch.equal(whole.best.images[1:], wild[1:])
        assert torch.equal(whole.best.images[0], problem.images[0])

    def test_the_most_damage_is_kept_whatever_its_norm(self):
        model = small_network()
        problem = small_problem("pgd", model, threshold=1.0)
        tracker = Tracker(model, problem, "linf", "most")
        rates = [tracker.query(torch.rand(problem.images.shape, generator=generator(seed))).apsr for seed in range(4)]
        assert torch.equal(tracker.best.apsr, torch.stack(rates).amax(0))


# --- limits on queries ------------------------------------------------------------------------------------------------
MADE_OF_PARTS = ("bisect:anneal", "bisect:apgd", "bisect:sea", "bisect:pgd")
SPENDERS = [*ATTACKS, *MADE_OF_PARTS]


def spender(name):
    options = {"rounds": 3, "steps": 4} if name in MADE_OF_PARTS else SHORT[name]
    return make_attack(name, **options)


def assert_consistent(found, model, problem, norm):
    torch.testing.assert_close(found.norm, distance(found.images - problem.images, norm))
    apsr = problem.apsr(torch.cat([model(image[None]) for image in found.images]))
    assert found.apsr.tolist() == apsr.tolist()
    assert found.success.tolist() == problem.succeeded(apsr).tolist()


@pytest.mark.parametrize("name", SPENDERS)
@pytest.mark.parametrize("max_queries", [1, 2, 7])
def test_no_more_queries_than_allowed(name, max_queries):
    model, attack = small_network(), spender(name)
    problem = small_problem(name, model, batch=2, threshold=0.9)
    found = attack.run(model, problem, max_queries=max_queries)
    spent = found.forwards + found.backwards
    assert (spent <= max_queries).all()
    assert (found.forwards >= 1).all()
    if not attack.stops_at_success:
        least = min(max_queries, sum(attack.cost()))
        assert (spent >= least - 1).all()  # a forward may be kept back for the image itself, and not be needed
    assert_consistent(found, model, problem, attack.norm)
    for i in range(2):
        alone = attack.run(model, problem.select([i]), max_queries=max_queries)
        assert torch.equal(alone.images[0], found.images[i])
        assert (alone.forwards.item(), alone.backwards.item()) == (found.forwards[i].item(), found.backwards[i].item())
        assert alone.apsr.item() == found.apsr[i].item()


@pytest.mark.parametrize("name", SPENDERS)
def test_a_limit_that_is_large_enough_changes_nothing(name):
    model, attack = small_network(), spender(name)
    problem = small_problem(name, model, batch=2, threshold=0.9)
    free, bound = attack.run(model, problem), attack.run(model, problem, max_queries=sum(attack.cost()) + 1)
    assert torch.equal(free.images, bound.images)
    assert torch.equal(free.norm, bound.norm)
    assert torch.equal(free.apsr, bound.apsr)
    assert torch.equal(free.forwards, bound.forwards)
    assert torch.equal(free.backwards, bound.backwards)


def test_images_use_their_queries_on_their_own():
    model, images = channels_as_logits(4), grey_images(2, 4)
    images[0] = 0.5 + (images[0] - 0.5) / 10  # gives way in a tenth of the steps
    problem = Problem.build(images, model(images).argmax(1))
    attack = Dag(step_size=0.001, steps=100)
    free = attack.run(model, problem)
    assert free.success.all()
    assert free.forwards[0] < free.forwards[1] / 2
    max_queries = int(free.forwards[0] + free.backwards[0]) + 4
    found = attack.run(model, problem, max_queries=max_queries)
    assert found.success.tolist() == [True, False]
    assert found.forwards[0] == free.forwards[0]
    assert int(found.forwards[1] + found.backwards[1]) == max_queries


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("alma-prox", {"steps": 120}),  # with a pilot that ends early for some
        ("bisect:pgd", {"steps": 8, "rounds": 4, "stop_early": True}),
        ("bisect:apgd", {"steps": 8, "rounds": 4, "stop_early": True}),
        ("dag-0.003", {"steps": 60, "step_size": 0.002}),
    ],
)
def test_an_image_without_queries_left_does_not_end_the_attack_of_others(name, options):
    model, images = channels_as_logits(4), grey_images(3, 4, spread=0.2)
    images[0] = 0.5 + (images[0] - 0.5) / 100
    labels = model(images).argmax(1)
    labels[2] = 255  # no pixel counts
    problem, attack = Problem.build(images, labels), make_attack(name, **options)
    differ = 0
    for max_queries in range(1, 40, 3):
        found = attack.run(model, problem, max_queries=max_queries)
        differ += int(found.forwards[0] != found.forwards[1])
        assert (found.forwards + found.backwards <= max_queries).all()
        for i in range(3):
            alone = attack.run(model, problem.select([i]), max_queries=max_queries)
            assert torch.equal(alone.images[0], found.images[i])
            assert alone.forwards.item() == found.forwards[i].item()
            assert alone.backwards.item() == found.backwards[i].item()
    assert differ


def test_a_limit_holds_in_low_precision_as_well():
    model = small_network()
    problem = small_problem("fmn", model, batch=2, threshold=0.5)
    model.autocast = torch.bfloat16
    for name in ("fmn", "pgd", "bisect:pgd", "apgd"):
        for max_queries in range(1, 12):
            found = spender(name).run(model, problem, max_queries=max_queries)
            assert (found.forwards + found.backwards <= max_queries).all()
            exact = problem.apsr(torch.cat([model.full_precision(image[None]) for image in found.images]))
            known = found.apsr > 0  # 0 where there was no query left to look
            assert found.apsr[known].tolist() == exact[known].tolist()
            assert not (found.success & ~problem.succeeded(exact)).any()
