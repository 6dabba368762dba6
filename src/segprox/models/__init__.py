"""Models by name, each as a Segmenter."""

from collections.abc import Callable
from functools import partial

from segprox.errors import SegproxError
from segprox.models.demo import load_demo
from segprox.models.segmenter import Segmenter, restored

MODELS: dict[str, Callable[[], Segmenter]] = {
    "demo-standard": partial(load_demo, "standard"),
    "demo-robust": partial(load_demo, "robust"),
}

__all__ = ["MODELS", "Segmenter", "load_model", "restored"]


def load_model(name: str) -> Segmenter:
    """The model of that name, ready to be attacked.

    Example:
        >>> import torch, segprox
        >>> segprox.load_model("demo-robust")(torch.rand(1, 3, 64, 64)).shape
        torch.Size([1, 8, 64, 64])
    """
    if name not in MODELS:
        raise SegproxError(f"there is no model {name!r}; known are: {', '.join(sorted(MODELS))}")
    return MODELS[name]()
