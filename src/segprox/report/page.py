"""Results as one HTML file that works from a disk, offline, for anyone with a browser."""

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from segprox.data.base import VOID_COLOUR, colours
from segprox.report.agreement import agreement_tables
from segprox.report.curves import Curve, anytime_curve, measure_curve
from segprox.report.findings import same_images, statements, verdicts
from segprox.report.groups import Group, by_norm, group_runs
from segprox.report.metrics import mean_iou, pixel_accuracy
from segprox.report.pictures import Thumbnails, count_of, coverage, read_pictures
from segprox.report.results import RunResults
from segprox.report.statistics import Summary, summarise
from segprox.report.units import Unit
from segprox.run.record import Record

PICTURE_LIMIT = 40_000_000  # bytes of full pictures in a page: browsers stay quick, and mail servers may still take it
POINTS = 300  # of a curve; more cannot be told apart on a screen
SCRIPTS = ("base.js", "tables.js", "curves.js", "classes.js", "viewer.js", "gallery.js", "start.js")


@dataclass(frozen=True)
class PageInfo:
    """What was written."""

    path: Path
    bytes: int
    images: int  # records whose full pictures are in the page


class SortColumn(NamedTuple):
    """A column of the table of results, by which it can be sorted."""

    key: str
    title: str
    hint: str
    best: int = 0  # 1: the largest value of a group is bold, -1: the smallest


class Shown(NamedTuple):
    """A run, with the group it is in and its name there."""

    group: Group
    name: str
    result: RunResults


def _columns(unit: Unit) -> tuple[SortColumn, ...]:
    size = f"{unit.name}; an image that was not broken counts as {unit.unbroken_text}"
    return (
        SortColumn("images", "Images", "attacked"),
        SortColumn("errors", "Errors", "images that could not be attacked"),
        SortColumn("median", "Median", size, -1),
        SortColumn("mean", "Mean", size, -1),
        SortColumn("success_rate", "Broken", "share of images the attack succeeded on", 1),
        SortColumn("rounded_rate", "In 8 bits", "share still broken when the image is rounded to 8 bits", 1),
        SortColumn(
            "apsr", "APSR", "attack pixel success rate: share of pixels that are as the attack wants; median", 1
        ),
        SortColumn("attacked_miou", "mIoU", "mean intersection over union before and after, pooled over images", -1),
        SortColumn("attacked_accuracy", "Accuracy", "share of pixels that are right before and after", -1),
        SortColumn("forwards", "Queries", "forward and backward passes per image, medians"),
        SortColumn("seconds", "Seconds", "per image, median"),
    )


def write_page(results: Sequence[RunResults], path: Path, limit: int = PICTURE_LIMIT) -> PageInfo:
    """Write the page.

    Args:
        results: runs, as `load_runs` gives them.
        path: the file to write; it is there as a whole or not at all.
        limit: most bytes of full pictures to embed. The first images of each run have them, all others a thumbnail.

    Returns:
        Where the page is, its size, and how many records have full pictures in it.
    """
    groups = group_runs(results)
    results = [run for group in groups for run in group.runs.values()]  # attacks to compare side by side
    pictures, unreadable = read_pictures(results, limit)
    content = _render(groups, pictures, coverage(results, pictures, unreadable, limit)).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return PageInfo(path, len(content), sum(picture.parts is not None for picture in pictures.values()))


def _render(groups: Sequence[Group], pictures: dict[str, Thumbnails], covered: str) -> str:
    environment = Environment(
        loader=PackageLoader("segprox.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["json"] = _json
    sources = environment.loader
    assert sources is not None
    style = sources.get_source(environment, "page.css")[0]
    script = "\n".join(sources.get_source(environment, name)[0] for name in SCRIPTS)
    shown = [Shown(group, name, result) for group in groups for name, result in group.runs.items()]
    results = [result for _, _, result in shown]
    return environment.get_template("page.html").render(
        # Hashes instead of 'unsafe-inline': nothing that slips in from data can run.
        policy=f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'",
        style=Markup(style),  # our own files, not data
        script=Markup(script),
        title=_title(results),
        subtitle=_subtitle(results),
        statements=statements(groups),
        verdicts=verdicts(groups),
        varying=[i for i in range(3) if len({group.names[i] for group in groups}) > 1],
        constant=_constant(groups),
        tables=[(unit, _columns(unit), _rows(some)) for unit, some in by_norm(groups).items()],
        agreement=agreement_tables(groups),
        errors=[(result, name, error) for _, name, result in shown for error in result.errors],
        shown=shown,
        about=_about,
        pictures=list(pictures.values()),
        coverage=covered,
        data=_data(shown, pictures),
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _json(value: Any) -> Markup:
    """For a script element, where `</script>` and `<!--` in a name must not mean anything."""
    return Markup(json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def _title(results: Sequence[RunResults]) -> str:
    models = list(dict.fromkeys(result.run.model for result in results))
    if not models:
        return "No results"
    if len(models) > 3:
        return f"How robust are {len(models)} models?"
    listed = " and ".join([", ".join(models[:-1]), models[-1]]) if len(models) > 1 else models[0]
    return f"How robust {'are' if len(models) > 1 else 'is'} {listed}?"


def _subtitle(results: Sequence[RunResults]) -> str:
    images = {(result.run.dataset, record.image) for result in results for record in result.records}
    attacks = {str(result.run.attack) for result in results}
    days = sorted({str(result.header["started"])[:10] for result in results if result.header.get("started")})
    parts = [count_of(len(attacks), "attack"), count_of(len(images), "image"), count_of(len(results), "run")]
    parts.append(count_of(sum(len(result.records) for result in results), "record"))
    if days:
        parts.append(days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")
    return " · ".join(parts)


def _constant(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """What all runs share: it needs no column."""
    values = zip(("Model", "Dataset", "Goal"), zip(*(group.names for group in groups)))
    return [(name, own[0]) for name, own in values if len(set(own)) == 1]


def _rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    rows = []
    for group in groups:
        summaries = {name: summarise(result) for name, result in group.runs.items()}
        attacked = [summary for summary in summaries.values() if summary.images]
        rivals = attacked if same_images(group.runs.values()) else []
        for name, summary in summaries.items():
            cells = [_cell(column, summary, rivals, group.unit) for column in _columns(group.unit)]
            rows.append({"group": group, "attack": name, "cells": cells})
    return rows


def _cell(column: SortColumn, summary: Summary, rivals: Sequence[Summary], unit: Unit) -> dict[str, Any]:
    value = float(getattr(summary, column.key))
    text = _text(column.key, summary, unit)
    ranked = sorted(rivals, key=lambda rival: -column.best * float(getattr(rival, column.key)))
    texts = [_text(column.key, rival, unit) for rival in ranked] if column.best else []
    best = len(set(texts)) > 1 and text == texts[0]  # numbers that look equal are equally good
    return {"value": None if math.isnan(value) else value, "text": text, "best": best}


def _text(key: str, summary: Summary, unit: Unit) -> str:
    value = float(getattr(summary, key))
    if math.isnan(value):
        return "-"
    match key:
        case "median" | "mean":
            return unit.number(value)
        case "success_rate" | "rounded_rate":
            return f"{value:.0%}"
        case "apsr":
            return f"{value:.1%}"
        case "attacked_miou" | "attacked_accuracy":
            return f"{getattr(summary, key.removeprefix('attacked_')) * 100:.1f} → {value * 100:.1f}"
        case "forwards":
            return f"{value:.0f} + {summary.backwards:.0f}"
        case "seconds":
            return f"{value:.1f}"
    return f"{value:.0f}"


def _about(result: RunResults) -> list[tuple[str, str]]:
    """Provenance: everything known about a run, by name."""
    run, header = result.run, result.header
    own = {"format", "segprox", "run", "classes", "palette", "environment", "started"}
    entries: dict[str, Any] = {
        "model": run.model, "dataset": run.dataset, "goal": run.goal, "attack": str(run.attack),
        **{field.name: getattr(run.settings, field.name) for field in fields(run.settings)},
        "started": header.get("started"), "segprox": header.get("segprox"), **dict(header.get("environment") or {}),
        **{key: value for key, value in header.items() if key not in own},
        "classes": len(result.classes) or None, "folder": result.folder.name, "records": _fingerprint(result),
    }  # fmt: skip
    return [(key, _plain(value)) for key, value in entries.items() if value not in (None, "", [], {}, ())]


def _fingerprint(result: RunResults) -> str:
    """Two reports of the same records show the same."""
    keys = "".join([*(record.key for record in result.records), *(error.key for error in result.errors)])
    return f"{len(result.records)}, hash of their keys {hashlib.blake2b(keys.encode(), digest_size=8).hexdigest()}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {entry}" for key, entry in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _data(shown: Sequence[Shown], pictures: Mapping[str, Thumbnails]) -> dict[str, Any]:
    """What scripts draw from."""
    attacks = list(dict.fromkeys(name for _, name, _ in shown))
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
                "attack": name,
                "colours": {"attack": attacks.index(name), "model": models.index(group.model)},
                "classes": list(result.classes),
                "palette": _palette(result),
                "curves": _curves(result),
                "iou": _class_iou(result),
                "records": [
                    _record(record, result.unit, pictures.get(f"{i}-{j}")) for j, record in enumerate(result.records)
                ],
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
    curves = {name: _points(measure_curve(result, measure), factor, 1) for name, measure in measures.items()}
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


def _record(record: Record, unit: Unit, pictures: Thumbnails | None) -> dict[str, Any]:
    found, rounded = record.found, record.rounded
    return {
        "image": record.image, "size": _number(unit.size(record) * unit.factor), "linf": _number(found.linf * 255),
        "l2": _number(found.l2), "apsr": _number(found.apsr), "success": found.success, "rounded": rounded.success,
        "roundedSize": _number(unit.rounded_size(rounded) * unit.factor),
        "cleanAccuracy": _number(record.clean_accuracy), "accuracy": _number(record.accuracy),
        "forwards": record.forwards, "backwards": record.backwards, "seconds": _number(record.seconds),
        "height": record.height, "width": record.width, "hash": record.image_hash, "key": record.key,
        "pictures": None if pictures is None else "full" if pictures.parts else "small",
        "classes": pictures.classes if pictures else [],
    }  # fmt: skip


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [_number(float(value)) for value in values]
