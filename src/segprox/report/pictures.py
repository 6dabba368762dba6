"""The pictures of a page, as previews hold them: within the page if they are few, else in files beside it."""

import base64
import hashlib
import io
import zipfile
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from segprox.report.results import RunResults
from segprox.run.preview import FILES, Part, decode_preview

EMBEDDED = 15_000_000  # bytes of pictures within a page: browsers stay quick, and mail servers still take it
PICTURED = 2_000  # records with pictures; each takes some 10 ms and six files
FOLDER = "pictures"  # of the files beside a page
MAPS: tuple[Part, ...] = ("label", "clean", "prediction")
# What damaged previews raise: no picture is worth a report.
UNREADABLE = (
    OSError, KeyError, ValueError, SyntaxError, EOFError, RuntimeError, zipfile.BadZipFile,
    Image.DecompressionBombError,
)  # fmt: skip


class Pictures(NamedTuple):
    """The pictures of one record."""

    id: str  # run and record, by number
    sources: dict[Part, str]  # addresses, which hold the picture itself or name a file
    classes: list[int]  # that occur in them


class Collected(NamedTuple):
    """The pictures of a page."""

    pictures: dict[str, Pictures]  # by their ids
    kept: int  # records of the page that have a preview
    unreadable: int
    beside: int  # bytes in files beside the page; 0 if the pictures are within it


def count_of(number: int, what: str) -> str:
    """As people say it: 1 image, 2 images."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def listed_records(results: Sequence[RunResults], most: int) -> list[list[int]]:
    """Which records of each run a page lists: all, or if they are too many the worst of each run, in their order."""
    if sum(len(run.records) for run in results) <= most:
        return [list(range(len(run.records))) for run in results]
    return [sorted(_worst_first(run)[: most // len(results)]) for run in results]


def collect_pictures(
    results: Sequence[RunResults], listed: Sequence[Sequence[int]], folder: Path, embedded: int = EMBEDDED
) -> Collected:
    """The pictures of listed records, at most `PICTURED` of them.

    If they are more than so many embedded bytes, they are written to files in the page's folder, from where a browser
    loads them when they are looked at. What files are called depends on what they show: a page never has another's.
    """
    places = [{j: place for place, j in enumerate(some)} for some in listed]
    previews = [
        (f"{i}-{places[i][j]}", results[i].folder, str(results[i].columns["preview"][j]))
        for i, j in _fairly(results)
        if j in places[i] and results[i].columns["preview"][j]
    ]
    chosen = previews[:PICTURED]
    within = sum(_bytes(run / file) for _, run, file in chosen) * 4 / 3 <= embedded  # base64 has 4 letters for 3 bytes
    pictures: dict[str, Pictures] = {}
    beside = 0
    for name, run, file in chosen:
        try:
            content = _inside(run, file).read_bytes()
            parts = decode_preview(content)
            classes = _classes(parts)
        except UNREADABLE:
            continue
        digest = hashlib.blake2b(f"{run.name}/{file}".encode() + content, digest_size=12).hexdigest()
        sources = _embed(parts) if within else _write(parts, folder, digest)
        beside += 0 if within else sum(map(len, parts.values()))
        pictures[name] = Pictures(name, sources, classes)
    return Collected(pictures, len(previews), len(chosen) - len(pictures), beside)


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it will be counted as unreadable
        return 0


def _embed(parts: dict[Part, bytes]) -> dict[Part, str]:
    return {
        part: f"data:image/{Path(FILES[part]).suffix[1:]};base64,{base64.b64encode(content).decode()}"
        for part, content in parts.items()
    }


def _write(parts: dict[Part, bytes], folder: Path, digest: str) -> dict[Part, str]:
    """Write pictures to files of a page's folder; returns their addresses relative to the page."""
    (folder / FOLDER / digest).mkdir(parents=True, exist_ok=True)
    sources = {part: f"{FOLDER}/{digest}/{FILES[part]}" for part in parts}
    for part, content in parts.items():
        (folder / sources[part]).write_bytes(content)
    return sources


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


def _classes(parts: dict[Part, bytes]) -> list[int]:
    """The classes in the maps, with 255 for what is none."""
    pixels = [Image.open(io.BytesIO(parts[part])).histogram() for part in MAPS]
    return sorted({k for counts in pixels for k, count in enumerate(counts) if count})


def coverage(results: Sequence[RunResults], listed: Sequence[Sequence[int]], collected: Collected) -> str:
    """What the page says about where its pictures are, and about records and pictures it does not have."""
    records, whole = sum(map(len, listed)), sum(len(result.records) for result in results)
    shown, without = len(collected.pictures), records - collected.kept
    said = []
    if records < whole:
        said.append(f"Of {whole:,} records {records:,} are listed, the worst of each run; all else is of all of them.")
    if records and without == records:
        said.append("No pictures were kept of these runs; segprox evaluate keeps them with --save preview.")
    elif without:
        said.append(f"No pictures were kept of {count_of(without, 'record')}.")
    if shown + collected.unreadable < collected.kept:
        said.append(f"Of {collected.kept:,} records with pictures {shown:,} show them, the worst of each run.")
    if collected.beside:
        said.append(f"Pictures are loaded when they are looked at, from the folder {FOLDER} beside this page.")
    if collected.unreadable:
        said.append(f"{count_of(collected.unreadable, 'preview')} could not be read.")
    return " ".join(said)
