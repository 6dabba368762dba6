"""What to run: specs and what is refused about them."""

import dataclasses
from collections import Counter
from importlib import resources

import pytest
import yaml

from segprox import SegproxError
from segprox.attacks import PAPER_ATTACKS, AlmaProx, Bisection, Fmn, Pdpgd, make_attack
from segprox.models import LEFT_OUT_MODELS, PAPER_MODELS
from segprox.run.execution import Execution
from segprox.run.plan import AttackEntry, Grid, Run, Settings, Spec, check_runs

SMALL = "grids: [{models: [demo-robust], datasets: [demo], attacks: [fmn]}]"


def shipped(name):
    return Spec.read_text((resources.files("segprox.run") / "specs" / f"{name}.yaml").read_text(), name)


def a_run(model="demo-robust", dataset="demo", attack="fmn", goal="untargeted", fields=None, **settings):
    entry = AttackEntry(name=attack, set=fields or {})
    return Run(model=model, dataset=dataset, attack=entry, goal=goal, settings=Settings(**settings))


def test_a_spec_is_read_in_full():
    spec = Spec.read_text("""
        settings: {limit: 3, threshold: 0.9, seed: 7, max_queries: 50, save: [png, float], model_options: {device: cpu}}
        grids:
          - models: [demo-robust, demo-standard]
            datasets: [demo]
            attacks: [fmn, {name: pgd, set: {steps: 3, epsilon: 8/255}}]
            goals: [untargeted, road]
          - {models: [demo-robust], datasets: ["demo?seed=1"], attacks: [dag-0.003]}
    """)
    options = {"device": "cpu"}
    assert spec.settings == Settings(
        limit=3, threshold=0.9, seed=7, max_queries=50, save=("png", "float"), model_options=options
    )
    runs = spec.runs()
    assert [run.title for run in runs[:4]] == [
        "demo-robust | demo | fmn | untargeted",
        "demo-robust | demo | pgd steps=3 epsilon=8/255 | untargeted",
        "demo-robust | demo | fmn | road",
        "demo-robust | demo | pgd steps=3 epsilon=8/255 | road",
    ]
    assert len(runs) == 9
    assert runs[-1].title == "demo-robust | demo?seed=1 | dag-0.003 | untargeted"
    assert all(run.settings == spec.settings for run in runs)
    assert runs[1].attack.make() == make_attack("pgd", steps=3, epsilon=8 / 255)


def test_what_is_left_out_has_defaults():
    (run,) = Spec.read_text(SMALL).runs()
    assert run.settings == Settings()
    assert (run.goal, run.settings.limit, run.settings.threshold, run.settings.max_queries) == (
        "untargeted", None, 0.99, None,
    )  # fmt: skip
    assert run.settings.save == ("preview",)


def test_everything_that_does_not_fit_is_named_at_once():
    with pytest.raises(SegproxError) as error:
        Spec.read_text("""
            settings: {limit: 0, save: [jpg], sed: 1}
            grids: [{models: [], datasets: [demo], attacks: [{nam: fmn}], colour: red}]
        """)
    text = str(error.value)
    assert text.startswith("the spec does not fit: ")
    for place in ("limit", "save.0", "sed", "models", "attacks.0.name", "attacks.0.nam", "colour"):
        assert f"{place}: " in text


@pytest.mark.parametrize("text", ["", "[]", "1", "grids: []", "grids: [fmn]", "settings: {}", "grids: {a: 1}"])
def test_what_is_no_spec_is_refused(text):
    with pytest.raises(SegproxError, match="does not fit"):
        Spec.read_text(text)


@pytest.mark.parametrize("text", ["a: [", "\tgrids: 1", "!!python/object/apply:os.getcwd []"])
def test_what_is_no_yaml_is_refused_in_one_line(text):
    with pytest.raises(SegproxError, match="x is not YAML") as error:
        Spec.read_text(text, "x")
    assert "\n" not in str(error.value)


def test_files(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(SMALL)
    assert Spec.read(file) == Spec.read_text(SMALL)
    with pytest.raises(SegproxError, match=r"cannot read .*missing\.yaml: No such file"):
        Spec.read(tmp_path / "missing.yaml")
    with pytest.raises(SegproxError, match=r"cannot read .*: Is a directory"):
        Spec.read(tmp_path)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SegproxError, match=r"cannot read .*: it is not text in UTF-8"):
        Spec.read(file)


DIFFERENT = [
    a_run(),
    a_run(model="demo-standard"),
    a_run(model="demo/robust"),
    a_run(dataset="demo?seed=1"),
    a_run(attack="dag-0.003"),
    a_run(fields={"steps": 5}),
    a_run(fields={"steps": 6}),
    a_run(goal="road"),
    a_run(threshold=0.9),
    a_run(seed=1),
    a_run(max_queries=10),
    a_run(model_options={"precision": "bfloat16"}),
    a_run(model="x" * 300),
    a_run(model="y" + "x" * 300),
]


def test_different_runs_have_different_folders():
    folders = Counter(run.folder for run in DIFFERENT)
    assert max(folders.values()) == 1
    for folder in folders:
        assert len(folder) < 200
        assert "/" not in folder
        assert not folder.startswith((".", "-"))
    assert DIFFERENT[0].folder.startswith("demo-robust+demo+fmn+untargeted+")


def test_the_number_of_images_and_which_are_kept_make_no_other_run():
    assert a_run(limit=3).folder == a_run(limit=None).folder == a_run(save=("png",)).folder == a_run().folder


def test_folders_stay_the_same_from_version_to_version():
    assert a_run().folder == a_run().folder == dataclasses.replace(a_run()).folder
    assert a_run(fields={"a": 1, "b": 2}).folder == a_run(fields={"b": 2, "a": 1}).folder


def test_repeated_runs_are_done_once():
    grid = Grid(models=("a", "b", "a"), datasets=("d",), attacks=(AttackEntry(name="fmn"), AttackEntry(name="fmn")))
    titles = [run.title for run in Spec(grids=(grid, grid)).runs()]
    assert titles == ["a | d | fmn | untargeted", "b | d | fmn | untargeted"]


def test_the_shipped_example():
    runs = shipped("example").runs()
    assert len(runs) == 2 * 2 * 2
    assert {run.goal for run in runs} == {"untargeted", "road"}
    assert check_runs(runs) == []


def test_the_shipped_paper_is_the_whole_evaluation():
    runs = shipped("paper").runs()
    assert check_runs(runs) == []
    assert {run.model for run in runs} == set(PAPER_MODELS)
    datasets = {run.dataset.partition(":")[0] for run in runs}
    assert datasets == {"voc", "cityscapes"}
    targets = {"voc": "background", "cityscapes": "smooth?split=train"}
    without_bisections = {"dag-0.003", "dag-0.001", "fmn", "pdpgd", "alma-prox"}
    for model in PAPER_MODELS:
        of_model = [run for run in runs if run.model == model]
        (dataset,) = {run.dataset.partition(":")[0] for run in of_model}
        assert dataset in model
        for goal in ("untargeted", targets[dataset]):
            names = {run.attack.name for run in of_model if run.goal == goal}
            assert names == (without_bisections if model.startswith("ddcat") else set(PAPER_ATTACKS))
    plain = [run for run in runs if "masking" not in run.attack.set]
    robust = [model for model in PAPER_MODELS if model.startswith("ddcat")]
    assert len(plain) == 2 * (len(PAPER_MODELS) * len(PAPER_ATTACKS) - 6 * len(robust))
    alma = next(run for run in plain if run.attack.name == "alma-prox").attack.make()
    assert alma == AlmaProx(step_size=0.001, penalty=0.01, prox="ternary")
    bisections = [attack for run in plain if isinstance(attack := run.attack.make(), Bisection)]
    assert len(bisections) == (len(PAPER_MODELS) - len(robust)) * 2 * 6
    assert {attack.keep for attack in bisections} == {"smallest-radius"}


def test_the_shipped_paper_has_the_ablation_of_masking():
    ablation = [run for run in shipped("paper").runs() if "masking" in run.attack.set]
    assert {(run.attack.name, run.attack.set["masking"]) for run in ablation} == {
        ("alma-prox", "none"), ("alma-prox", "fixed"), ("pdpgd", "fixed"), ("pdpgd", "decay"),
    }  # fmt: skip
    for run in ablation:
        attack = run.attack.make()
        assert isinstance(attack, AlmaProx | Pdpgd)
        assert not isinstance(attack, AlmaProx) or (attack.step_size, attack.penalty) == (0.001, 0.01)
        assert run.goal == "untargeted"


def test_the_shipped_beyond_adds_palma_and_the_models_that_the_paper_left_out():
    paper, beyond = ({run.folder: run for run in shipped(name).runs()} for name in ("paper", "beyond"))
    assert check_runs(list(beyond.values())) == []
    assert set(paper) < set(beyond)
    added = [run for folder, run in beyond.items() if folder not in paper]
    palma = [run for run in added if run.attack.name == "palma"]
    assert sorted({run.model for run in palma}) == sorted([*PAPER_MODELS, *LEFT_OUT_MODELS])
    assert len(palma) == 2 * len({run.model for run in palma})
    others = [run for run in added if run not in palma]
    assert {run.model for run in others} == set(LEFT_OUT_MODELS)
    assert len(others) == 2 * len(LEFT_OUT_MODELS) * len(PAPER_ATTACKS)


@pytest.mark.parametrize("name", ["example", "paper", "beyond"])
def test_shipped_specs_survive_a_round_trip_as_plain_yaml(name):
    text = (resources.files("segprox.run") / "specs" / f"{name}.yaml").read_text()
    assert Spec.read_text(yaml.safe_dump(yaml.safe_load(text))) == shipped(name)


def test_attacks_and_goals_are_checked_without_loading_anything():
    runs = [
        a_run(model="no-such", dataset="no-such"),
        a_run(attack="no-such"),
        a_run(attack="no-such", goal="road"),
        a_run(fields={"stepz": 3}),
        a_run(fields={"steps": 0}),
        a_run(attack="asma"),
        a_run(attack="asma", goal="road"),
    ]
    problems = check_runs(runs)
    assert [problem.split(";")[0].split(":")[0] for problem in problems] == [
        "there is no attack 'no-such'",
        "fmn has no field 'stepz'",
        "steps of fmn cannot be 0",
        "asma needs a target, but a goal of its runs is untargeted",
    ]


def test_runs_of_which_nothing_is_wrong():
    assert check_runs([a_run(), a_run(attack="asma", goal="road"), a_run(attack="bisect:pgd")]) == []


# --- what a run is, and how it is executed ----------------------------------------------------------------------------
ONE_RUN = [
    a_run(fields={"steps": 5}),
    a_run(fields={"steps": "5"}),
    a_run(fields={"steps": 5, "norm": "linf"}),
    a_run(fields={"steps": 5}, limit=3, save=("png",)),
    *(a_run(fields={"steps": 5}, model_options=options) for options in (
        {"device": "cuda:3"}, {"compile": True}, {"channels_last": True}, {"lean": False}, {"precision": "float32"},
    )),
    a_run(model="demo-robust?device=cpu&lean=recompute", fields={"steps": 5}),
    a_run(model="demo-robust?name=Robust", fields={"steps": 5}),
    a_run(fields={"steps": 5}, model_options={"name": "Robust"}),
]  # fmt: skip


def test_how_a_run_is_written_and_executed_makes_no_other_run():
    assert len({run.folder for run in ONE_RUN}) == 1
    assert all(run.identity == ONE_RUN[0].identity for run in ONE_RUN)


def test_a_model_may_have_a_short_title():
    assert a_run(model="demo-robust?name=Our net&device=cpu").title == "Our net | demo | fmn | untargeted"
    assert a_run(model="demo-robust?device=cpu").model_title == "demo-robust?device=cpu"
    assert a_run(model="demo-robust?name=A", model_options={"name": "B"}).model_title == "B"  # as any other option


def test_a_new_revision_of_an_attack_is_another_run(monkeypatch):
    before = a_run().folder
    monkeypatch.setattr(Fmn, "revision", 2)
    assert a_run().folder != before


def test_a_list_of_epsilons_is_a_run_for_each():
    for several in ("[2/255, 4/255]", "'2/255,4/255'"):
        attacks = f"[fmn, {{name: pgd, set: {{epsilon: {several}}}}}]"
        spec = Spec.read_text(f"grids: [{{models: [demo-robust], datasets: [demo], attacks: {attacks}}}]")
        made = [run.attack.make() for run in spec.runs()]
        assert [getattr(attack, "epsilon", None) for attack in made] == [None, 2 / 255, 4 / 255]


@pytest.mark.parametrize(
    ("execution", "name", "given", "expected"),
    [
        (Execution(), "demo-robust", {}, ("auto", "auto", False)),
        (Execution(), "demo-robust?lean=false", {}, ("auto", False, False)),
        (Execution(), "demo-robust?lean=false", {"lean": "recompute"}, ("auto", "recompute", False)),
        (Execution(lean=True, devices=("cuda:1", "cuda:2"), workers=2), "demo-robust?lean=false&device=cpu",
         {"lean": "recompute"}, ("cuda:1", True, False)),
        (Execution(channels_last=True), "demo-robust", {"device": "cpu"}, ("cpu", "auto", True)),
    ],
)  # fmt: skip
def test_an_execution_wins_over_settings_and_these_over_the_name(execution, name, given, expected):
    options = execution.model_options(name, given)
    assert (options.device, options.lean, options.channels_last) == expected
    assert execution.model_options(name, given, "cuda:7").device == "cuda:7"
