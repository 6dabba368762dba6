"""Models that answer at random: where draws come from, what they cost, and when an image counts as broken."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import segprox
from segprox import Problem, Segmenter, SegproxError
from segprox.draws import Draws, Sampling, _reached
from segprox.models.lean import make_lean
from segprox.report.results import load_runs
from segprox.run.check import check_model
from segprox.run.store import stores
from segprox.run.verify import verify_run
from segprox.seeding import seeded
from segprox.tracker import Tracker
from tests.oracles import channels_as_logits

CPU = torch.device("cpu")


class Noisy(nn.Module):
    """Two channels as logits, with noise on the second: a pixel of class 0 is wrong with a known chance."""

    def __init__(self, sigma=0.1, source="torch"):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.sigma, self.source = sigma, source

    def forward(self, x):
        noise = {
            "torch": lambda: torch.randn(1).item(),
            "numpy": lambda: float(np.random.randn()),
            "python": lambda: random.gauss(0, 1),
        }[self.source]()
        return self.scale * x - 1 + self.sigma * noise * torch.tensor([0.0, 1.0]).view(-1, 1, 1)


def problem(count=1, **options):
    images = torch.full((count, 2, 2, 3), 0.5)
    images[:, 0] += 0.1 + torch.arange(count).view(-1, 1, 1) / 50  # so that images differ
    return Problem.build(images, torch.zeros(count, 2, 3, dtype=torch.long), **options)


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_a_seed_decides_and_leaves_no_trace():
    before = states()
    drawn = []
    for seed in (1, 1, 2):
        with seeded(CPU, seed):
            drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
    assert states() == before
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(a != b for a, b in zip(drawn[0], drawn[2]))


def test_the_trace_is_gone_after_an_error():
    before = states()
    with pytest.raises(RuntimeError), seeded(CPU, 3):
        torch.rand(1) @ torch.rand(3)
    assert states() == before


@pytest.mark.parametrize(("share", "expected"), [(0.25, 0.9), (0.5, 0.7), (0.51, 0.5), (0.75, 0.5), (1.0, 0.1)])
def test_what_a_share_of_the_draws_reaches(share, expected):
    assert _reached(torch.tensor([0.5, 0.9, 0.1, 0.7]), share).item() == pytest.approx(expected)


def test_a_success_in_the_search_needs_more_than_luck():
    assert Sampling(1).needed == 15  # of 20: Wilson's interval of 15 of 20 begins at 0.53
    assert Sampling(1, score_draws=100, score_share=0.9).needed == 96


@pytest.mark.parametrize("source", ["torch", "numpy", "python"])
def test_results_do_not_depend_on_batch_or_on_what_was_drawn_before(source):
    model, whole = Segmenter(Noisy(source=source)), problem(3)
    attack = segprox.make_attack("fmn", steps=12)
    before = states()
    together = attack.run(model, whole, sampling=Sampling(2, 12))
    assert states() == before
    torch.rand(5)
    for i in (2, 0):
        alone = attack.run(model, whole.select([i]), sampling=Sampling(2, 12))
        assert torch.equal(alone.images[0], together.images[i])
        assert alone.draws[0].tolist() == together.draws[i].tolist()
        assert (alone.forwards.item(), alone.traces[0]) == (together.forwards[i].item(), together.traces[i])
    other = attack.run(model, problem(3, seed=1), sampling=Sampling(2, 12))
    assert not torch.equal(other.images, together.images)


def test_a_model_that_is_not_random_gets_the_same_from_any_number_of_samples():
    model, whole = channels_as_logits(2), problem(2)
    attack = segprox.make_attack("palma", steps=20)
    plain = attack.run(model, whole)
    for n in (1, 2, 4):  # means of powers of two are exact
        found = attack.run(model, whole, sampling=Sampling(n))
        assert torch.equal(found.images, plain.images)
        assert [step.norm for step in found.traces[0]] == [step.norm for step in plain.traces[0]]
        assert (found.draws == 1).all()
        assert found.backwards.tolist() == [n * count for count in plain.backwards.tolist()]


def test_every_draw_is_counted():
    calls = []

    class Counted(Noisy):
        def forward(self, x):
            calls.append(x.requires_grad and torch.is_grad_enabled())
            return super().forward(x)

    tracker = Tracker(Segmenter(Counted(sigma=0.0)), problem(), "linf", sampling=Sampling(3, 7, 0.4))
    point = tracker.problem.images.clone()
    query = tracker.query(point)  # no success
    assert (len(calls), tracker.forwards.tolist()) == (3, [3])
    query.gradient(torch.ones_like(query.logits))
    assert tracker.backwards.tolist() == [3]
    point[:, 1] = 1
    tracker.query(point)  # a success, which is verified until it is certain
    needed = Sampling(3, 7, 0.4).needed
    assert tracker.forwards.tolist() == [3 + 3 + needed]
    result = tracker.result()
    assert result.forwards.tolist() == [3 + 3 + needed + 7]
    assert result.draws.shape == (1, 7)


def test_gradients_are_the_mean_of_those_of_the_draws():
    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.scale * torch.randn(1, 2, 2, 3) * x**2

    model, whole = Segmenter(Square()), problem()
    draws = Draws(whole, Sampling(4), None)
    images = whole.images.clone().requires_grad_()
    mean = draws.mean(model.logits, images, 0)
    weights = torch.rand(1, 2, 2, 3)
    (found,) = torch.autograd.grad(mean, images, weights)
    again = Draws(whole, Sampling(4), None)
    one_by_one = [again._next(model.logits, 0)(images) for _ in range(4)]
    torch.testing.assert_close(mean, sum(one_by_one) / 4)
    expected = sum(torch.autograd.grad(logits, images, weights)[0] for logits in one_by_one) / 4
    torch.testing.assert_close(found, expected)


def test_a_lucky_draw_is_no_success():
    """The gap of 0.1 is crossed by noise of 0.1 in 16 % of the draws: a run with one draw takes one of them."""
    model, whole = Segmenter(Noisy()), problem()
    attack = segprox.make_attack("fmn", steps=60)
    naive = attack.run(model, whole)
    judges = Sampling(1, score_draws=400)
    share = (Draws(whole, judges, None).score(model, naive.images) >= 0.99).double().mean().item()
    assert naive.success.item()
    assert share < 0.4  # it claims what holds in fewer than half of the draws
    found = attack.run(model, whole, sampling=Sampling(4))
    share = (Draws(problem(seed=9), judges, None).score(model, found.images) >= 0.99).double().mean().item()
    assert found.success.item()
    assert share > 0.4
    # Closed form: half of the draws are wrong where the mean gap is closed, with 0.05 in either channel.
    assert 0.045 < found.norm.item() < 0.11


@pytest.mark.filterwarnings("ignore:segprox check is red")  # for a network that knows nothing
def test_scores_and_results_agree(tmp_path):
    model, data = Segmenter(Noisy()), [(image, label) for image, label in zip(problem(2).images, problem(2).labels)]

    class Rgb(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model.model

        def forward(self, x):
            return self.inner(x[:, :2])

    pairs = [(torch.cat([image, image[:1]]), label) for image, label in data]
    network = Rgb()
    results = segprox.evaluate(
        network, pairs, "fmn", steps=20, samples=2, score_draws=10, out=tmp_path, save=["float"], progress=False
    )
    record = results[0].records[0]
    found = segprox.attack(network, pairs[0][0][None], pairs[0][1][None], "fmn", steps=20, samples=2, score_draws=10)
    assert record.found.draws == tuple(found.draws[0].tolist())
    assert record.found.share == (found.draws >= 0.99).double().mean().item()
    assert record.found.success == bool(found.success)
    assert record.forwards == found.forwards.item()
    assert sum(record.counts.tp) + sum(record.counts.fn) == 10 * 6  # pixels of all draws
    low, high = record.found.interval
    assert low <= record.found.share <= high
    assert results.rows()[0]["share"] == record.found.share
    tables = {table.name: table for table in results.summary().tables}
    assert tables["random"].rows[0][6:9] == (2, 10, 0.5)
    (again,) = load_runs([tmp_path])
    assert again.columns["found.share"].tolist() == [r.found.share for r in results[0].records]
    page = results.write_report(tmp_path / "report").read_text()
    assert f"{round(10 * record.found.share)} of 10 (" in page
    assert "answer at random" in page
    from segprox.run.objects import named_dataset, named_model

    with named_model(network), named_dataset(pairs, (255,), None):
        (verified,) = verify_run(stores(tmp_path)[0])
    assert verified.agree == verified.images == 2


def test_nothing_of_it_is_written_for_other_models(tmp_path):
    segprox.evaluate("demo-standard", "demo", "fmn", limit=1, steps=2, out=tmp_path, progress=False)
    (folder,) = tmp_path.iterdir()
    for file in ("run.json", "records.jsonl"):
        content = (folder / file).read_text()
        assert '"samples"' not in content
        assert '"draws"' not in content
        assert '"share"' not in content


def test_limits_leave_room_for_the_judgement():
    model, whole = Segmenter(Noisy()), problem(2)
    for limit in (22, 50, 90):
        found = segprox.make_attack("fmn", steps=40).run(model, whole, max_queries=limit, sampling=Sampling(2))
        assert (found.forwards + found.backwards <= limit).all()
        assert found.draws.shape == (2, 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples of a random model cannot be 0"),
        ({"samples": 2, "score_share": 1.0}, "score_share of a random model cannot be 1.0"),
        ({"samples": 2, "score_share": 0.95}, "score_draws=20 cannot show that a share of 0.95 .* at least 73"),
        ({"score_draws": 4}, "score_draws cannot be given without samples"),
        ({"samples": 2, "max_queries": 21}, "max_queries=21 is not enough .* it takes 22"),
    ],
)
def test_refusals(options, message):
    scene = problem()
    with pytest.raises(SegproxError, match=message):
        segprox.attack(Segmenter(Noisy()), scene.images, scene.labels, "fmn", **options)
    with pytest.raises(SegproxError, match=message):
        segprox.evaluate("demo-standard", "demo", "fmn", limit=1, progress=False, **options)


class Street(nn.Module):
    """The embedded network behind noise from torch, or from a generator of its own."""

    def __init__(self, generator=None):
        super().__init__()
        self.demo, self.generator = segprox.load_model("demo-standard"), generator

    def forward(self, x):
        return self.demo.logits(x + 0.03 * torch.randn(x.shape, generator=self.generator, dtype=x.dtype))


def test_check_points_to_samples():
    scene = segprox.load_dataset("demo")[0]
    found = {check.name: check for check in check_model(Street(), [scene])}
    assert found["repeatable"].verdict == "red"
    assert "samples=4" in found["repeatable"].finding
    assert "not judged" in found["batch"].finding
    assert found["finite differences"].verdict == "green"  # noise is not taken for a wrong gradient
    found = {check.name: check for check in check_model(Street(), [scene], draws=4)}
    assert {check.verdict for check in found.values()} <= {"green", "amber"}
    assert found["repeatable"].verdict == "green"
    own = {check.name: check for check in check_model(Street(torch.Generator()), [scene], draws=4, quick=True)}
    assert own["repeatable"].verdict == "red"
    assert "random numbers of its own" in own["repeatable"].finding


def test_lean_models_may_be_random():
    model, before = Segmenter(Street()), states()
    made = make_lean(model)
    assert states() == before
    assert made.error < 1e-9
    assert len(made.plain) < 3


def test_the_command_repeats_it(segprox_cli, tmp_path):
    arguments = ["--samples", "2", "--score-draws", "12", "--score-share", "0.4", "--steps", "2", "--limit", "1"]
    code, _, _ = segprox_cli("evaluate", "--model", "demo-standard", "--attack", "fmn", *arguments, "--out", tmp_path)
    assert code == 0
    from segprox.run.command import repeat_command

    (store,) = stores(tmp_path)
    command = repeat_command(store.run)
    assert "--samples 2 --score-draws 12 --score-share 0.4" in command
    plain = segprox_cli("evaluate", "--model", "demo-standard", "--attack", "fmn", "--steps", "2", "--limit", "1",
                        "--out", tmp_path)  # fmt: skip
    assert plain[0] == 0
    assert len(stores(tmp_path)) == 2  # another run
