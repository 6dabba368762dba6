"""Saved images, scored again: what is in the files, not what was meant to be."""

from collections import defaultdict
from collections.abc import Iterator
from math import isclose
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError

from segprox.data.files import UNREADABLE
from segprox.encoding import DECODERS
from segprox.problem import Problem
from segprox.run.record import Record, Score
from segprox.run.store import Store
from segprox.run.worker import Prepared, label_sample, prepare, score_image
from segprox.sizes import median_size

TOLERANCE, RELATIVE = 1e-6, 1e-5  # another machine may round otherwise, and add up in another order


class Verified(NamedTuple):
    """The saved images of a run in one format."""

    kind: str
    images: int
    median_linf: float | None  # None if no file can be read
    broken: int
    agree: int  # with their records


def verify_run(store: Store, device: str | None = None) -> Iterator[Verified]:
    """Score the saved images of a run again."""
    records = [record for record in store.latest().values() if isinstance(record, Record) and record.saved]
    if not records:
        return
    prepared = prepare(store.run, device=device)
    found: dict[str, list[tuple[Score | None, Score]]] = defaultdict(list)
    for record in records:
        problem = _problem(prepared, record)
        for kind, saved in record.saved.items():
            found[kind].append((_score_file(prepared, problem, store.folder / saved.file, kind), saved.score))
    for kind, pairs in found.items():
        scores = [score for score, _ in pairs if score is not None]
        norms = [score.linf if score.success else 1.0 for score in scores]  # as tables count them
        broken = sum(score.success for score in scores)
        agree = sum(score is not None and _agree(score, recorded) for score, recorded in pairs)
        yield Verified(kind, len(pairs), median_size(norms) if norms else None, broken, agree)


def _problem(prepared: Prepared, record: Record) -> Problem | None:
    """What was to be achieved; None if the dataset does not have the image any more."""
    try:
        sample = prepared.data[list(prepared.data.names).index(record.image)]
    except ValueError:  # not there, or not readable
        return None
    return prepared.problem(label_sample(prepared.model, sample, prepared.data.labelled)[0])


def _score_file(prepared: Prepared, problem: Problem | None, path: Path, kind: str) -> Score | None:
    """What is in a file; None if it is no image of this problem."""
    try:
        image = DECODERS[kind](path.read_bytes())
    except (*UNREADABLE, SafetensorError):
        return None
    if problem is None or image.shape != problem.images.shape:
        return None
    return score_image(prepared.model, problem, image.to(problem.images))[0]


def _agree(first: Score, second: Score) -> bool:
    pairs = ((getattr(first, name), getattr(second, name)) for name in ("linf", "l2", "l1", "apsr"))
    close = all(isclose(a, b, rel_tol=RELATIVE, abs_tol=TOLERANCE) for a, b in pairs)
    return close and first.success == second.success
