"""Cards: what they say is what the results say, the formats can be read, and the command repeats the run."""

import json
import shlex
import sys

import pytest
import torch
import yaml

import segprox
from segprox.report.card import EPSILONS, Card
from segprox.report.results import load_runs
from segprox.run.command import repeat_command
from segprox.run.plan import Run
from tests.records import make_record, make_results, make_run, make_store


@pytest.fixture(scope="module")
def found():
    attacks = [segprox.Palma(steps=15), segprox.make_attack("fgsm", epsilon="2/255")]
    return segprox.evaluate("demo-standard", "demo", attacks, limit=2, progress=False)


@pytest.fixture(scope="module")
def written(found, tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    path = found.card().write(folder)
    return path.read_text(), json.loads((folder / "card.json").read_text())


def test_both_files_can_be_read_and_agree(found, written):
    text, data = written
    front, body = text.removeprefix("---\n").split("---\n", 1)
    assert yaml.safe_load(front) == {"model-index": data["model-index"]}
    assert data == found.card().data
    assert body == found.card()._repr_markdown_()
    assert "## Robustness of demo-standard" in body


def test_numbers_are_those_of_the_results(found, written):
    (evaluation,) = written[1]["segprox"]
    assert [left["epsilon"] for left in evaluation["left"]] == pytest.approx([0, 0.25, 0.5, 1, 2, 4, 8])
    for epsilon, left in zip((0.0, *EPSILONS), evaluation["left"], strict=True):
        assert left["accuracy"] == found.accuracy(epsilon)
        assert left["mean_iou"] == found.miou(epsilon)
        assert left["accuracy_interval"][0] <= left["accuracy"] <= left["accuracy_interval"][1]
    runs = {run["attack"].split()[0]: run for run in evaluation["runs"]}
    palma, fgsm = found
    assert runs["palma"]["median"] == min(record.found.linf for record in palma.records) * 255  # of two broken images
    assert runs["palma"]["median_interval"] == [None, None]  # two images are too few
    assert (runs["palma"]["broken"], runs["palma"]["images"], runs["palma"]["errors"]) == (1.0, 2, 0)
    right = sum(sum(record.counts.tp) for record in fgsm.records) / sum(record.counted for record in fgsm.records)
    assert runs["fgsm"]["accuracy"] == pytest.approx(right)
    assert runs["fgsm"]["epsilon"] == pytest.approx(2)
    assert "median" not in runs["fgsm"]


def test_the_index_has_what_the_hub_requires(found, written):
    (entry,) = written[1]["model-index"]
    (result,) = entry["results"]
    assert (entry["name"], result["task"]["type"]) == ("demo-standard", "image-segmentation")
    assert result["dataset"] == {"name": "demo", "type": "demo"}
    values = {metric["name"]: (metric["type"], metric["value"]) for metric in result["metrics"]}
    assert values["pixel accuracy, unchanged images"] == ("accuracy", found.accuracy(0.0))
    assert values["mean IoU, strongest attack at linf x 255 = 8"] == ("mean_iou", found.miou(8 / 255))
    medians = [metric for metric in result["metrics"] if metric["type"] == "median_perturbation"]
    assert [metric["args"]["attack"] for metric in medians] == ["palma"]
    assert len(medians[0]["args"]["interval_95"]) == 2


def test_the_hub_reads_it(written):
    card = pytest.importorskip("huggingface_hub").ModelCard(written[0])
    assert card.data.model_name == "demo-standard"
    assert len(card.data.eval_results) == 2 * 7 + 1 + 2


def test_what_was_run_is_told_whole(found, written):
    for run, result in zip(written[1]["segprox"][0]["runs"], found, strict=True):
        assert run["fields"] == result.header["attack"]
        assert {"class", "revision", "norm"} < set(run["fields"])
        assert run["versions"] == {
            "segprox": segprox.__version__,
            "torch": torch.__version__,
            "python": ".".join(map(str, sys.version_info[:3])),
        }
        assert all(f"{name}={value}".replace("_", "\\_") in written[0] for name, value in run["fields"].items())
    assert len({run["images_hash"] for run in written[1]["segprox"][0]["runs"]}) == 1


def test_models_are_told_apart_by_their_weights(found):
    other = segprox.evaluate("demo-robust", "demo", "fgsm", limit=1, progress=False)
    hashes = [{record.model_hash for run in results for record in run.records} for results in (found, other)]
    assert [len(some) for some in hashes] == [1, 1]
    assert hashes[0] != hashes[1]
    data = found.card().data["segprox"][0]["runs"]
    assert {run["model_hash"] for run in data} == hashes[0]
    assert data[0]["images_hash"] != other.card().data["segprox"][0]["runs"][0]["images_hash"]


# --- the command ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {"attacks": "palma", "steps": 5},
        {
            "attacks": segprox.make_attack("bisect:pgd", rounds=2, steps=2, step_size=1 / 3), "goals": "road",
            "threshold": 0.8, "seed": 3, "max_queries": 5, "save": ["float", "png"],
        },
    ],
)  # fmt: skip
def test_the_command_repeats_the_run(segprox_cli, tmp_path, options):
    first = segprox.evaluate("demo-standard", "demo?length=3", limit=2, out=tmp_path / "a", progress=False, **options)
    assert segprox_cli("card", tmp_path / "a", "--out", tmp_path / "card")[0] == 0
    commands = [line.strip() for line in (tmp_path / "card" / "card.md").read_text().splitlines() if "--model" in line]
    program, *arguments = shlex.split(commands[0])
    assert (len(commands), program, arguments[-2]) == (1, "segprox", "--out")
    assert segprox_cli(*arguments[:-1], tmp_path / "b")[0] == 0
    (again,) = load_runs([tmp_path / "b"])
    assert again.folder.name == first[0].folder.name
    assert [record.key for record in again.records] == [record.key for record in first[0].records]
    assert [record.norm for record in again.records] == [record.norm for record in first[0].records]


def test_options_of_models_are_in_the_name():
    run = make_run(model="demo-robust?mean=0,0,0", dataset="demo", settings={
        "model_options": {"mean": [0.5, 0.5, 0.5], "resize": [64, 128], "precision": "bfloat16"}
    })  # fmt: skip
    arguments = shlex.split(repeat_command(run))
    name = arguments[arguments.index("--model") + 1]
    assert name == "demo-robust?mean=0.5,0.5,0.5&resize=64x128&precision=bfloat16"
    again = Run(model=name, dataset=run.dataset, attack=run.attack)
    assert again.folder == run.folder


def test_a_limit_that_was_higher_once_is_told(tmp_path):
    make_store(tmp_path, make_run(dataset="demo", model="demo-robust", settings={"limit": 1}),
               [make_record(name) for name in "abc"])  # fmt: skip
    (run,) = Card.of(load_runs([tmp_path])).data["segprox"][0]["runs"]
    assert "--limit 3" in run["command"]


def test_plugins_are_in_the_command(monkeypatch, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text("")
    monkeypatch.setenv("SEGPROX_PLUGINS", str(plugin))
    command = repeat_command(make_run(model="demo-robust", dataset="demo"))
    assert command.startswith(f"segprox --plugin {plugin} evaluate ")


def test_what_no_command_repeats_says_why():
    network, data = torch.nn.Conv2d(3, 4, 1), [(torch.rand(3, 8, 8), torch.randint(0, 4, (8, 8)))]
    with pytest.warns(UserWarning, match="segprox check is red"):  # a network like this one deserves it
        card = segprox.evaluate(network, data, "fmn", steps=3, progress=False).card()
    (run,) = card.data["segprox"][0]["runs"]
    assert run["command"] is None
    assert "is the name of an object that was evaluated from Python" in run["no_command"]
    assert "no command repeats this run" in card.markdown
    assert "How to repeat it" not in card.markdown
    sea = make_run("sea", "demo-robust", dataset="demo", set={"objectives": ["ce", "js"]})
    with pytest.raises(segprox.SegproxError, match="a field that the command line cannot write"):
        repeat_command(sea)


# --- edges ------------------------------------------------------------------------------------------------------------
def test_what_is_infinite_is_null(tmp_path):
    make_store(tmp_path, make_run("ddn"), [make_record("a", success=False), make_record("b")], {"norm": "l2"})
    make_store(tmp_path, make_run("pdgd"), [make_record("a", success=False)], {"norm": "l2"})
    card = Card.of(load_runs([tmp_path]))
    runs = {run["attack"]: run for run in card.data["segprox"][0]["runs"]}
    assert (runs["ddn"]["median"], runs["ddn"]["mean"]) == (pytest.approx(0.1), None)
    assert (runs["pdgd"]["median"], runs["pdgd"]["median_interval"]) == (None, [None, None])
    (result,) = card.data["model-index"][0]["results"]
    kinds = [(metric["type"], metric["args"].get("attack")) for metric in result["metrics"]]
    assert ("median_perturbation", "ddn") in kinds
    assert ("median_perturbation", "pdgd") not in kinds
    assert [left["epsilon"] for left in card.data["segprox"][0]["left"]] == [0]
    json.loads(card.write(tmp_path / "out").with_suffix(".json").read_text(), parse_constant=pytest.fail)
    assert "Not all attacks have seen the same images." in card.markdown


def test_several_models_and_hostile_names(tmp_path):
    make_results(tmp_path, {"fmn": [0.01, None]}, model="a|b\n    segprox `<x>`", dataset="d: {x}")
    make_results(tmp_path, {"fmn": [0.02, 0.03]}, model="plain")
    card = Card.of(load_runs([tmp_path]))
    assert card.markdown.count("## Robustness of ") == 2
    front = yaml.safe_load(card.markdown.split("---\n")[1])
    assert [entry["name"] for entry in front["model-index"]] == ["a|b\n    segprox `<x>`", "plain"]
    assert "<x>" not in card.markdown.split("\n---\n")[1]


def test_without_records_there_is_no_card(segprox_cli, tmp_path):
    make_store(tmp_path / "in", make_run(), [])
    code, _, error = segprox_cli("card", tmp_path / "in", "--out", tmp_path / "out")
    assert code == 2
    assert "a card needs records, but no image of these runs was attacked" in error
    assert not (tmp_path / "out").exists()


def test_what_stays_within_epsilon_counts_at_epsilon():
    """Single precision makes 8/255 a little more than 8/255."""
    found = segprox.evaluate("demo-standard", "demo", "fgsm", limit=1, progress=False)
    (record,) = found[0].records
    assert record.found.linf > 8 / 255
    assert found.accuracy(8 / 255) == pytest.approx(record.accuracy)
    assert found.accuracy(7.99 / 255) == pytest.approx(record.clean_accuracy)
