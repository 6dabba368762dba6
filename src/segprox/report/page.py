"""Results as an HTML file that works from a disk, offline, for anyone with a browser; many pictures are beside it."""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from segprox.attacks.base import Family
from segprox.report.agreement import agreement_tables
from segprox.report.contents import FAMILIES
from segprox.report.findings import same_images, statements, verdicts
from segprox.report.groups import Group, by_norm, group_runs
from segprox.report.page_data import Shown, page_data
from segprox.report.pictures import EMBEDDED, Collected, collect_pictures, count_of, coverage, listed_records
from segprox.report.requirements import Judged, conclude
from segprox.report.results import RunResults
from segprox.report.statistics import Summary, summarise
from segprox.report.transfer import transfer_tables
from segprox.report.units import Unit

RECORD_LIMIT = 20_000  # records in a page, about 8 MB
ROUNDED = {  # heading and hint, by whether images are of 8 bits
    True: ("In 8 bits", "share still broken when rounded to 8 bits"),
    False: (
        "Rounded",
        "share still broken when rounded to whole numbers, as files hold them; - where these hold floats",
    ),
}
SCRIPTS = ("base.js", "tables.js", "curves.js", "classes.js", "viewer.js", "gallery.js", "start.js")


@dataclass(frozen=True)
class PageInfo:
    """What was written."""

    path: Path
    bytes: int
    images: int  # records with pictures
    beside: int  # bytes of pictures in files beside it; 0 if they are within it


class SortColumn(NamedTuple):
    """A column of the table of results, by which it can be sorted."""

    key: str
    title: str
    hint: str
    best: int = 0  # 1: the largest value of a group is bold, -1: the smallest


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
        "rounded": SortColumn("rounded_rate", *ROUNDED[unit.eight_bit], 1),
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
    embedded: int = EMBEDDED,
    judged: Sequence[Judged] = (),
    critical: Sequence[str] = (),
) -> PageInfo:
    """Write the page.

    Args:
        results: runs, as `load_runs` gives them.
        path: the file to write; it is there as a whole or not at all.
        embedded: most bytes of pictures within the page; more are written to a folder `pictures` beside it.
        judged: requirements, with which the page begins.
        critical: classes that come first and are marked.

    Returns:
        Where the page is, its size, and how many records have pictures.
    """
    groups = group_runs(results)
    results = [run for group in groups for run in group.runs.values()]  # attacks to compare side by side
    listed = listed_records(results, RECORD_LIMIT)
    path.parent.mkdir(parents=True, exist_ok=True)
    collected = collect_pictures(results, listed, path.parent, embedded)
    content = _render(groups, collected, listed, judged, critical).encode()
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return PageInfo(path, len(content), len(collected.pictures), collected.beside)


def _render(
    groups: Sequence[Group],
    collected: Collected,
    listed: Sequence[Sequence[int]],
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
        policy=_policy(style, script, collected.beside > 0),
        style=Markup(style),  # our own files, not data
        script=Markup(script),
        title=_title(groups),
        subtitle=_subtitle(results),
        statements=statements(groups),
        verdicts=verdicts(groups),
        judged=[(where, list(some)) for where, some in groupby(judged, key=lambda entry: entry.where)],
        conclusion=conclude(judged),
        tables=[_table(unit, some, family) for unit, some in by_norm(groups).items() for family in FAMILIES],
        eight_bit=all(group.eight_bit for group in groups),
        agreement=agreement_tables(groups),
        transfer=transfer_tables(results),
        errors=[(result, name, error) for _, name, result in shown for error in result.errors],
        provenance=_provenance(shown),
        pictures=list(collected.pictures.values()),
        coverage=coverage(results, listed, collected),
        data=page_data(shown, collected.pictures, listed) | {"critical": list(critical)},
    )


def _policy(style: str, script: str, beside: bool) -> str:
    """What a browser may run and load: hashes of our own code, so that nothing that slips in from data can run."""
    pictures = "data: 'self' file:" if beside else "data:"  # beside the page: on the same server, or on the disk
    return (
        f"default-src 'none'; img-src {pictures}; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
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
