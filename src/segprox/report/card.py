"""Cards: what an evaluation found, as a section of a model card and as plain data that the Hugging Face Hub reads."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from segprox.errors import SegproxError
from segprox.report.contents import report_tables
from segprox.report.findings import same_images
from segprox.report.groups import Group, group_runs
from segprox.report.metrics import mean_iou, pixel_accuracy
from segprox.report.requirements import quality_at
from segprox.report.results import RunResults
from segprox.report.statistics import summarise
from segprox.report.tables import Column, Table, markdown_text, to_markdown
from segprox.run.command import repeat_command
from segprox.run.record import digest
from segprox.sizes import Interval, wilson

EPSILONS = tuple(n / 255 for n in (0.25, 0.5, 1, 2, 4, 8))  # at which the field tells what is left, in linf
SHARES = 0.001, 0.002, 0.005, 0.01, 0.02, 0.05  # the same where images are not of 8 bits, of the range
TASK = {"type": "image-segmentation", "name": "Semantic segmentation under attack"}
MEASURES: dict[str, Callable[[Any], float]] = {  # by the Hub's names of metrics
    "accuracy": lambda counts: pixel_accuracy(*counts),
    "mean_iou": lambda counts: mean_iou(*counts),
}
READABLE = {"accuracy": "pixel accuracy", "mean_iou": "mean IoU"}


@dataclass(frozen=True)
class Card:
    """What an evaluation found and how to repeat it: `markdown` for people, `data` for programs.

    The Markdown begins with the metadata of a model card, `model-index`, so it may be a repository's README or a
    section of it; `data` has the same metadata and all numbers in full.
    """

    groups: tuple[Group, ...]

    @classmethod
    def of(cls, runs: Sequence[RunResults]) -> "Card":
        """The card of all runs with records."""
        attacked = [run for run in runs if run.records]
        if not attacked:
            raise SegproxError("a card needs records, but no image of these runs was attacked")
        return cls(tuple(group_runs(attacked)))

    @cached_property
    def data(self) -> dict[str, Any]:
        """`model-index`, as the Hub specifies it, and `segprox`: one evaluation for each model, dataset, goal and norm.

        Sizes are in the unit that `unit` names, shares are in [0, 1], intervals are of 95 %; what is infinite or
        unknown is null.
        """
        evaluations = [_evaluation(group) for group in self.groups]
        models = sorted({group.model for group in self.groups})
        index = [
            {"name": model, "results": [_result(e) for e in evaluations if e["model"] == model]} for model in models
        ]
        return {"model-index": index, "segprox": evaluations}

    @property
    def markdown(self) -> str:
        """Front matter, and a section for each model."""
        # Through JSON, so that equal parts are written out and not as YAML's references.
        index = json.loads(json.dumps({"model-index": self.data["model-index"]}))
        front = yaml.safe_dump(index, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
        ordered = sorted(zip(self.groups, self.data["segprox"]), key=lambda pair: pair[0].model)
        sections = [_section(model, list(some)) for model, some in groupby(ordered, key=lambda pair: pair[0].model)]
        return "\n\n".join([f"---\n{front}---", *sections]) + "\n"

    def _repr_markdown_(self) -> str:
        return self.markdown.split("\n---\n", 1)[1]

    def write(self, folder: str | Path) -> Path:
        """Write `card.md` and `card.json` into a folder; returns the first."""
        from segprox.report.write import written_aside

        content = json.dumps(self.data, indent=1, allow_nan=False, ensure_ascii=False)
        with written_aside(Path(folder)) as aside:
            (aside / "card.json").write_text(f"{content}\n", encoding="utf-8", newline="\n")
            (aside / "card.md").write_text(self.markdown, encoding="utf-8", newline="\n")
        return Path(folder) / "card.md"


# --- plain data -------------------------------------------------------------------------------------------------------
def _evaluation(group: Group) -> dict[str, Any]:
    """All that is known of one model, dataset and goal in one norm."""
    fixed = {epsilon for run in group.runs.values() if (epsilon := run.epsilon) is not None}
    usual = () if group.norm != "linf" else EPSILONS if group.eight_bit else SHARES
    epsilons = sorted({0.0, *fixed, *usual})
    return {
        **{name: getattr(group, name) for name in ("model", "dataset", "goal", "norm")},
        "unit": group.unit.name,
        "left": [_left(group, epsilon) for epsilon in epsilons],
        "runs": [_run(label, run) for label, run in group.runs.items()],
    }


def _left(group: Group, epsilon: float) -> dict[str, Any]:
    """What the strongest attack leaves within epsilon; 0 is the unchanged images."""
    left: dict[str, Any] = {"epsilon": epsilon * group.unit.factor}
    for name, measure in MEASURES.items():
        value, interval, left["images"] = quality_at(group, epsilon, measure)
        left |= {name: _known(value), f"{name}_interval": _interval(interval)}
    return left


def _run(label: str, result: RunResults) -> dict[str, Any]:
    run, found, factor, epsilon = result.run, summarise(result), result.unit.factor, result.epsilon
    share = _interval(wilson(found.broken, found.images))
    numbers: dict[str, Any] = {"broken": found.success_rate, "broken_interval": share}
    if epsilon is None:
        numbers |= {"median": _known(found.median * factor), "median_interval": _interval(found.interval, factor)}
        numbers["mean"] = _known(found.mean * factor)
    else:  # a size that was given says nothing
        numbers |= {"epsilon": epsilon * factor, "accuracy": found.attacked_accuracy, "mean_iou": found.attacked_miou}
    environment = result.header.get("environment", {})
    try:
        command, why_not = repeat_command(run, len(result.records) + len(result.errors)), None
    except SegproxError as error:
        command, why_not = None, str(error)
    return {
        "attack": label,
        "fields": result.header.get("attack") or {"name": run.attack.name, **run.attack.set},
        **{name: getattr(run.settings, name) for name in ("threshold", "seed", "max_queries")},
        **({} if (sampling := run.settings.sampling) is None else dataclasses.asdict(sampling)),
        "dataset": run.dataset,
        "images": found.images,
        "errors": found.errors,
        "images_hash": digest(sorted(record.image_hash for record in result.records)),
        "model_hash": _only({record.model_hash for record in result.records}),
        **numbers,
        "forwards": found.forwards,
        "backwards": found.backwards,
        "versions": {
            "segprox": _only({record.version for record in result.records}),
            **{name: environment.get(name) for name in ("torch", "python")},
        },
        "command": command,
        **({"no_command": why_not} if why_not else {}),
    }


def _result(evaluation: dict[str, Any]) -> dict[str, Any]:
    """An entry of `model-index`."""
    unit, runs = evaluation["unit"], evaluation["runs"]
    shared = {"goal": evaluation["goal"], "threshold": runs[0]["threshold"]}
    metrics = []
    for left in evaluation["left"]:
        clean = left["epsilon"] == 0
        where = "unchanged images" if clean else f"strongest attack at {unit} = {left['epsilon']:g}"
        attacks = {} if clean else {"epsilon": left["epsilon"], **shared, "attacks": [run["attack"] for run in runs]}
        for name in MEASURES:
            metrics.append(_metric(name, f"{READABLE[name]}, {where}", left, name, attacks))
    for run in runs:
        about = {**shared, "attack": run["attack"], **{name: run[name] for name in ("images", "seed")}}
        if "median" in run:
            name = f"median {unit} that breaks an image, {run['attack']}"
            metrics.append(_metric("median_perturbation", name, run, "median", about))
        metrics.append(_metric("share_broken", f"share of images broken, {run['attack']}", run, "broken", about))
    dataset = {"name": runs[0]["dataset"], "type": runs[0]["dataset"].partition(":")[0].partition("?")[0]}
    known = [metric for metric in metrics if metric["value"] is not None]  # the Hub wants a value
    return {"task": TASK, "dataset": dataset, "metrics": known}


def _metric(kind: str, name: str, values: dict[str, Any], key: str, about: dict[str, Any]) -> dict[str, Any]:
    args = {**about, "interval_95": values[f"{key}_interval"]}
    return {"type": kind, "name": name, "value": values[key], "args": args}


def _known(value: float) -> float | None:
    return value if isfinite(value) else None


def _interval(interval: Interval, factor: float = 1.0) -> list[float | None]:
    return [_known(end * factor) for end in interval]


def _only(values: set[Any]) -> Any:
    """The value that all have, or all of them."""
    found = sorted(value for value in values if value is not None)
    return found[0] if len(found) == 1 else found or None


# --- Markdown ---------------------------------------------------------------------------------------------------------
def _section(model: str, evaluated: Sequence[tuple[Group, dict[str, Any]]]) -> str:
    groups = [group for group, _ in evaluated]
    runs = [run for _, evaluation in evaluated for run in evaluation["runs"]]
    tables = [table for table in report_tables(groups) if table.name.startswith(("summary", "fixed-epsilon"))]
    tables += [*(_left_table(*pair) for pair in evaluated), _attack_table(runs), _origin_table(runs)]
    commands = ["    " + "\n    ".join(run["command"].splitlines()) for run in runs if run["command"]]
    cannot = [
        markdown_text(f"{run['attack']}: no command repeats this run: {run['no_command']}.")
        for run in runs
        if not run["command"]
    ]
    repeat = ["### How to repeat it", "\n".join(commands)] if commands else []
    return "\n\n".join([f"## Robustness of {markdown_text(model)}", *map(to_markdown, tables), *repeat, *cannot])


def _left_table(group: Group, evaluation: dict[str, Any]) -> Table:
    columns = (
        Column("epsilon", ".2f"), Column("images", "d"), Column("accuracy", ".2%"), Column("low", ".2%"),
        Column("high", ".2%"), Column("mean IoU", ".2%"), Column("low ", ".2%"), Column("high ", ".2%"),
    )  # fmt: skip
    rows = tuple(
        (
            left["epsilon"], left["images"], left["accuracy"], *left["accuracy_interval"], left["mean_iou"],
            *left["mean_iou_interval"],
        )
        for left in evaluation["left"]
    )  # fmt: skip
    notes = (
        f"Epsilon is {group.unit.name}; 0: the images unchanged. Each line is of the attack that leaves least, with "
        "the perturbations that it found and that are no larger: so much is left at most, and perhaps less where all "
        "attacks look for the smallest perturbation. low and high: 95 % bootstrap interval.",
        *([] if same_images(group.runs.values()) else ["Not all attacks have seen the same images."]),
    )  # fmt: skip
    return Table("left", f"What the strongest attack leaves: {', '.join(group.names[1:])}", columns, rows, notes)


def _attack_table(runs: Sequence[dict[str, Any]]) -> Table:
    columns = [Column(name) for name in ("attack", "threshold", "seed", "max_queries", "fields")]
    rows = dict.fromkeys(
        (run["attack"], f"{run['threshold']:g}", str(run["seed"]), _shown(run["max_queries"]), _shown(run["fields"]))
        for run in runs
    )
    return Table("attacks", "Attacks", tuple(columns), tuple(rows))


def _origin_table(runs: Sequence[dict[str, Any]]) -> Table:
    names = ("dataset", "images", "images_hash", "model_hash")
    columns = [Column(name.replace("_hash", ", hash")) for name in (*names, "segprox", "torch", "python")]
    rows = dict.fromkeys(
        tuple(_shown(value) for value in (*(run[name] for name in names), *run["versions"].values())) for run in runs
    )
    note = "The model's hash is of its weights and of how it is fed, the images' of all pixels, in any order."
    return Table("origin", "Model, data and versions", tuple(columns), tuple(rows), (note,))


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={f'({_shown(v)})' if isinstance(v, dict) else v}" for name, v in value.items())
    return "-" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
