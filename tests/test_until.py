"""Evaluations that end when the median is known well enough: which images, how many, and what is said of it."""

import json
import math
from math import comb, inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import segprox as package
from segprox import SegproxError
from segprox.models.demo import StreetNet
from segprox.report.evaluation import Results
from segprox.report.findings import until_sentence
from segprox.report.page import write_page
from segprox.report.results import load_runs, results_of
from segprox.run.evaluate import Evaluation, estimate
from segprox.run.execution import Execution
from segprox.run.plan import AttackEntry, Run, Settings
from segprox.run.record import ImageError
from segprox.run.store import stores
from segprox.run.worker import Result, forget_models, open_dataset
from segprox.sizes import FEWEST, is_narrow, median_interval, median_size, unbroken_size

from .records import make_record

FAST = ("--model", "demo-standard", "--attack", "fmn", "--steps", 1)  # which breaks nothing: every size is 255/255


def a_run(until=0.1, length=40, attack="fmn", **settings):
    entry = AttackEntry(name=attack, set={"steps": 1})
    settings = Settings(until=until, **settings)
    return Run(model="demo-standard", dataset=f"demo?length={length}", attack=entry, settings=settings)


def spread(count, width, seed=1):
    """Sizes around 4/255 by the names of scenes."""
    values = np.maximum(np.random.default_rng(seed).normal(4, width, count), 0.01) / 255
    return {f"scene-{i:04}": float(value) for i, value in enumerate(values)}


class Pretend:
    """An engine whose records have given sizes; it has `width` tasks under way at a time."""

    def __init__(self, sizes, width=1):
        self.sizes, self.width, self.done = sizes, width, []

    def __call__(self, tasks, wanted=lambda _: True):
        waiting, started = list(tasks), []
        while True:
            while waiting and len(started) < self.width:
                task = waiting.pop(0)
                if wanted(task):
                    started.append(task)
            if not started:
                return
            yield started[0], self.work(started.pop(0))

    def work(self, task):
        results = []
        for i in task.indices:
            name = open_dataset(task.run.dataset).names[i]
            known, size = task.known.get(name), self.sizes[name]
            if known is None:
                self.done.append(name)
            made = (
                ImageError(key=f"key-{name}", version="1", image=name, reason="no luck")
                if size is None
                else make_record(name, size)
            )
            results.append(Result(name, None if known == made.key else made))
        return results


def go(out, run, engine, **options):
    evaluation = Evaluation([run], out, **options)
    list(evaluation.go(engine))
    (status,) = evaluation.status()
    return status


# --- the interval -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", range(1, 80))
def test_the_interval_is_the_narrowest_pair_of_sizes_with_95_percent(count):
    low, high = median_interval(np.random.default_rng(count).permutation(count) + 1)

    def coverage(k):  # that the median is between the k-th smallest and the k-th largest
        return 1 - 2 * sum(comb(count, heads) for heads in range(k)) / 2**count

    if math.isnan(low):
        assert count < FEWEST
        assert coverage(1) < 0.95
    else:
        k = int(low)
        assert high == count + 1 - k
        assert coverage(k) >= 0.95 > coverage(k + 1)


@given(st.lists(st.floats(0, 1), min_size=FEWEST, max_size=40))
def test_the_interval_contains_the_median(sizes):
    low, high = median_interval(sizes)
    assert low <= median_size(sizes) <= high


@pytest.mark.parametrize(
    ("sizes", "share", "narrow"),
    [
        ([9, 10, 10, 10, 10, 11], 0.1, True),
        ([9, 10, 10, 10, 10, 11], 0.09, False),
        ([9.5, 10, 10, 10, 10, 11.5], 0.1, False),  # as wide as the first, but one end is too far away
        ([8.5, 10, 10, 10, 10, 10.5], 0.1, False),
        ([10, 10, 10, 10, 10], 0.5, False),  # too few
        ([inf] * 6, 0.1, True),  # at least half of all images are not broken
        ([1.0, 2.0, inf, inf, inf, inf], 0.1, False),
        ([1.0, 1.0, 1.0, 1.0, 1.0, inf], 0.1, False),
        ([0.0] * 6, 0.1, True),
        ([], 0.1, False),
    ],
)
def test_when_an_interval_is_narrow(sizes, share, narrow):
    assert is_narrow(sizes, share) == narrow


def test_without_images_there_is_no_interval():
    assert median_interval([]) == pytest.approx((nan, nan), nan_ok=True)
    assert (unbroken_size("linf"), unbroken_size("l2")) == (1.0, inf)


# --- which images, and how many ---------------------------------------------------------------------------------------
def test_a_run_ends_with_the_first_image_after_which_the_interval_is_narrow(tmp_path):
    sizes = spread(40, 0.8)
    engine = Pretend(sizes)
    status = go(tmp_path, a_run(0.1), engine)
    ordered = [sizes[name] for name in engine.done]
    assert FEWEST < len(ordered) < 40
    assert is_narrow(ordered, 0.1)
    assert not any(is_narrow(ordered[:n], 0.1) for n in range(len(ordered)))
    assert (len(status.records), status.total, status.left, status.enough) == (len(ordered), 40, 0, True)


def test_the_order_is_random_and_the_same_for_all_attacks_limits_and_batches(tmp_path):
    orders = []
    for i, (run, batch) in enumerate(
        [(a_run(), 1), (a_run(attack="dag-0.003"), 1), (a_run(limit=30), 1), (a_run(), 4), (a_run(seed=1), 1)]
    ):
        engine = Pretend(spread(40, 4.0))  # too wide to end
        go(tmp_path / str(i), run, engine, execution=Execution(batch=batch))
        orders.append(engine.done)
    first, other, limited, batched, seeded = orders
    assert sorted(first) == sorted(seeded) == list(spread(40, 1.0))
    assert first == other == batched != seeded
    assert first != sorted(first)
    assert limited == [name for name in first if name < "scene-0030"]


def test_without_until_images_come_in_the_dataset_s_order(tmp_path):
    engine = Pretend(spread(5, 1.0))
    go(tmp_path, a_run(None, length=5), engine)
    assert engine.done == list(engine.sizes)


def test_a_second_call_does_nothing_and_a_narrower_one_goes_on(tmp_path):
    sizes = spread(40, 0.8)
    first, again, narrower, wider = (Pretend(sizes) for _ in range(4))
    go(tmp_path, a_run(0.2), first)
    assert go(tmp_path, a_run(0.2), again).enough
    assert again.done == []
    status = go(tmp_path, a_run(0.1), narrower, execution=Execution(batch=3))
    assert len(first.done) < len(status.records) == len(first.done) + len(narrower.done)
    (store,) = stores(tmp_path)
    assert store.run.settings.until == 0.1
    go(tmp_path, a_run(0.5), wider)
    assert wider.done == []
    assert len(store.latest()) == len(status.records)


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(tmp_path):
    sizes = spread(40, 0.8)
    whole = Pretend(sizes)
    go(tmp_path / "whole", a_run(0.1), whole)
    first, second = Pretend(sizes), Pretend(sizes)
    events = Evaluation([a_run(0.1)], tmp_path / "parts").go(first)
    for _ in range(4):
        next(events)
    events.close()
    go(tmp_path / "parts", a_run(0.1), second)
    assert first.done + second.done == whole.done


def test_images_under_way_are_recorded_and_may_make_the_run_go_on(tmp_path):
    alone = Pretend(dict.fromkeys(spread(40, 1.0), 4 / 255))
    go(tmp_path / "alone", a_run(0.1), alone)
    assert len(alone.done) == FEWEST
    order = Pretend(spread(40, 4.0))
    go(tmp_path / "all", a_run(0.1), order)
    sizes = dict.fromkeys(order.done, 4 / 255)
    sizes[order.done[FEWEST]] = sizes[order.done[FEWEST + 1]] = 40 / 255  # under way when the sixth is done
    engine = Pretend(sizes, width=3)
    status = go(tmp_path / "three", a_run(0.1), engine)
    assert status.enough
    assert set(engine.done) == set(status.records)
    assert FEWEST + 2 < len(engine.done) < 40
    assert len(engine.done) == len(set(engine.done))


def test_every_run_ends_by_itself(tmp_path):
    runs = [a_run(0.1), a_run(0.1, attack="dag-0.003"), a_run(None, length=8)]
    evaluation = Evaluation(runs, tmp_path)
    list(evaluation.go(Pretend(spread(40, 0.8))))
    one, other, plain = (len(status.records) for status in evaluation.status())
    assert one == other < 40
    assert plain == 8


def test_errors_are_no_sizes_and_are_tried_again_even_if_there_is_enough(tmp_path):
    sizes = dict.fromkeys(spread(40, 1.0), 4 / 255)
    order = Pretend(spread(40, 4.0))
    go(tmp_path / "order", a_run(), order)
    bad = order.done[2]
    status = go(tmp_path / "out", a_run(), Pretend(sizes | {bad: None}))
    assert (status.done, status.errors) == (FEWEST, 1)
    assert estimate(status, {}).images == 0
    assert estimate(status, {}, retry_errors=True).images == 1
    engine = Pretend(sizes)
    status = go(tmp_path / "out", a_run(), engine, retry_errors=True)
    assert engine.done == [bad]
    assert (status.done, status.errors) == (FEWEST + 1, 0)


def test_until_is_no_part_of_what_a_run_is():
    assert a_run(0.1).folder == a_run(None).folder


# --- in Python and on the command line --------------------------------------------------------------------------------
def test_python_and_the_command_line_agree_and_a_second_call_asks_the_model_nothing(segprox, tmp_path, monkeypatch):
    call = {"until": "10%", "out": tmp_path / "a", "progress": False}
    (here,) = package.evaluate("demo-standard", "demo", "fmn", steps=1, **call)
    arguments = ("evaluate", *FAST, "--until", "10%", "--batch", 4, "--out", tmp_path / "b")
    code, output, _ = segprox(*arguments)
    assert code == 0
    said = "8 of 100 images, until the 95 % interval of the median (linf x 255: 255.00 to 255.00) was within 10 % of it"
    assert said in " ".join(output.split())
    assert "8/8" in output
    assert said in " ".join(segprox("runs", tmp_path / "b")[1].split())
    (there,) = package.load_results(tmp_path / "b")
    assert len(here.records) == FEWEST
    assert {record.image for record in here.records} < {record.image for record in there.records}
    asked, forward = [], StreetNet.forward
    forget_models()
    monkeypatch.setattr(StreetNet, "forward", lambda self, images: asked.append(1) or forward(self, images))
    assert segprox(*arguments)[0] == 0
    assert len(package.evaluate("demo-standard", "demo", "fmn", steps=1, **call)[0].records) == FEWEST
    assert asked == []


def test_several_processes_stop_too(segprox, tmp_path):
    code, output, _ = segprox("evaluate", *FAST, "--until", 0.1, "--workers", 2, "--log", "json", "--out", tmp_path)
    assert code == 0
    images = [json.loads(line) for line in output.splitlines()][:-1]
    assert FEWEST <= len(images) <= FEWEST + 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--until", "0"], "until of an evaluation cannot be '0'"),
        (["--until", "100%"], "until of an evaluation cannot be 1.0: Input should be less than 1"),
        (["--until", "narrow"], "until of an evaluation cannot be 'narrow'"),
        (["--until", "5%", "--attack", "pgd"], "until is about the median of smallest perturbations, but pgd steps=1"),
    ],
)
def test_what_until_cannot_be(segprox, tmp_path, arguments, sentence):
    code, _, error = segprox("evaluate", *FAST, "--out", tmp_path / "out", *arguments)
    assert code == 2
    assert error.startswith(f"error: {sentence}")
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_fields_beside_attacks_that_are_made_are_refused():
    with pytest.raises(SegproxError, match="steps cannot be given beside attacks that are made already"):
        package.evaluate("demo-standard", "demo", package.Palma(steps=3), steps=5)


def test_a_spec_may_say_until(segprox, tmp_path):
    (tmp_path / "spec.yaml").write_text(
        "settings: {until: 20%, save: []}\n"
        "grids: [{models: [demo-standard], datasets: [demo], attacks: [{name: fmn, set: {steps: 1}}]}]"
    )
    assert segprox("run", tmp_path / "spec.yaml", "--until", "30%", "--out", tmp_path / "out")[0] == 0
    (store,) = stores(tmp_path / "out")
    assert store.run.settings.until == 0.3
    assert len(store.latest()) == FEWEST


# --- what is said of it -----------------------------------------------------------------------------------------------
def test_reports_say_it_with_the_number_that_ended_the_run(tmp_path):
    run, sizes = a_run(0.1), spread(40, 0.8)
    go(tmp_path / "runs", run, Pretend(sizes))
    (result,) = load_runs([tmp_path / "runs"])
    low, high = (f"{value * 255:.2f}" for value in median_interval(result.norms))
    expected = (
        f"{len(result.records)} of 40 images, until the 95 % interval of the median (linf x 255: {low} to {high}) "
        "was within 10 % of it"
    )
    assert until_sentence(result) == expected
    assert expected in write_page([result], tmp_path / "index.html").path.read_text()
    table = Results([result]).summary().tables[0]
    assert any(expected in note for note in table.notes)
    cells = dict(zip((column.heading for column in table.columns), table.rows[0]))
    assert (f"{cells['low']:.2f}", f"{cells['high']:.2f}") == (low, high)


def test_reports_say_when_it_was_not_enough(tmp_path):
    evaluation = Evaluation([a_run(0.1, length=3)], tmp_path / "few")
    list(evaluation.go(Pretend(spread(3, 1.0))))
    (result,) = results_of(evaluation.status())
    few = "3 of 3 images, too few for a 95 % interval of the median, which takes 6"
    assert until_sentence(result) == few
    go(tmp_path / "wide", a_run(0.1, length=8), Pretend(spread(8, 4.0)))
    wide = until_sentence(load_runs([tmp_path / "wide"])[0])
    assert wide.startswith("8 of 8 images, and the 95 % interval of the median (linf x 255: ")
    assert wide.endswith(") is not within 10 % of it")
    go(tmp_path / "plain", a_run(None, length=3), Pretend(spread(3, 1.0)))
    assert until_sentence(load_runs([tmp_path / "plain"])[0]) is None
