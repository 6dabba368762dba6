"""What the scripts of a page draw from: runs with their curves, classes and records."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from segprox.data.base import VOID_COLOUR, colours
from segprox.report.curves import Curve, anytime_curve, epsilon_curve, measure_curve, unbroken_curve
from segprox.report.groups import Group
from segprox.report.metrics import mean_iou, pixel_accuracy
from segprox.report.pictures import Pictures
from segprox.report.random import draws_text
from segprox.report.results import RunResults
from segprox.report.units import Unit
from segprox.run.columns import NUMBERS, TEXTS

SHOWN = {*NUMBERS, *TEXTS}  # of a record
POINTS = 300  # of a curve; more cannot be told apart on a screen


class Shown(NamedTuple):
    """A run, with the group it is in and its name there."""

    group: Group
    name: str
    result: RunResults


def page_data(
    shown: Sequence[Shown], pictures: Mapping[str, Pictures], listed: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """What scripts draw from."""
    names = [
        group.epsilon_labels.get(name, name) for group, name, _ in shown
    ]  # one curve for all epsilons of an attack
    attacks = list(dict.fromkeys(names))
    models = list(dict.fromkeys(group.model for group, _, _ in shown))
    ids = _ids([result for _, _, result in shown])
    return {
        "void": list(VOID_COLOUR),
        "runs": [
            {
                "id": ids[i],
                "model": group.model,
                "dataset": group.dataset,
                "goal": group.goal,
                "norm": group.norm,
                "unit": group.unit.key,
                "rounded": group.unit.rounded,
                "attack": name,
                "series": names[i],
                "strongest": name == group.strongest,
                "epsilon": None if (epsilon := result.epsilon) is None else _number(epsilon * group.unit.factor),
                "colours": {"attack": attacks.index(names[i]), "model": models.index(group.model)},
                "classes": list(result.classes),
                "palette": _palette(result),
                "curves": _curves(result),
                "iou": _class_iou(result),
                "records": [_record(result, j, pictures.get(f"{i}-{place}")) for place, j in enumerate(listed[i])],
            }
            for i, (group, name, result) in enumerate(shown)
        ],
    }


def _ids(results: Sequence[RunResults]) -> list[str]:
    """For links: the folder's name, which does not change with what else is in the report."""
    names = [result.folder.name for result in results]
    return [name if names.count(name) == 1 else f"{name}~{names[:i].count(name)}" for i, name in enumerate(names)]


def _palette(result: RunResults) -> list[list[int]]:
    """A colour per class, as previews have them."""
    known = [[int(value) for value in colour] for colour in result.header.get("palette") or []]
    return [*known, *map(list, colours(256)[len(known) :])][: max(len(result.classes), len(known))]


def _curves(result: RunResults) -> dict[str, list[list[float | None]]]:
    """Functions of the size, and of queries, as lists of x and of y."""
    if not result.records:
        return {}
    factor, anytime = result.unit.factor, anytime_curve(result)
    measures = {"accuracy": pixel_accuracy, "miou": mean_iou}
    if result.epsilon is not None:
        return {name: _points(epsilon_curve([result], measure), factor, 1) for name, measure in measures.items()}
    curves = {name: _points(measure_curve(result, measure), factor, 1) for name, measure in measures.items()}
    curves["broken"] = _points(unbroken_curve(result), factor, 1)
    return curves | ({} if anytime is None else {"anytime": _points(anytime, 1, factor)})


def _points(curve: Curve, across: float, along: float) -> list[list[float | None]]:
    kept = np.unique(np.linspace(0, len(curve.x) - 1, POINTS).round().astype(int))
    return [_numbers(curve.x[kept] * across), _numbers(curve.y[kept] * along)]


def _class_iou(result: RunResults) -> list[list[float | None]]:
    """The IoU of each class before and after the attack, pooled over images."""
    if not result.records:
        return [[], []]
    pooled = [result.counts(clean=clean) for clean in (True, False)]
    return [_numbers(type(counts)(*(c.sum(0) for c in counts)).iou()) for counts in pooled]


def _record(result: RunResults, j: int, pictures: Pictures | None) -> dict[str, Any]:
    unit, row = result.unit, {name: values[j].item() for name, values in result.columns.items() if name in SHOWN}
    return {
        "image": row["image"], "size": _number(row.get(f"found.{unit.norm}", row["norm"]) * unit.factor),
        "linf": _number(row["found.linf"] * Unit("linf", unit.eight_bit).factor),
        "l2": _number(row["found.l2"]), "apsr": _number(row["found.apsr"]),
        "success": bool(row["found.success"]),
        "rounded": None if math.isnan(row["rounded.success"]) else bool(row["rounded.success"]),
        "attacked": _known(row["found.attacked"]), "protected": _known(row["found.protected"]),
        "draws": draws_text(result, row["found.share"]),
        "roundedSize": _number(row.get(f"rounded.{unit.norm}", math.nan) * unit.factor),
        "cleanAccuracy": _number(row["clean_accuracy"]), "accuracy": _number(row["accuracy"]),
        "forwards": int(row["forwards"]), "backwards": int(row["backwards"]), "seconds": _number(row["seconds"]),
        "height": int(row["height"]), "width": int(row["width"]), "hash": row["image_hash"], "key": row["key"],
        "pictures": pictures is not None,
        "classes": pictures.classes if pictures else [],
    }  # fmt: skip


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [_number(float(value)) for value in values]
