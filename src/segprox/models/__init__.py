"""Models by name, each as a Segmenter."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from segprox.errors import SegproxError
from segprox.models.demo import load_demo
from segprox.models.lean import Leanness, fold_batch_norms, held_bytes, make_lean
from segprox.models.options import ModelOptions
from segprox.models.segmenter import Segmenter, restored
from segprox.models.sources import SOURCES, ddcat, mmseg
from segprox.naming import Name, checked

MODELS: dict[str, Callable[[], Segmenter]] = {
    "demo-standard": partial(load_demo, "standard"),
    "demo-robust": partial(load_demo, "robust"),
}

# Of its tables; names as `load_model` takes them.
PAPER_MODELS = (*(f"mmseg:{name}" for name in mmseg.PRESETS), *(f"ddcat:{name}" for name in ddcat.PRESETS))

AUTO_BYTES = 1024  # held per pixel: a network that holds less needs no help, and is slower with it

__all__ = [
    "MODELS",
    "PAPER_MODELS",
    "SOURCES",
    "Leanness",
    "ModelOptions",
    "Segmenter",
    "fold_batch_norms",
    "held_bytes",
    "load_model",
    "make_lean",
    "restored",
]


def load_model(name: str, **options: Any) -> Segmenter:
    """The model of that name, ready to be attacked.

    Args:
        name: `demo-standard`, `demo-robust`, or `source:identifier`, with options after a `?`; see
            `segprox list models`.
        options: fields of `ModelOptions`, which come before those in the name.

    Example:
        >>> import torch, segprox
        >>> segprox.load_model("demo-robust")(torch.rand(1, 3, 64, 64)).shape
        torch.Size([1, 8, 64, 64])
        >>> segprox.load_model("ddcat:voc", checkpoint="random").class_names
        ()
    """
    parsed = Name.parse(name)
    chosen = checked(ModelOptions, "a model", **{**parsed.options, **options})
    if parsed.source in MODELS and not parsed.identifier:
        return _settled(MODELS[parsed.source](), chosen)
    if parsed.source not in SOURCES:
        examples = ", ".join([*sorted(MODELS), *(source.example for source in SOURCES.values())])
        raise SegproxError(f"there is no model {name!r}; names look like: {examples}")
    if not parsed.identifier:
        raise SegproxError(f"{parsed.source}: which one? A full name is, for example: {SOURCES[parsed.source].example}")
    made = SOURCES[parsed.source].build(parsed.identifier, chosen)
    if not isinstance(made, Segmenter):
        if parsed.source != "python":  # libraries build networks in train mode; a user's own may say something by it
            made.module.eval()
        preprocessing = {**made.preprocessing, **chosen.preprocessing(), "channels_last": chosen.channels_last}
        made = Segmenter(made.module, class_names=made.class_names, **preprocessing)
    return _settled(made, chosen)


def _settled(segmenter: Segmenter, options: ModelOptions) -> Segmenter:
    """The model on its device, in its precision."""
    try:
        segmenter = segmenter.to(options.torch_device())
    except (RuntimeError, AssertionError) as error:
        raise SegproxError(f"device {options.device!r} cannot be used: {str(error).splitlines()[0]}") from None
    if options.precision == "float64":
        segmenter = segmenter.double()
    elif options.precision != "float32":
        segmenter.autocast = getattr(torch, options.precision)
    if options.fold and not fold_batch_norms(segmenter):
        raise SegproxError("fold: this network has no batch norm that can be folded; leave the option out")
    if options.lean and not options.compile:
        _make_lean(segmenter, options)
    if options.compile:
        segmenter.model = torch.compile(segmenter.model)  # type: ignore[assignment]  # a module of the same kind
    return segmenter


def _make_lean(segmenter: Segmenter, options: ModelOptions) -> None:
    """As the option says: what is asked for by name must come true."""
    made = make_lean(
        segmenter, recompute=options.lean == "recompute", at_least=AUTO_BYTES if options.lean == "auto" else 0
    )
    if options.lean != "auto" and math.isnan(made.error):
        raise SegproxError(
            "lean: this network cannot take the small random image on which its gradients are checked; leave the "
            "option out, or call segprox.models.make_lean with a size that it takes"
        )
