"""One image's line in a store: everything that tables, curves and pages are made from, later, without a model."""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from segprox.sizes import Interval, unbroken_size, wilson
from segprox.trace import Trace

FIELDS = ConfigDict(extra="forbid")
Share = Annotated[float, Field(ge=0, le=1)]
HOW = ("seconds", "conditions")  # what may differ between two runs of the same thing


def _unknown(value: object) -> bool:
    """What only records of random models have is not written into others."""
    return value is None


def share_interval(share: float, draws: int) -> Interval:
    """The 95 % interval of a share of draws."""
    return wilson(round(share * draws), draws)


class ClassCounts(NamedTuple):
    """Pixels of each class, `[K]`: see `segprox.counts`. Of a random model those of all draws together."""

    tp: list[NonNegativeInt]
    fp: list[NonNegativeInt]
    fn: list[NonNegativeInt]


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Score:
    """What a perturbed image is worth, as it is (`float`), rounded, or in a file that was read again."""

    linf: NonNegativeFloat
    l2: NonNegativeFloat
    l1: NonNegativeFloat
    apsr: Share
    success: bool
    attacked: Share | None = None  # the share of attacked pixels that are as wanted, where others are protected
    protected: Share | None = None  # the share of protected pixels that are right
    # Of a model that answers at random: the APSR of each draw, and the share of draws that are successes.
    draws: Annotated[tuple[Share, ...] | None, Field(exclude_if=_unknown)] = None
    share: Annotated[Share | None, Field(exclude_if=_unknown)] = None

    @property
    def interval(self) -> Interval | None:
        """The 95 % interval of the share of draws that are successes."""
        return None if self.draws is None or self.share is None else share_interval(self.share, len(self.draws))


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Saved:
    """A perturbed image on disk, and what is actually in it."""

    file: str  # relative to the run's folder
    score: Score


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Conditions:
    """How a record was made. On accelerators another batch or device rounds differently, and results may differ."""

    device: str  # its kind
    batch: PositiveInt  # images attacked together
    precision: str  # of gradients; successes are verified in that of the weights
    tf32: bool  # whether float32 was shortened


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Record:
    """What one attack did to one image, or why it did nothing."""

    key: str  # of everything that determines the result
    version: str  # of the segprox that made it
    image: str  # its name
    image_hash: str
    model_hash: str | None = None  # of the network's weights and of how it is fed; unknown in older records
    height: PositiveInt
    width: PositiveInt
    labels: Literal["true", "model"]  # whether the labels are the model's own clean prediction
    counted: NonNegativeInt  # pixels
    clean_apsr: Share  # the share of counted pixels that are as the attack wants them before it
    clean_accuracy: float  # with respect to the labels
    accuracy: float  # after the attack
    norm: NonNegativeFloat  # in the attack's norm
    trace: Trace | None = None  # norms that fewer queries would have given; unknown in older records
    found: Score  # the perturbed image
    rounded: Score | None  # the same in whole numbers, as files hold it: in 8 bits mostly; none where these hold floats
    forwards: NonNegativeInt
    backwards: NonNegativeInt
    clean_counts: ClassCounts
    counts: ClassCounts
    saved: dict[str, Saved]  # by format: float, png, npy
    preview: str | None = None  # file of small pictures: see `segprox.run.preview`
    seconds: NonNegativeFloat
    conditions: Conditions | None = None  # unknown in older records
    status: Literal["done"] = "done"

    def size(self, norm: str) -> float:
        """The size of the perturbation that was found, whether the image is broken or not."""
        return float(getattr(self.found, norm, self.norm))

    def counted_size(self, norm: str) -> float:
        """What the image counts as in medians."""
        return self.size(norm) if self.found.success else unbroken_size(norm)


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class ImageError:
    """An image that could not be attacked."""

    key: str
    version: str  # of the segprox that says so
    image: str
    reason: str
    status: Literal["error"] = "error"


_LINES: TypeAdapter[Record | ImageError] = TypeAdapter(Annotated[Record | ImageError, Field(discriminator="status")])


def to_line(record: Record | ImageError) -> str:
    """A line of JSON, without the line's end."""
    return json.dumps(_LINES.dump_python(record, mode="json"), separators=(",", ":"))


def from_line(line: str | bytes) -> Record | ImageError:
    """What `to_line` wrote; a ValueError if it is anything else."""
    try:
        return _LINES.validate_json(line)  # in half the time of the other way
    except ValidationError:  # or a name of bytes that are no text, which only the other way reads
        return _LINES.validate_python(json.loads(line))


def same(first: Record | ImageError, second: Record | ImageError) -> bool:
    """Whether two records agree but for the time they took and where they were made."""
    one, other = (_LINES.dump_python(record, mode="json") for record in (first, second))
    return all(one.get(name) == other.get(name) for name in {*one, *other} - set(HOW))


def digest(*parts: Any) -> str:
    """A short hash of tensors and plain data."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, Tensor):
            state.update(f"{part.dtype}{tuple(part.shape)}".encode())
            state.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            state.update(json.dumps(part, sort_keys=True, default=str).encode())
    return state.hexdigest()


def weights_digest(model: nn.Module, described: Mapping[str, Any]) -> str:
    """A hash of a network's weights and of how it is fed."""
    state = sorted(model.state_dict().items())
    return digest(dict(described), *(part for name, value in state for part in (name, value)))
