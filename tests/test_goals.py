"""Goals with regions: what is attacked, what is protected, what does not count."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import segprox
from segprox import Problem, SegproxError, load_dataset, make_attack
from segprox.attacks.lagrangian import ConstraintMask
from segprox.attacks.objectives import OBJECTIVES, gradient
from segprox.cli import main
from segprox.data import make_goal, open_split
from segprox.data.targets import majority
from segprox.losses import cross_entropy, dlr_plus, margin
from tests.oracles import channels_as_logits, smallest_norm, smallest_targeted, smallest_untargeted
from tests.test_problem import build, one_hot
from tests.test_targets import Maps

ATTACKS = ["palma", "alma-prox", "pdpgd", "fmn", "dag-0.001", "pgd-ce-13x40", "bisect:anneal"]


def halves(images):
    """The left half of each image."""
    left = torch.zeros(len(images), *images.shape[2:], dtype=torch.bool)
    left[..., : images.shape[3] // 2] = True
    return left


def grey(seed=0):
    return 0.5 + 0.03 * (2 * torch.rand(2, 4, 32, 32, generator=torch.Generator().manual_seed(seed)) - 1)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("towards", [None, 1])
def test_protected_pixels_stay_and_attacked_ones_cost_what_they_must(name, towards):
    """Pixels of this model do not influence each other, so protecting some of them is free."""
    model, images = channels_as_logits(4), grey()
    labels, attacked = model(images).argmax(1), halves(images)
    problem = Problem.build(images, labels, target=towards, protect=~attacked)
    found = make_attack(name).run(model, problem)
    needed = (
        smallest_untargeted(model, images, labels) if towards is None else smallest_targeted(images, labels * 0 + 1)
    )
    best = smallest_norm(needed, attacked, 0.99)
    assert found.success.all()
    assert (found.norm >= 0.999 * best).all()
    assert (found.norm <= (1.06 if towards is None else 1.7) * best).all(), (found.norm / best).tolist()
    predicted = model(found.images).argmax(1)
    wrong = predicted != labels if towards is None else predicted == towards
    assert all(wrong[i][attacked[i]].double().mean() >= 0.99 for i in range(2))
    assert all((predicted == labels)[i][~attacked[i]].double().mean() >= 0.99 for i in range(2))


def test_a_small_region_is_not_drowned():
    """Ten pixels that shall change among a thousand that shall not: 99 % of all pixels would be none of the ten."""
    model, images = channels_as_logits(4), grey(3)
    labels, attacked = model(images).argmax(1), torch.zeros(2, 32, 32, dtype=torch.bool)
    attacked[:, 10, 5:15] = True
    found = segprox.attack(model, images, labels, protect=~attacked, steps=100)
    assert found.success.all()
    assert (model(found.images).argmax(1) != labels)[attacked].all()


def test_rates_and_success_of_two_regions():
    labels = torch.zeros(1, 1, 110, dtype=torch.long)
    protect = torch.arange(110).view(1, 1, -1) >= 10
    problem = build(labels, protect=protect, threshold=0.9, protect_threshold=0.95)
    for wrong, spoilt, success in ((9, 5, True), (8, 5, False), (9, 6, False), (10, 0, True)):
        predicted = torch.zeros_like(labels)
        predicted[..., :wrong] = 1
        predicted[..., 10 : 10 + spoilt] = 1
        logits = one_hot(predicted, 2)
        assert [rate.item() for rate in problem.rates(logits)] == [wrong / 10, 1 - spoilt / 100]
        apsr = problem.apsr(logits)
        assert problem.succeeded(apsr).item() is success
        assert 0 <= apsr.item() <= wrong / 10


@given(st.integers(1, 400), st.floats(0.01, 1), st.floats(0.01, 1), st.data())
def test_a_success_is_exact_at_both_thresholds(size, threshold, protect_threshold, data):
    right = data.draw(st.integers(0, size))
    labels = torch.zeros(1, 1, size + 1, dtype=torch.long)
    protect = torch.arange(size + 1).view(1, 1, -1) > 0
    problem = build(labels, protect=protect, threshold=threshold, protect_threshold=protect_threshold)
    predicted = torch.ones_like(labels)
    predicted[..., 1 : 1 + right] = 0
    apsr = problem.apsr(one_hot(predicted, 2))
    assert problem.succeeded(apsr).item() is (right / size >= protect_threshold)
    assert 0 <= apsr.item() <= 1


def test_regions_weigh_the_same_in_means_and_gradients():
    labels = torch.zeros(2, 1, 5, dtype=torch.long)
    labels[1] = 255
    labels[1, 0, 0] = 0
    problem = build(labels, protect=torch.arange(5).view(1, 1, 5).expand(2, 1, 5) > 0)
    values = torch.tensor([1.0, 3, 3, 3, 3]).expand(2, 1, 5)
    assert problem.mean(values).tolist() == [2.0, 1.0]  # the second image has no protected pixel
    assert problem.balanced(torch.ones(2, 3, 1, 5))[0, 2, 0].tolist() == [2.5, 0.625, 0.625, 0.625, 0.625]


def test_each_region_has_constraints_to_spare():
    labels, d = torch.zeros(1, 1, 300, dtype=torch.long), torch.arange(300.0).view(1, 1, -1)
    problem = build(labels, protect=torch.arange(300).view(1, 1, -1) < 100, threshold=0.99, protect_threshold=0.95)
    kept = ConstraintMask(problem, "fixed", 10)(d, 1)
    assert (kept == 0).nonzero()[:, 2].tolist() == [95, 96, 97, 98, 99, 298, 299]


@pytest.mark.parametrize("loss", [margin, dlr_plus])
def test_losses_with_a_kind_for_each_pixel(loss):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 6, 4, generator=generator, dtype=torch.float64)
    labels, which = torch.randint(0, 5, (2, 6, 4), generator=generator), torch.rand(2, 6, 4, generator=generator) < 0.5
    weights = torch.rand(2, 6, 4, generator=generator, dtype=torch.float64)
    mixed, wanted, true = (loss(logits, labels, targeted=kind, tolerance=0.1) for kind in (which, True, False))
    torch.testing.assert_close(mixed.values, torch.where(which, wanted.values, true.values))
    expected = torch.where(which.unsqueeze(1), wanted.pullback(weights), true.pullback(weights))
    torch.testing.assert_close(mixed.pullback(weights), expected)


@pytest.mark.parametrize("name", ["ce", "cospgd", "js", "dlr", "smooth-apsr"])
def test_objectives_push_protected_pixels_towards_their_labels(name):
    model, images = channels_as_logits(4), grey()
    labels = model(images).argmax(1)
    problem = Problem.build(images, labels, protect=~halves(images))
    tracker = segprox.Tracker(model, problem, "linf")
    found = gradient(OBJECTIVES[name], tracker.query(images), problem, 0.5)
    own = found.gather(1, labels[:, None])[:, 0]
    assert (own[halves(images)] <= 0).all()
    assert (own[~halves(images)] >= 0).all()
    assert own[~halves(images)].abs().max() > 0
    assert cross_entropy(model(images), labels).values.min() > 0


@pytest.mark.parametrize(
    ("text", "attacked", "protected"),
    [
        ("untargeted", [1, 1, 1, 1], None),
        ("untargeted?only=car", [0, 0, 1, 0], None),
        ("untargeted?only=car,1", [0, 1, 1, 0], None),
        ("untargeted?only=car&protect=rest", [0, 0, 1, 0], [1, 1, 0, 1]),
        ("untargeted?protect=road", [0, 1, 1, 1], [1, 0, 0, 0]),
        ("sky?only=car&protect=road", [0, 0, 1, 0], [1, 0, 0, 0]),
        ("erase:car", [0, 0, 1, 0], [1, 1, 0, 1]),
        ("erase:car?protect=none", [0, 0, 1, 0], None),
        ("erase:car?protect=sky", [0, 0, 1, 0], [0, 1, 0, 0]),
        ("road?only=car,road&protect=road", [0, 0, 1, 0], [1, 0, 0, 0]),
    ],
)
def test_regions_by_class(text, attacked, protected):
    data = Maps([[0, 1, 2, 255]])
    goal = make_goal(text, data)
    aim = goal(data[0])
    mask = torch.ones(1, 4, dtype=torch.bool) if aim.mask is None else aim.mask
    protect = torch.zeros(1, 4, dtype=torch.bool) if aim.protect is None else aim.protect
    assert (mask & ~protect).int().tolist() == [attacked]
    assert (aim.protect is None) is (protected is None)
    assert protected is None or protect.int().tolist() == [protected]
    assert (aim.target is None) is text.startswith("untargeted")


def test_drawn_regions(tmp_path):
    data = Maps([[0, 1, 2]], [[0, 1, 2]])
    for file, row in (("one.png", [0, 7, 0]), ("map-1.png", [255, 0, 0])):
        Image.fromarray(np.array([row], dtype=np.uint8)).save(tmp_path / file)
    assert make_goal(f"untargeted?only=png:{tmp_path}/one.png", data)(data[0]).mask.tolist() == [[False, True, False]]
    assert make_goal(f"sky?protect=png:{tmp_path}", data)(data[1]).protect.tolist() == [[True, False, False]]
    with pytest.raises(SegproxError, match=r"region .*one.png has 3 x 1 pixels but image map-0 has 2 x 1"):
        make_goal(f"untargeted?only=png:{tmp_path}/one.png", Maps([[0, 1]]))(Maps([[0, 1]])[0])


def test_shares_of_a_goal_win_over_the_threshold_of_the_run():
    goal = make_goal("erase:car?share=0.5&protect_share=0.75", Maps([[0, 1, 2]]))
    assert (goal.share, goal.protect_share) == (0.5, 0.75)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("untargeted?protect=rest", "protects the rest, so it must say what is attacked"),
        ("untargeted?only=elephant", "there is no class 'elephant'"),
        ("untargeted?nly=car", "the goal untargeted has no option 'nly'"),
        ("untargeted?only", "come options as option=value"),
        ("sky?share=1.5", "share"),
        ("sky?split=train", "only majority and smooth are made from one"),
        ("majority?split=train", "the dataset has no name"),
    ],
)
def test_goals_that_are_refused(text, sentence):
    with pytest.raises(SegproxError, match=sentence):
        make_goal(text, Maps([[0, 1, 2]]))


def test_an_image_without_a_pixel_to_attack():
    data = Maps([[0, 1, 255]])
    with pytest.raises(SegproxError, match="image map-0 has no pixel that erase:car attacks"):
        make_goal("erase:car", data)(data[0])


def test_a_majority_of_another_split():
    name = "demo?length=3"
    found = make_goal("majority?split=train", load_dataset(name), lambda split: open_split(name, split))
    expected = majority(load_dataset(name, split="train"))
    assert torch.equal(found(load_dataset(name)[0]).target, expected)
    assert not torch.equal(expected, majority(load_dataset(name)))


def test_another_split_is_whole(tmp_path):
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (tmp_path / kind / split).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (2, 2)).save(tmp_path / "images" / split / f"{i}.png")
            Image.new("L", (2, 2)).save(tmp_path / "labels" / split / f"{i}.png")
    name = f"folder:{tmp_path}?split=val&subset=1&classes=2"
    assert (len(load_dataset(name)), len(open_split(name, "train"))) == (1, 3)


@pytest.mark.parametrize("attack", ["palma", "fmn"])
def test_records_tell_both_rates(attack, tmp_path):
    results = segprox.evaluate(
        "demo-standard", "demo", attack, goals="erase:person", limit=2, steps=40, out=tmp_path, progress=False
    )
    data, model = load_dataset("demo"), segprox.load_model("demo-standard")
    for record, again in zip(results[0].records, segprox.load_results(tmp_path)[0].records):
        assert record == again
        assert record.found.apsr == min(record.found.attacked, record.found.protected)
        assert record.found.success is (record.found.apsr >= 0.99)
        sample = data[list(data.names).index(record.image)]
        assert record.counted == int((sample.label != 255).sum())
        with torch.no_grad():
            clean = model(sample.image[None]).argmax(1)[0]
        wanted, person = make_goal("erase:person", data)(sample).target, sample.label == data.classes.index("person")
        assert record.clean_apsr == (clean == wanted)[person].double().mean().item()


def test_images_without_the_class_are_named(tmp_path):
    results = segprox.evaluate(
        "demo-standard", Maps2(), "fmn", goals="untargeted?only=1", steps=2, out=tmp_path, progress=False
    )
    assert len(results[0].records) == 1
    assert [error.reason for error in results[0].errors] == ["image none has no pixel that untargeted?only=1 attacks"]


class Maps2(Maps):
    """An image with class 1 and one without."""

    def __init__(self):
        super().__init__(torch.ones(32, 32), torch.zeros(32, 32), classes=[f"class-{i}" for i in range(8)])
        self.names = ["some", "none"]


def test_the_demo_shows_both_rates_within_80_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("segprox.cli.base.out.width", 80)
    monkeypatch.chdir(tmp_path)
    arguments = ["demo", "--target", "erase:person", "--images", "1", "--steps", "30"]
    monkeypatch.setattr("sys.argv", ["segprox", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    text = capsys.readouterr().out
    assert stop.value.code in (0, None)
    heading = next(line for line in text.splitlines() if "protected" in line)
    assert heading.split() == [
        "image",
        "clean",
        "acc.",
        "attacked",
        "protected",
        "linf",
        "x",
        "255",
        "forwards",
        "success",
    ]
