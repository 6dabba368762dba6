"""From names or objects to an evaluation: what is an object has a name for as long as it is evaluated."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from segprox.attacks import ATTACKS, Attack, Bisection, make_attack
from segprox.bands import Bands, bands_of
from segprox.data import DATASETS, Dataset, Sample
from segprox.data.base import colours, source_of
from segprox.errors import SegproxError
from segprox.models import MODELS, Segmenter, restored
from segprox.run.evaluate import Evaluation
from segprox.run.execution import HERE, Execution
from segprox.run.plan import AttackEntry, Grid, Settings, Spec
from segprox.run.record import weights_digest
from segprox.run.worker import forget_models, open_dataset

AnyAttack = str | Attack | AttackEntry  # by its name, as an object, or as a run describes it


class Pairs(Protocol):
    """(image, label) pairs by their numbers, such as a torch dataset has."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


AnyDataset = str | Dataset | Pairs | Iterable[Any]  # by its name, or as an object; a data loader has batches


@contextmanager
def make_evaluation(
    model: str | nn.Module,
    dataset: AnyDataset,
    attacks: AnyAttack | Sequence[AnyAttack],
    goals: str | Sequence[str],
    settings: Settings,
    *,
    out: str | Path | None,
    execution: Execution = HERE,
    retry_errors: bool = False,
    ignore: tuple[int, ...] = (255,),
    fields: dict[str, Any] | None = None,
) -> Iterator[Evaluation]:
    """An evaluation of a model on a dataset: what `segprox.evaluate` and the command line have in common.

    Without a folder `out` the records are gone afterwards, and no images are kept. The label values `ignore` are of
    pairs, `fields` of the attacks that are given by name; the rest is as in `segprox.evaluate`.
    """
    named = isinstance(model, str) and isinstance(dataset, str)
    if (execution.workers > 1 or execution.engine != "local") and not named:
        raise SegproxError("several workers need a model and a dataset that have names: see register_model")
    if isinstance(model, nn.Module):
        where = str(next(model.parameters(), torch.empty(0)).device)
        execution = dataclasses.replace(execution, devices=execution.devices or (where,), lean=False)
    chosen = [attacks] if isinstance(attacks, AnyAttack) else list(attacks)
    if fields and not any(isinstance(attack, str) for attack in chosen):
        raise SegproxError(f"{', '.join(fields)} cannot be given beside attacks that are made already: give it to them")
    entries = tuple(AttackEntry(name=a, set=fields or {}) if isinstance(a, str) else describe_entry(a) for a in chosen)
    with ExitStack() as undo:
        if out is None:
            out = undo.enter_context(TemporaryDirectory(prefix="segprox-"))
            settings = dataclasses.replace(settings, save=())
        grid = Grid(
            models=(undo.enter_context(named_model(model)),),
            datasets=(undo.enter_context(named_dataset(dataset, ignore, settings.limit)),),
            attacks=entries,
            goals=(goals,) if isinstance(goals, str) else tuple(goals),
        )
        runs = Spec(grids=(grid,), settings=settings).runs()
        yield Evaluation(runs, Path(out), execution, retry_errors)


def describe_entry(attack: Attack | AttackEntry) -> AttackEntry:
    """The name and the fields from which the same attack can be made."""
    if isinstance(attack, AttackEntry):
        return attack
    if isinstance(attack, Bisection):
        inner = describe_entry(attack.attack)
        outer = {"rounds": attack.rounds, "stop_early": attack.stop_early, "keep": attack.keep}
        own = {field: value for field, value in inner.set.items() if field != "epsilon"}
        return AttackEntry(name=f"bisect:{inner.name}", set={**own, **outer})
    found = []
    for name, entry in ATTACKS.everything().items():
        if entry.cls is type(attack) and not entry.bisected:
            usual = make_attack(name)
            fields = [field.name for field in dataclasses.fields(attack)]  # type: ignore[arg-type]  # a dataclass
            changed = {f: getattr(attack, f) for f in fields if getattr(attack, f) != getattr(usual, f)}
            found.append(AttackEntry(name=name, set=changed))
    if not found:
        raise SegproxError(f"{type(attack).__name__} has no name: register it with segprox.register_attack")
    return min(found, key=lambda entry: len(entry.set))


@contextmanager
def named_model(model: str | nn.Module) -> Iterator[str]:
    """A name for a model, by which it can be found; a network is left as it was found."""
    if isinstance(model, str):
        yield model
        return
    with nullcontext() if isinstance(model, Segmenter) else restored(model):
        segmenter = model if isinstance(model, Segmenter) else Segmenter(model)
        name = f"{type(segmenter.model).__name__}-{weights_digest(segmenter.model, segmenter.described())[:8]}"
        MODELS[name] = lambda: segmenter
        forget_models()  # one of that name may have been loaded from another object
        try:
            yield name
        finally:
            del MODELS[name]
            forget_models()


@contextmanager
def named_dataset(dataset: AnyDataset, ignore: tuple[int, ...], limit: int | None) -> Iterator[str]:
    """A name for a dataset, by which it can be found."""
    if isinstance(dataset, str):
        yield dataset
        return
    whole = all(hasattr(dataset, name) for name in ("classes", "palette", "ignore", "labelled", "names"))
    opened = dataset if whole else ItemDataset(dataset, ignore, limit)
    name = type(dataset).__name__
    if name in DATASETS:
        raise SegproxError(f"the name of the class {name} is that of a dataset of segprox: rename it")
    DATASETS[name] = source_of(lambda: opened)  # type: ignore[return-value, arg-type]  # one of the two
    open_dataset.cache_clear()
    try:
        yield name
    finally:
        del DATASETS[name]
        open_dataset.cache_clear()


class ItemDataset:
    """A dataset made of (image, label) pairs: those of a sequence are read when they are asked for.

    Others, such as the batches of a data loader, are read now, as many as are wanted.
    """

    labelled = True
    classes: tuple[str, ...] = ()
    palette = colours(256)  # for as many classes as a label may name

    def __init__(self, items: Pairs | Iterable[Any], ignore: tuple[int, ...], limit: int | None) -> None:
        indexable = hasattr(items, "__getitem__") and hasattr(items, "__len__")
        self.items: Sequence[Any] = items if indexable else list(islice(_unbatched(items), limit))  # type: ignore[assignment, arg-type]
        self.ignore = ignore
        self.bands: Bands = bands_of(items)
        self.names: Sequence[str] = [f"{i:06}" for i in range(len(self.items))]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Sample:
        image, label = _pair(self.items[index])
        if image.dim() != 3 or label.shape != image.shape[1:]:
            raise SegproxError(
                f"item {index} must be an image [C, H, W] and a label [H, W], but these have the shapes "
                f"{list(image.shape)} and {list(label.shape)}"
            )
        return Sample(self.names[index], image, label)


def _pair(item: Any) -> tuple[Tensor, Tensor]:
    values = list(item.values()) if isinstance(item, dict) else list(item)
    if len(values) < 2:
        raise SegproxError(f"items of a dataset must be (image, label), but one has {len(values)} parts")
    image, label = (torch.as_tensor(value) for value in values[-2:])  # a Sample begins with its name
    return image.float(), label.long()


def _unbatched(items: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    for item in items:
        image, label = _pair(item)
        yield from zip(image, label) if image.dim() == 4 else [(image, label)]
