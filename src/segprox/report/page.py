"""Results as one HTML file that works from a disk, offline, for anyone with a browser."""

import base64
import hashlib
import io
import json
import math
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from segprox.data.base import VOID_COLOUR, colours
from segprox.report.results import RunResults
from segprox.report.summary import (
    RunSummary,
    Setting,
    attack_names,
    by_setting,
    damage,
    same_images,
    size_text,
    statements,
    summarize,
    verdicts,
)
from segprox.run.preview import Part, decode_preview
from segprox.run.record import Record

PICTURE_LIMIT = 40_000_000  # bytes of full pictures in a page: browsers stay quick, and mail servers may still take it
THUMBNAIL = 160  # pixels, the longest side of half a thumbnail
SCRIPTS = ("base.js", "tables.js", "curves.js", "classes.js", "viewer.js", "gallery.js", "start.js")
MAPS: tuple[Part, ...] = ("label", "clean", "prediction")
# What damaged previews raise: no picture is worth a report.
UNREADABLE = (OSError, KeyError, ValueError, SyntaxError, EOFError, RuntimeError, zipfile.BadZipFile)


@dataclass(frozen=True)
class PageInfo:
    """What was written."""

    path: Path
    bytes: int
    images: int  # records whose full pictures are in the page


class Pictures(NamedTuple):
    """The pictures of one record, in base64."""

    id: str  # run and record, by number
    thumbnail: str
    parts: dict[Part, str] | None  # none if the page is full
    classes: list[int]  # that occur in them


class Column(NamedTuple):
    """Of the table of results."""

    key: str
    title: str
    hint: str
    best: int = 0  # 1: the largest value of a group is bold, -1: the smallest


COLUMNS = (
    Column("images", "Images", "attacked"),
    Column("failed", "Failed", "images that could not be attacked"),
    Column("median", "Median", "linf x 255; an image that was not broken counts as 255", -1),
    Column("mean", "Mean", "linf x 255; an image that was not broken counts as 255", -1),
    Column("broken_share", "Broken", "share of images the attack succeeded on", 1),
    Column("rounded_share", "In 8 bits", "share still broken when the image is rounded to 8 bits", 1),
    Column("apsr", "APSR", "attack pixel success rate: pixels that are as the attack wants them, mean over images", 1),
    Column("miou", "mIoU", "mean intersection over union before and after, pooled over images", -1),
    Column("accuracy", "Accuracy", "share of pixels that are right before and after", -1),
    Column("forwards", "Queries", "forward and backward passes per image"),
    Column("seconds", "Seconds", "per image"),
)


def write_page(results: Sequence[RunResults], path: Path, limit: int = PICTURE_LIMIT) -> PageInfo:
    """Write the page.

    Args:
        results: runs, as `load_results` gives them.
        path: the file to write; it is there as a whole or not at all.
        limit: most bytes of full pictures to embed. The first images of each run have them, all others a thumbnail.

    Returns:
        Where the page is, its size, and how many records have full pictures in it.
    """
    results = [run for runs in by_setting(results).values() for run in runs]  # attacks to compare side by side
    pictures, unreadable = _pictures(results, limit)
    content = _render(results, pictures, unreadable, limit).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return PageInfo(path, len(content), sum(picture.parts is not None for picture in pictures.values()))


def _render(results: Sequence[RunResults], pictures: dict[str, Pictures], unreadable: int, limit: int) -> str:
    environment = Environment(
        loader=PackageLoader("segprox.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["json"] = _json
    sources = environment.loader
    assert sources is not None
    style = sources.get_source(environment, "page.css")[0]
    script = "\n".join(sources.get_source(environment, name)[0] for name in SCRIPTS)
    names = attack_names(results)
    return environment.get_template("page.html").render(
        # Hashes instead of 'unsafe-inline': nothing that slips in from data can run.
        policy=f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'",
        style=Markup(style),  # our own files, not data
        script=Markup(script),
        title=_title(results),
        subtitle=_subtitle(results),
        statements=statements(results),
        verdicts=verdicts(results),
        size_text=size_text,
        columns=COLUMNS,
        varying=[i for i in range(3) if len({setting[i] for setting in by_setting(results)}) > 1],
        constant=_constant(results),
        rows=_rows(results, names),
        failures=[(result, name, failure) for result, name in zip(results, names) for failure in result.failures],
        results=list(zip(results, names)),
        about=_about,
        pictures=list(pictures.values()),
        coverage=_coverage(results, pictures, unreadable, limit),
        data=_data(results, names, pictures),
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
    parts = [_count(len(attacks), "attack"), _count(len(images), "image"), _count(len(results), "run")]
    parts.append(_count(sum(len(result.records) for result in results), "record"))
    if days:
        parts.append(days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")
    return " · ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _constant(results: Sequence[RunResults]) -> list[tuple[str, str]]:
    """What all runs share: it needs no column."""
    settings = list(by_setting(results))
    names = ("Model", "Dataset", "Goal")
    return [(name, settings[0][i]) for i, name in enumerate(names) if settings and len({s[i] for s in settings}) == 1]


def _rows(results: Sequence[RunResults], names: Sequence[str]) -> list[dict[str, Any]]:
    summaries = [summarize(result) for result in results]
    settings = [Setting(result.run.model, result.run.dataset, result.run.goal) for result in results]
    comparable = {setting for setting, runs in by_setting(results).items() if same_images(runs)}
    rows = []
    for setting, summary, name in zip(settings, summaries, names):
        rivals = [other for s, other in zip(settings, summaries) if s == setting and other.images]
        rivals = rivals if setting in comparable else []
        rows.append({"setting": setting, "attack": name, "cells": [_cell(c, summary, rivals) for c in COLUMNS]})
    return rows


def _cell(column: Column, summary: RunSummary, rivals: Sequence[RunSummary]) -> dict[str, Any]:
    value = float(getattr(summary, column.key))
    values = [column.best * float(getattr(rival, column.key)) for rival in rivals]
    best = bool(column.best) and len(values) > 1 and column.best * value == max(values) and min(values) < max(values)
    return {"value": None if math.isnan(value) else value, "text": _text(column.key, summary), "best": best}


def _text(key: str, summary: RunSummary) -> str:
    value = float(getattr(summary, key))
    if math.isnan(value):
        return "-"
    match key:
        case "median" | "mean":
            return size_text(value).removesuffix("/255")
        case "broken_share" | "rounded_share":
            return f"{value:.0%}"
        case "apsr":
            return f"{value:.1%}"
        case "miou" | "accuracy":
            return f"{getattr(summary, f'clean_{key}') * 100:.1f} → {value * 100:.1f}"
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
    keys = "".join([*(record.key for record in result.records), *(failure.key for failure in result.failures)])
    return f"{len(result.records)}, hash of their keys {hashlib.blake2b(keys.encode(), digest_size=8).hexdigest()}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {entry}" for key, entry in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _data(results: Sequence[RunResults], names: Sequence[str], pictures: dict[str, Pictures]) -> dict[str, Any]:
    """What scripts draw from."""
    attacks = list(dict.fromkeys(names))
    models = list(dict.fromkeys(result.run.model for result in results))
    ids = _ids(results)
    return {
        "void": list(VOID_COLOUR),
        "runs": [
            {
                "id": ids[i],
                "model": result.run.model,
                "dataset": result.run.dataset,
                "goal": result.run.goal,
                "attack": names[i],
                "colours": {"attack": attacks.index(names[i]), "model": models.index(result.run.model)},
                "classes": list(result.classes),
                "palette": _palette(result),
                "damage": _damage(result),
                "iou": _class_iou(result),
                "records": [_record(record, pictures.get(f"{i}-{j}")) for j, record in enumerate(result.records)],
            }
            for i, result in enumerate(results)
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


def _damage(result: RunResults) -> dict[str, list[float | None]]:
    if not result.records:
        return {"epsilon": [], "accuracy": [], "miou": []}
    found = damage(result)
    return {
        "epsilon": _numbers(found.epsilon * 255),
        "accuracy": _numbers(found.accuracy),
        "miou": _numbers(found.miou),
    }


def _class_iou(result: RunResults) -> list[list[float | None]]:
    """Of each class, before and after, pooled over images."""
    if not result.records:
        return [[], []]
    pooled = [result.counts(clean=clean) for clean in (True, False)]
    return [_numbers(type(counts)(*(c.sum(0) for c in counts)).iou()) for counts in pooled]


def _record(record: Record, pictures: Pictures | None) -> dict[str, Any]:
    found, rounded = record.found, record.rounded
    return {
        "image": record.image, "size": _number(found.linf * 255), "l2": _number(found.l2), "apsr": _number(found.apsr),
        "success": found.success, "roundedSize": _number(rounded.linf * 255), "rounded": rounded.success,
        "cleanAccuracy": _number(record.clean_accuracy), "accuracy": _number(record.accuracy),
        "forwards": record.forwards, "backwards": record.backwards, "seconds": _number(record.seconds),
        "height": record.height, "width": record.width, "hash": record.image_hash, "key": record.key,
        "pictures": None if pictures is None else "full" if pictures.parts else "small",
        "classes": pictures.classes if pictures else [],
    }  # fmt: skip


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _numbers(values: Sequence[float] | np.ndarray[Any, Any]) -> list[float | None]:
    return [_number(float(value)) for value in values]


def _pictures(results: Sequence[RunResults], limit: int) -> tuple[dict[str, Pictures], int]:
    """The pictures of all records that have some, by run and record, and how many could not be read."""
    found: dict[str, Pictures] = {}
    used = unreadable = 0
    for i, j in _fairly(results):
        record = results[i].records[j]
        if not record.preview:
            continue
        try:
            parts = decode_preview(_inside(results[i].folder, record.preview).read_bytes())
            thumbnail, classes = _thumbnail(parts), _classes(parts)
        except UNREADABLE:
            unreadable += 1
            continue
        encoded = {part: _base64(content) for part, content in parts.items()}
        size = sum(map(len, encoded.values()))
        fits = used + size <= limit
        used += size if fits else 0
        found[f"{i}-{j}"] = Pictures(f"{i}-{j}", thumbnail, encoded if fits else None, classes)
    return found, unreadable


def _fairly(results: Sequence[RunResults]) -> Iterator[tuple[int, int]]:
    """The first record of each run, then the second of each: a limit must not leave the last runs without."""
    for row in zip_longest(*([(i, j) for j in range(len(run.records))] for i, run in enumerate(results))):
        yield from (entry for entry in row if entry is not None)


def _inside(folder: Path, name: str) -> Path:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{name} is not in {folder}")
    return path


def _thumbnail(parts: dict[Part, bytes]) -> str:
    """The perturbed image, which looks like any other, above what the model sees in it."""
    image, seen = (Image.open(io.BytesIO(parts[part])).convert("RGB") for part in ("adversarial", "prediction"))
    share = min(1.0, THUMBNAIL / max(image.size))
    width, height = (max(1, round(side * share)) for side in image.size)
    both = Image.new("RGB", (width, 2 * height))
    both.paste(image.resize((width, height), Image.Resampling.BILINEAR), (0, 0))
    both.paste(seen.resize((width, height), Image.Resampling.NEAREST), (0, height))
    stream = io.BytesIO()
    both.save(stream, format="webp", quality=70)
    return _base64(stream.getvalue())


def _classes(parts: dict[Part, bytes]) -> list[int]:
    """The classes in the maps, with 255 for what is none."""
    pixels = [Image.open(io.BytesIO(parts[part])).histogram() for part in MAPS]
    return sorted({k for counts in pixels for k, count in enumerate(counts) if count})


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _coverage(results: Sequence[RunResults], pictures: dict[str, Pictures], unreadable: int, limit: int) -> str:
    """What the page says about pictures it does not have."""
    records = sum(len(result.records) for result in results)
    full, without = sum(p.parts is not None for p in pictures.values()), records - len(pictures) - unreadable
    said = []
    if records and without == records:
        said.append("No pictures were kept of these runs; segprox evaluate keeps them with --save preview.")
    elif without:
        said.append(f"No pictures were kept of {_count(without, 'record')}.")
    if full < len(pictures):
        small = len(pictures) - full
        said.append(
            f"To keep this page below {limit / 1e6:.0f} MB of pictures, {_count(small, 'record')} of {len(pictures)} "
            "have a thumbnail only."
        )
    if unreadable:
        said.append(f"{_count(unreadable, 'preview')} could not be read.")
    return " ".join(said)
