"""Saved images, scored again: what is in the files, not what was meant to be."""

from collections import defaultdict
from collections.abc import Iterator
from math import isclose
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError

from segprox.data import Sample
from segprox.data.files import UNREADABLE
from segprox.encoding import decode
from segprox.problem import Problem
from segprox.run.record import Record, Score
from segprox.run.scoring import Scored, label_sample, score_image
from segprox.run.store import Store
from segprox.run.worker import Prepared, prepare
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
        sample = find_sample(prepared, record.image, prepared.data.labelled)
        problem = None if sample is None else prepared.problem(sample)
        for kind, saved in record.saved.items():
            again = score_file(prepared, problem, store.folder / saved.file, kind)
            found[kind].append((None if again is None else again.score, saved.score))
    for kind, pairs in found.items():
        scores = [score for score, _ in pairs if score is not None]
        norms = [score.linf if score.success else 1.0 for score in scores]  # as tables count them
        broken = sum(score.success for score in scores)
        agree = sum(score is not None and _agree(score, recorded) for score, recorded in pairs)
        yield Verified(kind, len(pairs), median_size(norms) if norms else None, broken, agree)


def find_sample(prepared: Prepared, image: str, labelled: bool) -> Sample | None:
    """The image of that name with labels, or the model's own; None if the dataset does not have it any more."""
    try:
        sample = prepared.data[list(prepared.data.names).index(image)]
    except ValueError:  # not there, or not readable
        return None
    settings = prepared.run.settings
    return label_sample(prepared.model, sample, labelled, settings.sampling, settings.seed)[0]


def score_file(prepared: Prepared, problem: Problem | None, path: Path, kind: str) -> Scored | None:
    """What is in a file; None if it is no image of this problem."""
    try:
        image = decode(kind, path.read_bytes(), prepared.bands)[None]
    except (*UNREADABLE, RuntimeError, SafetensorError):  # as one with other bands raises
        return None
    if problem is None or image.shape != problem.images.shape:
        return None
    return score_image(prepared.model, problem, image.to(problem.images), prepared.run.settings.sampling)


def _agree(first: Score, second: Score) -> bool:
    pairs = ((getattr(first, name), getattr(second, name)) for name in ("linf", "l2", "l1", "apsr"))
    close = all(isclose(a, b, rel_tol=RELATIVE, abs_tol=TOLERANCE) for a, b in pairs)
    return close and first.success == second.success
