"""The pictures of a page: what previews hold, as far as there is room."""

import base64
import io
import zipfile
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from segprox.report.results import RunResults
from segprox.run.preview import Part, decode_preview

THUMBNAIL = 160  # pixels, the longest side of half a thumbnail
MAPS: tuple[Part, ...] = ("label", "clean", "prediction")
# What damaged previews raise: no picture is worth a report.
UNREADABLE = (OSError, KeyError, ValueError, SyntaxError, EOFError, RuntimeError, zipfile.BadZipFile)


class Thumbnails(NamedTuple):
    """The pictures of one record, in base64."""

    id: str  # run and record, by number
    thumbnail: str
    parts: dict[Part, str] | None  # none if the page is full
    classes: list[int]  # that occur in them


def count_of(number: int, what: str) -> str:
    """As people say it: 1 image, 2 images."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def listed_records(results: Sequence[RunResults], most: int) -> list[list[int]]:
    """Which records of each run a page lists: all, or if they are too many the worst of each run, in their order."""
    if sum(len(run.records) for run in results) <= most:
        return [list(range(len(run.records))) for run in results]
    return [sorted(_worst_first(run)[: most // len(results)]) for run in results]


def read_pictures(
    results: Sequence[RunResults], limit: int, listed: Sequence[Sequence[int]]
) -> tuple[dict[str, Thumbnails], int]:
    """The pictures of all listed records that have some, by run and place in its list, and how many are unreadable."""
    places = [{j: place for place, j in enumerate(some)} for some in listed]
    found: dict[str, Thumbnails] = {}
    used = unreadable = 0
    for i, j in _fairly(results):
        preview = str(results[i].columns["preview"][j])
        if not preview or j not in places[i]:
            continue
        try:
            parts = decode_preview(_inside(results[i].folder, preview).read_bytes())
            thumbnail, classes = _thumbnail(parts), _classes(parts)
        except UNREADABLE:
            unreadable += 1
            continue
        encoded = {part: _base64(content) for part, content in parts.items()}
        size = sum(map(len, encoded.values()))
        fits = used + size <= limit
        used += size if fits else 0
        name = f"{i}-{places[i][j]}"
        found[name] = Thumbnails(name, thumbnail, encoded if fits else None, classes)
    return found, unreadable


def _fairly(results: Sequence[RunResults]) -> Iterator[tuple[int, int]]:
    """The worst record of each run, then the second worst: a limit must not leave the last runs without pictures."""
    for row in zip_longest(*([(i, j) for j in _worst_first(run)] for i, run in enumerate(results))):
        yield from (entry for entry in row if entry is not None)


def _worst_first(run: RunResults) -> list[int]:
    """The smallest changes that break an image, then what came nearest to breaking one."""
    return [int(j) for j in np.lexsort((-run.columns["found.apsr"], run.norms))]


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


def coverage(
    results: Sequence[RunResults],
    pictures: dict[str, Thumbnails],
    unreadable: int,
    limit: int,
    listed: Sequence[Sequence[int]],
) -> str:
    """What the page says about records and pictures it does not have."""
    records, whole = sum(map(len, listed)), sum(len(result.records) for result in results)
    full, without = sum(p.parts is not None for p in pictures.values()), records - len(pictures) - unreadable
    said = []
    if records < whole:
        said.append(f"Of {whole:,} records {records:,} are listed, the worst of each run; all else is of all of them.")
    if records and without == records:
        said.append("No pictures were kept of these runs; segprox evaluate keeps them with --save preview.")
    elif without:
        said.append(f"No pictures were kept of {count_of(without, 'record')}.")
    if full < len(pictures):
        small = len(pictures) - full
        said.append(
            f"To keep this page below {limit / 1e6:.0f} MB of pictures, {count_of(small, 'record')} of {len(pictures)} "
            "have a thumbnail only."
        )
    if unreadable:
        said.append(f"{count_of(unreadable, 'preview')} could not be read.")
    return " ".join(said)
