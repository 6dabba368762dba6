"""What a source of models hands over."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from segprox.errors import SegproxError
from segprox.models.checkpoint import Checkpoint, load_weights, read_checkpoint
from segprox.models.options import ModelOptions

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CHECKPOINTS = "SEGPROX_CHECKPOINTS"  # the environment variable that names the folder of published weights


@dataclass
class Network:
    """A network as its library builds it, and how it is fed: keyword arguments of `Segmenter`."""

    module: nn.Module
    preprocessing: dict[str, Any] = field(default_factory=dict)
    class_names: Sequence[str] = ()


def load_checkpoint(module: nn.Module, options: ModelOptions, what: str, *, optional: Sequence[str] = ()) -> Checkpoint:
    """Put the weights that were asked for into a network; forgetting them is refused."""
    if options.random:
        return Checkpoint({}, {})
    path = options.checkpoint_file
    if path is None:
        raise SegproxError(
            f"{what} needs weights: add ?checkpoint=FILE to its name (or checkpoint=random to try it untrained)"
        )
    checkpoint = read_checkpoint(path)
    load_weights(module, checkpoint, path, optional=optional)
    return checkpoint


def published(file: str, url: str) -> Path:
    """Where a published file of weights is expected; a missing one is refused with its name and address."""
    folder = Path(os.environ.get(CHECKPOINTS, "checkpoints"))
    path = folder / file
    if not path.is_file():
        raise SegproxError(
            f"the weights {file} are expected in {folder.absolute()} (or the folder that {CHECKPOINTS} names); "
            f"get them from {url}"
        )
    return path
