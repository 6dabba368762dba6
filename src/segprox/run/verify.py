"""Saved images, scored again: what is in the files, not what was meant to be."""

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from segprox.data import with_own_labels
from segprox.problem import predictions
from segprox.run.record import Record, Score
from segprox.run.store import Store
from segprox.run.worker import DECODERS, Prepared, prepare, score_image

TOLERANCE = 1e-6  # another machine may round otherwise


class Verified(NamedTuple):
    """The saved images of a run in one format."""

    kind: str
    images: int
    median_linf: float
    broken: int
    agree: int  # with their records


def verify_run(store: Store, device: str | None = None) -> Iterator[Verified]:
    """Score the saved images of a run again."""
    records = [record for record in store.latest().values() if isinstance(record, Record) and record.saved]
    if not records:
        return
    prepared = prepare(store.run, device)
    found: dict[str, list[tuple[Score, bool]]] = defaultdict(list)
    for record in records:
        for kind, saved in record.saved.items():
            score = _score_file(prepared, record, (store.folder / saved.file).read_bytes(), kind)
            found[kind].append((score, _agree(score, saved.score)))
    for kind, scores in found.items():
        norms = [score.linf for score, _ in scores]
        broken, agree = sum(score.success for score, _ in scores), sum(same for _, same in scores)
        yield Verified(kind, len(scores), median(norms), broken, agree)


def _score_file(prepared: Prepared, record: Record, content: bytes, kind: str) -> Score:
    sample = prepared.data[list(prepared.data.names).index(record.image)]
    if not prepared.data.labelled:
        clean = prepared.model.full_precision(sample.image[None].to(prepared.model.device))
        sample = with_own_labels(sample, predictions(clean)[0].cpu())
    problem = prepared.problem(sample)
    return score_image(prepared.model, problem, DECODERS[kind](content).to(problem.images))[0]


def _agree(first: Score, second: Score) -> bool:
    close = all(abs(getattr(first, name) - getattr(second, name)) <= TOLERANCE for name in ("linf", "apsr"))
    return close and first.success == second.success
