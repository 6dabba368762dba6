"""Results as one HTML file that works from a disk, offline, for anyone with a browser."""

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from segprox.attacks.base import Family
from segprox.data.base import VOID_COLOUR, colours
from segprox.report.agreement import agreement_tables
from segprox.report.contents import FAMILIES
from segprox.report.curves import Curve, anytime_curve, epsilon_curve, measure_curve
from segprox.report.findings import same_images, statements, verdicts
from segprox.report.groups import Group, by_norm, group_runs
from segprox.report.metrics import mean_iou, pixel_accuracy
from segprox.report.pictures import Thumbnails, count_of, coverage, listed_records, read_pictures
from segprox.report.requirements import Judged, conclude
from segprox.report.results import RunResults
from segprox.report.statistics import Summary, summarise
from segprox.report.units import Unit
from segprox.run.columns import NUMBERS, TEXTS

PICTURE_LIMIT = 40_000_000  # bytes of full pictures in a page: browsers stay quick, and mail servers may still take it
RECORD_LIMIT = 20_000  # records in a page, about 8 MB
SHOWN = {*NUMBERS, *TEXTS}  # of a record
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


class ResultTable(NamedTuple):
    """What attacks of one family and norm found: for each group its rows."""

    title: str
    columns: tuple[SortColumn, ...]
    groups: list[tuple[Group, list[dict[str, Any]]]]


def _columns(unit: Unit, family: Family) -> tuple[SortColumn, ...]:
    size = f"{unit.name}; an image that was not broken counts as {unit.unbroken_text}"
    apsr = "attack pixel success rate: the share of pixels that are as the attack wants; median"
    reached = "APSR and size that were reached on the images that were not broken, medians"
    columns = {
        "median": SortColumn("median", "Median", size, -1),
        "mean": SortColumn("mean", "Mean", size, -1),
        "epsilon": SortColumn("epsilon", "Epsilon", f"{unit.name}; the largest change that the attack may make"),
        "accuracy": SortColumn("attacked_accuracy", "Accuracy", "share of right pixels before and after, in %", -1),
        "miou": SortColumn("attacked_miou", "mIoU", "mean intersection over union before and after, in %", -1),
        "broken": SortColumn("success_rate", "Broken", "share of images the attack succeeded on", 1),
        "reached": SortColumn("reached_apsr", "Unbroken", reached),
        "rounded": SortColumn("rounded_rate", "In 8 bits", "share still broken when rounded to 8 bits", 1),
        "apsr": SortColumn("apsr", "APSR", apsr, 1),
        "queries": SortColumn("forwards", "Queries", "forward and backward passes per image, medians"),
        "seconds": SortColumn("seconds", "Seconds", "per image, median"),
        "images": SortColumn("images", "Images", "attacked"),
        "errors": SortColumn("errors", "Errors", "images that could not be attacked"),
    }
    own = {
        "minimal": "median mean broken reached rounded accuracy miou",
        "fixed-epsilon": "epsilon accuracy miou broken apsr",
    }
    return tuple(columns[key] for key in [*own[family].split(), "queries", "seconds", "images", "errors"])


def write_page(
    results: Sequence[RunResults],
    path: Path,
    limit: int = PICTURE_LIMIT,
    judged: Sequence[Judged] = (),
    critical: Sequence[str] = (),
) -> PageInfo:
    """Write the page.

    Args:
        results: runs, as `load_runs` gives them.
        path: the file to write; it is there as a whole or not at all.
        limit: most bytes of full pictures to embed. The worst images of each run have them, all others a thumbnail.
        judged: requirements, with which the page begins.
        critical: classes that come first and are marked.

    Returns:
        Where the page is, its size, and how many records have full pictures in it.
    """
    groups = group_runs(results)
    results = [run for group in groups for run in group.runs.values()]  # attacks to compare side by side
    listed = listed_records(results, RECORD_LIMIT)
    pictures, unreadable = read_pictures(results, limit, listed)
    covered = coverage(results, pictures, unreadable, limit, listed)
    content = _render(groups, pictures, listed, covered, judged, critical).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return PageInfo(path, len(content), sum(picture.parts is not None for picture in pictures.values()))


def _render(
    groups: Sequence[Group],
    pictures: dict[str, Thumbnails],
    listed: Sequence[Sequence[int]],
    covered: str,
    judged: Sequence[Judged],
    critical: Sequence[str],
) -> str:
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
        title=_title(groups),
        subtitle=_subtitle(results),
        statements=statements(groups),
        verdicts=verdicts(groups),
        judged=[(where, list(some)) for where, some in groupby(judged, key=lambda entry: entry.where)],
        conclusion=conclude(judged),
        tables=[_table(unit, some, family) for unit, some in by_norm(groups).items() for family in FAMILIES],
        agreement=agreement_tables(groups),
        errors=[(result, name, error) for _, name, result in shown for error in result.errors],
        provenance=_provenance(shown),
        pictures=list(pictures.values()),
        coverage=covered,
        data=_data(shown, pictures, listed) | {"critical": list(critical)},
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _json(value: Any) -> Markup:
    """For a script element, where `</script>` and `<!--` in a name must not mean anything."""
    return Markup(json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def _title(groups: Sequence[Group]) -> str:
    models = list(dict.fromkeys(group.model for group in groups))
    if not models:
        return "No results"
    if len(models) > 3:
        return f"How robust are {len(models)} models?"
    listed = " and ".join([", ".join(models[:-1]), models[-1]]) if len(models) > 1 else models[0]
    return f"How robust {'are' if len(models) > 1 else 'is'} {listed}?"


def _subtitle(results: Sequence[RunResults]) -> str:
    images = {(result.run.dataset, image) for result in results for image in result.columns["image"].tolist()}
    attacks = {str(result.run.attack) for result in results}
    days = sorted({str(result.header["started"])[:10] for result in results if result.header.get("started")})
    parts = [count_of(len(attacks), "attack"), count_of(len(images), "image"), count_of(len(results), "run")]
    parts.append(count_of(sum(len(result.records) for result in results), "record"))
    if days:
        parts.append(days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")
    return " · ".join(parts)


def _table(unit: Unit, groups: Sequence[Group], family: Family) -> ResultTable:
    """The attacks of a family: the strongest first, or by growing epsilon."""
    what = {"minimal": "Smallest changes that break an image", "fixed-epsilon": "What is left within epsilon"}[family]
    own = [chosen for group in groups if (chosen := group.of_family(family)).runs]
    return ResultTable(
        f"{what}, in {unit.name}", _columns(unit, family), [(group, _rows(group, family)) for group in own]
    )


def _rows(group: Group, family: Family) -> list[dict[str, Any]]:
    summaries = {name: summarise(result) for name, result in group.runs.items()}
    epsilons = {name: result.epsilon for name, result in group.runs.items()}
    names = group.epsilon_labels  # epsilon has a column of its own
    comparable = same_images(group.runs.values())
    if family == "minimal":
        summaries = dict(sorted(summaries.items(), key=lambda item: (not item[1].images, item[1].median, item[1].mean)))
    rows = []
    for name, summary in summaries.items():
        rivals = [
            other for key, other in summaries.items() if comparable and other.images and epsilons[key] == epsilons[name]
        ]
        cells = [_cell(column, summary, rivals, group.unit, epsilons[name]) for column in _columns(group.unit, family)]
        rows.append({"attack": names.get(name, name), "cells": cells})
    return rows


def _cell(
    column: SortColumn, summary: Summary, rivals: Sequence[Summary], unit: Unit, epsilon: float | None
) -> dict[str, Any]:
    if column.key == "epsilon":
        assert epsilon is not None  # only fixed-epsilon attacks have this column
        return {"value": epsilon, "text": unit.number(epsilon), "best": False}
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
        case "reached_apsr":
            return f"{value:.1%} at {unit.number(summary.reached_size)}"
        case "attacked_miou" | "attacked_accuracy":
            return f"{getattr(summary, key.removeprefix('attacked_')) * 100:.1f} → {value * 100:.1f}"
        case "forwards":
            return f"{value:.0f} + {summary.backwards:.0f}"
        case "seconds":
            return f"{value:.1f}"
    return f"{value:.0f}"


def _provenance(shown: Sequence[Shown]) -> tuple[dict[str, str], list[tuple[str, dict[str, str]]]]:
    """How the runs were made: what all of them share, and for each by its title what only it has."""
    about = [_about(result) for _, _, result in shown]
    shared = (
        {key: value for key, value in about[0].items() if all(own.get(key) == value for own in about)} if about else {}
    )
    titles = [f"{group.title} · {name}" for group, name, _ in shown]
    own = [{key: value for key, value in entries.items() if key not in shared} for entries in about]
    return shared, list(zip(titles, own))


def _about(result: RunResults) -> dict[str, str]:
    """Everything known about a run, by name."""
    run, header = result.run, result.header
    own = {"format", "segprox", "run", "classes", "palette", "environment", "started"}
    entries: dict[str, Any] = {
        "model": run.model, "dataset": run.dataset, "goal": run.goal, "attack": str(run.attack),
        **{field.name: getattr(run.settings, field.name) for field in fields(run.settings)},
        "started": header.get("started"), "segprox": header.get("segprox"), **dict(header.get("environment") or {}),
        **{key: value for key, value in header.items() if key not in own},
        "classes": len(result.classes) or None, "folder": result.folder.name, "records": _fingerprint(result),
    }  # fmt: skip
    return {key: _plain(value) for key, value in entries.items() if value not in (None, "", [], {}, ())}


def _fingerprint(result: RunResults) -> str:
    """Two reports of the same records show the same."""
    keys = "".join([*result.columns["key"].tolist(), *(error.key for error in result.errors)])
    return f"{len(result.records)}, hash of their keys {hashlib.blake2b(keys.encode(), digest_size=8).hexdigest()}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {entry}" for key, entry in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _data(
    shown: Sequence[Shown], pictures: Mapping[str, Thumbnails], listed: Sequence[Sequence[int]]
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


def _record(result: RunResults, j: int, pictures: Thumbnails | None) -> dict[str, Any]:
    unit, row = result.unit, {name: values[j].item() for name, values in result.columns.items() if name in SHOWN}
    return {
        "image": row["image"], "size": _number(row.get(f"found.{unit.norm}", row["norm"]) * unit.factor),
        "linf": _number(row["found.linf"] * 255), "l2": _number(row["found.l2"]), "apsr": _number(row["found.apsr"]),
        "success": bool(row["found.success"]), "rounded": bool(row["rounded.success"]),
        "attacked": _known(row["found.attacked"]), "protected": _known(row["found.protected"]),
        "roundedSize": _number(row.get(f"rounded.{unit.norm}", math.nan) * unit.factor),
        "cleanAccuracy": _number(row["clean_accuracy"]), "accuracy": _number(row["accuracy"]),
        "forwards": int(row["forwards"]), "backwards": int(row["backwards"]), "seconds": _number(row["seconds"]),
        "height": int(row["height"]), "width": int(row["width"]), "hash": row["image_hash"], "key": row["key"],
        "pictures": None if pictures is None else "full" if pictures.parts else "small",
        "classes": pictures.classes if pictures else [],
    }  # fmt: skip


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [_number(float(value)) for value in values]
