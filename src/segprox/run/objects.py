"""Models, datasets and attacks that are given as objects, with names for as long as they are evaluated."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from segprox.attacks import ATTACKS, Attack, Bisection, make_attack
from segprox.data import DATASETS, Dataset, Sample
from segprox.data.base import Colour, colours, source_of
from segprox.errors import SegproxError
from segprox.models import MODELS, Segmenter, restored
from segprox.run.plan import AttackEntry
from segprox.run.record import weights_digest
from segprox.run.worker import forget_models, open_dataset


def describe_entry(attack: Attack) -> AttackEntry:
    """The name and the fields from which the same attack can be made."""
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
    with ExitStack() as undo:
        if isinstance(model, Segmenter):
            segmenter = model
        else:
            undo.enter_context(restored(model))
            segmenter = Segmenter(model)
        name = f"{type(segmenter.model).__name__}-{weights_digest(segmenter.model, segmenter.described())[:8]}"
        MODELS[name] = lambda: segmenter
        forget_models()  # one of that name may have been loaded from another object
        try:
            yield name
        finally:
            del MODELS[name]
            forget_models()


@contextmanager
def named_dataset(dataset: str | Dataset | Iterable[Any], ignore: tuple[int, ...], limit: int | None) -> Iterator[str]:
    """A name for a dataset, by which it can be found."""
    if isinstance(dataset, str):
        yield dataset
        return
    opened = dataset if _is_dataset(dataset) else ItemDataset(dataset, ignore, limit)  # type: ignore[arg-type]
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


def _is_dataset(dataset: object) -> bool:
    return all(hasattr(dataset, name) for name in ("classes", "palette", "ignore", "labelled", "names"))


class ItemDataset:
    """A dataset made of (image, label) pairs: those of a sequence are read when they are asked for.

    Others, such as the batches of a data loader, are read now, as many as are wanted.
    """

    labelled = True
    classes: tuple[str, ...] = ()

    def __init__(self, items: Iterable[Any], ignore: tuple[int, ...], limit: int | None) -> None:
        indexable = hasattr(items, "__getitem__") and hasattr(items, "__len__")
        self.items: Sequence[Any] = items if indexable else list(islice(_unbatched(items), limit))  # type: ignore[assignment]
        self.ignore = ignore
        self.names: Sequence[str] = [f"{i:06}" for i in range(len(self.items))]

    @property
    def palette(self) -> tuple[Colour, ...]:
        """Colours for as many classes as a label may name."""
        return colours(256)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Sample:
        image, label = _pair(self.items[index])
        if image.dim() != 3 or label.shape != image.shape[1:]:
            raise SegproxError(
                f"item {index} must be an image [3, H, W] and a label [H, W], but these have the shapes "
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
