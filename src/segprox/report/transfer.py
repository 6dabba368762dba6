"""Which models the saved images of others break: a matrix of the model attacked and the model scored."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from segprox.report.groups import attack_labels
from segprox.report.results import RunResults
from segprox.report.tables import Column, Table, Value
from segprox.run.store import Store
from segprox.run.transfer import Transferred, TransferredImage, read_transferred

Line = tuple[str, str, str, RunResults, dict[str, Transferred]]  # dataset, goal, attack, and what is known by model


def transfer_tables(results: Sequence[RunResults]) -> list[Table]:
    """A table for each dataset and goal of runs whose saved images were scored on other models."""
    lines: list[Line] = []
    for label, run in zip(attack_labels(results), results):
        known = {
            replace(run.run, model=entry.model).model_title: entry for entry in read_transferred(Store(run.folder))
        }
        if known:
            lines.append((run.run.dataset, run.run.goal, label, run, known))
    tables = [_table(place, list(some)) for place, some in groupby(sorted(lines, key=_place), key=_place)]
    if len(tables) < 2:
        return tables
    return [replace(table, name=f"{table.name}-{number}") for number, table in enumerate(tables, start=1)]


def _place(line: Line) -> tuple[str, str]:
    return line[0], line[1]


def _table(place: tuple[str, str], lines: Sequence[Line]) -> Table:
    models = list(dict.fromkeys(model for *_, known in lines for model in known))
    rows = [_row(label, run, known, models) for _, _, label, run, known in lines]
    measures = (("clean accuracy", ".1%"), ("accuracy left", ".1%"), ("APSR", ".1%"), ("broken", ".0%"))
    columns = (
        Column("attacked"), Column("attack"), Column("images", "d"),
        *(Column(model, form, over=measure) for measure, form in measures for model in models),
    )  # fmt: skip
    own = [m for m in models if any(m in known and known[m].reference == "prediction" for *_, known in lines)]
    by_itself = f"the model's own prediction of the clean image, for: {', '.join(own)}"
    reference = "the labels of the dataset" if not own else by_itself
    if 0 < len(own) < len(models):
        reference = (
            f"the labels of the dataset, or to {by_itself}; these columns are not to be compared with the others"
        )
    notes = (
        "The images that were saved when the model of the line was attacked, as the model of the column sees them; "
        "means over images, and the share of images at which the APSR reaches the threshold.",
        f"Accuracy and APSR are relative to {reference}.",
    )
    return Table("transfer", f"Transfer: {', '.join(place)}", columns, tuple(rows), notes)


def _row(label: str, run: RunResults, known: dict[str, Transferred], models: Sequence[str]) -> tuple[Value, ...]:
    keys = set(run.columns["key"].tolist())
    images = {
        model: [i for i in known[model].images if i.key in keys] if model in known else [] for model in models
    }  # of records that have not changed since
    measures = ("clean_accuracy", "accuracy", "apsr", "success")
    cells = [_mean(images[model], measure) for measure in measures for model in models]
    return run.run.model_title, label, max(map(len, images.values())), *cells


def _mean(images: Sequence[TransferredImage], measure: str) -> float | None:
    return float(np.mean([getattr(image, measure) for image in images])) if images else None
