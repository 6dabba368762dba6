"""Saved images of one model, scored on others: does what breaks one break another?

What is found is kept beside the records that it was made from, in `transfer.json`, one entry for each model. It is
derived: an image whose record has changed since is not shown, and the file may be deleted.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from segprox.data import UNTARGETED
from segprox.errors import SegproxError
from segprox.run.measurements import repeated_gap
from segprox.run.record import Record
from segprox.run.scoring import accuracy_of, score_image
from segprox.run.store import Store, write_file
from segprox.run.verify import find_sample, score_file
from segprox.run.worker import Prepared, prepare

FILE = "transfer.json"
KINDS = ("float", "png")  # of saved images, the first that there is
SAME = 1e-3  # of the logits' range: two answers of a model that is not random lie no further apart
FIELDS = ConfigDict(extra="forbid")
Reference = Literal["labels", "prediction"]


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class TransferredImage:
    """One saved image on one model; accuracy and APSR are relative to the entry's reference."""

    image: str
    key: str  # of the record that it was saved with
    clean_accuracy: float
    accuracy: float
    apsr: float
    success: bool


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Transferred:
    """The saved images of a run on one model."""

    model: str
    model_hash: str
    reference: Reference  # the dataset's labels, or the model's own prediction of the clean image
    images: tuple[TransferredImage, ...]


_ENTRIES = TypeAdapter(tuple[Transferred, ...])


def read_transferred(store: Store) -> tuple[Transferred, ...]:
    """What was found so far; nothing if the file is not there, or not one of these."""
    try:
        return _ENTRIES.validate_json((store.folder / FILE).read_bytes())
    except (OSError, ValidationError):
        return ()


def transfer_runs(
    found: Sequence[Store], models: Sequence[str], reference: Reference | None = None, device: str | None = None
) -> None:
    """Score the saved images of runs on the models that they attack and on others, and keep what is found.

    Args:
        found: the runs.
        models: names of the other models.
        reference: what accuracy and APSR are relative to. If left out, the dataset's labels for models with its
            classes, and for others their own prediction of the clean image.
        device: where the models go.
    """
    saving = [store for store in found if _saved(store)]
    if not saving:
        raise SegproxError(f"nothing is saved in {found[0].folder.parent}: evaluate with --save float or --save png")
    entries: dict[Store, list[Transferred]] = {store: [] for store in saving}
    for model in dict.fromkeys([*(store.run.model for store in saving), *models]):  # one at a time is loaded
        for store in saving:
            entries[store].append(_transfer(store, model, reference, device))
    for store, made in entries.items():
        done = {entry.model for entry in made}
        kept = [entry for entry in read_transferred(store) if entry.model not in done]
        content = _ENTRIES.dump_python((*kept, *made), mode="json")
        write_file(store.folder / FILE, json.dumps(content, indent=1).encode())


def _saved(store: Store) -> list[Record]:
    return [record for record in store.latest().values() if isinstance(record, Record) and record.saved]


def _transfer(store: Store, model: str, asked: Reference | None, device: str | None) -> Transferred:
    run, own = store.run, store.run.model == model
    options = run.settings.model_options if own else {}
    prepared = prepare(replace(run, model=model, settings=replace(run.settings, model_options=options)), device=device)
    reference = _reference(prepared, own, asked)
    images = [_score(prepared, store, record, reference) for record in _saved(store)]
    known = tuple(image for image in images if image is not None)
    return Transferred(model=model, model_hash=prepared.loaded.hash, reference=reference, images=known)


def _reference(prepared: Prepared, own: bool, asked: Reference | None) -> Reference:
    """What a model is measured by; refuses what cannot be compared."""
    model, data, run = prepared.model, prepared.data, prepared.run
    image = data[0].image[None].to(model.device)
    if run.settings.sampling is None and repeated_gap(model, image) > SAME:
        raise SegproxError(f"{run.model} answers differently twice: only runs with samples can be scored on it")
    outputs, names = model.logits(image).shape[1], [name.lower() for name in model.class_names]
    wanted = [name.lower() for name in data.classes]
    agree = own or not wanted or (outputs == len(wanted) and (not names or names == wanted))
    if not agree:
        why = f"{run.model} has {outputs} classes that are not the {len(wanted)} of {run.dataset}"
        if asked == "labels":
            raise SegproxError(f"{why}: it can be measured by its own prediction only")
        if run.goal != UNTARGETED:
            raise SegproxError(f"{why}: what {run.goal} wants means nothing to it")
    return "labels" if data.labelled and agree and asked != "prediction" else "prediction"


def _score(prepared: Prepared, store: Store, record: Record, reference: Reference) -> TransferredImage | None:
    """One image; None if it cannot be read any more."""
    sample = find_sample(prepared, record.image, reference == "labels")
    if sample is None:
        return None
    problem = prepared.problem(sample)
    kind = next(kind for kind in KINDS if kind in record.saved)
    attacked = score_file(prepared, problem, store.folder / record.saved[kind].file, kind)
    if attacked is None:
        return None
    problem.check_classes(attacked.num_classes)
    clean = score_image(prepared.model, problem, problem.images, prepared.run.settings.sampling)
    before, after = (accuracy_of(scored.counts(sample.label, prepared.data.ignore)) for scored in (clean, attacked))
    return TransferredImage(
        image=record.image, key=record.key, clean_accuracy=before, accuracy=after, apsr=attacked.score.apsr,
        success=attacked.score.success,
    )  # fmt: skip
