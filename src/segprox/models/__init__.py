"""Models by name, each as a Segmenter."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from segprox.bands import EIGHT_BIT, Bands
from segprox.errors import SegproxError, explained
from segprox.models.demo import load_demo
from segprox.models.lean import Leanness, fold_batch_norms, held_bytes, make_lean
from segprox.models.options import PREPROCESSING, USE, ModelOptions
from segprox.models.segmenter import Segmenter, copy_wrapper, restored
from segprox.models.sources import SOURCES, ModelSource, ddcat, mmseg
from segprox.models.sources.base import Network
from segprox.naming import Name, checked
from segprox.registry import Registry, load_plugins

MODELS: Registry[Callable[[], Segmenter | nn.Module]] = Registry(
    "model", {f"demo-{kind}": partial(load_demo, kind) for kind in ("standard", "robust")}
)

# Of its tables; names as `load_model` takes them.
PAPER_MODELS = (*(f"mmseg:{name}" for name in mmseg.PAPER), *(f"ddcat:{name}" for name in ddcat.PRESETS))
LEFT_OUT_MODELS = tuple(f"mmseg:{name}" for name in mmseg.LEFT_OUT)  # by the paper, for want of memory

Make = TypeVar("Make", bound=Callable[[], Segmenter | nn.Module])
Build = TypeVar("Build", bound=Callable[[str, ModelOptions], Network | Segmenter | nn.Module])
AUTO_BYTES = 1024  # held per pixel: a network that holds less needs no help, and is slower with it

__all__ = [
    "LEFT_OUT_MODELS", "MODELS", "PAPER_MODELS", "SOURCES", "Leanness", "ModelOptions", "Network", "Segmenter",
    "build_model", "copy_wrapper", "fold_batch_norms", "held_bytes", "list_models", "load_model", "make_lean",
    "model_options",
    "register_model", "register_model_source", "restored", "settle",
]  # fmt: skip


def load_model(name: str, *, bands: Bands = EIGHT_BIT, **options: Any) -> Segmenter:
    """The model of that name, ready to be attacked.

    Args:
        name: `demo-standard`, `demo-robust`, or `source:identifier`, with options after a `?`; see
            `segprox list models`.
        bands: of the dataset, as in `load_dataset(...).bands`: if it declares a range, the network is fed values in it,
            unless the model says its own.
        options: fields of `ModelOptions`, which come before those in the name.

    Example:
        >>> import torch, segprox
        >>> segprox.load_model("demo-robust")(torch.rand(1, 3, 64, 64)).shape
        torch.Size([1, 8, 64, 64])
        >>> segprox.load_model("ddcat:voc", checkpoint="random").class_names
        ()
    """
    chosen = model_options(name, **options)
    return settle(build_model(name, chosen, bands), chosen)


def model_options(name: str, /, **options: Any) -> ModelOptions:
    """The options of a model's name, and others that come before those."""
    return checked(ModelOptions, "a model", **{**Name.parse(name).options, **options})


def build_model(name: str, chosen: ModelOptions, bands: Bands = EIGHT_BIT) -> Segmenter:
    """The model of that name as its source makes it, on the CPU, for images of these bands; `settle` makes it ready."""
    return _feed(_build(name, chosen), bands, name)


def _build(name: str, chosen: ModelOptions) -> Segmenter:
    parsed = Name.parse(name)
    if parsed.source not in MODELS and parsed.source not in SOURCES:
        load_plugins()
    if parsed.source in MODELS and not parsed.identifier:
        chosen.refuse("checkpoint", "num_classes", by=f"{parsed.source} has its own weights")
        with explained(f"{name} cannot be built"):
            return _segmenter(MODELS[parsed.source](), chosen, parsed.source)
    if parsed.source not in SOURCES:
        examples = ", ".join([*sorted(MODELS), *(source.example for source in SOURCES.values())])
        raise SegproxError(f"there is no model {name!r}; names look like: {examples}")
    if not parsed.identifier:
        raise SegproxError(f"{parsed.source}: which one? A full name is, for example: {SOURCES[parsed.source].example}")
    with explained(f"{name} cannot be built"):
        made = SOURCES[parsed.source].build(parsed.identifier, chosen)
    if isinstance(made, Network) and parsed.source != "python":
        made.module.eval()  # libraries build networks in train mode; a user's own may say something by it
    return _segmenter(made, chosen, name)


def _segmenter(made: Segmenter | Network | nn.Module, chosen: ModelOptions, name: str) -> Segmenter:
    """What a source hands over as a Segmenter, fed as the options say."""
    if isinstance(made, Segmenter):
        chosen.refuse(*PREPROCESSING, by=f"{name} is a Segmenter, which has its own preprocessing")
        return _used(made, chosen)
    network = made if isinstance(made, Network) else Network(made)
    preprocessing = {**network.preprocessing, **chosen.preprocessing(), "channels_last": chosen.channels_last}
    return Segmenter(network.module, class_names=network.class_names, **preprocessing)


def _used(model: Segmenter, chosen: ModelOptions) -> Segmenter:
    """The model, used by windows and views as the options say: they go around whatever its preprocessing is."""
    use = {name: value for name, value in chosen.preprocessing().items() if name in USE}
    if not use and not chosen.channels_last:
        return model
    model = copy_wrapper(model)  # another name may stand for the same one
    if "window" in use or "stride" in use:
        model.use_windows(use.get("window", model.window), use["stride"])
    if "tta" in use:
        model.use_views(use["tta"])
    if chosen.channels_last:
        model.use_channels_last()
    return model


def _feed(model: Segmenter, bands: Bands, name: str) -> Segmenter:
    """The model, fed values in the range that a dataset declares; what the model says itself comes first."""
    if bands.fed is None:
        return model
    if model.range is None:
        if model.scale_255:
            raise SegproxError(
                f"{name} expects values in 0..255 but the dataset declares range={list(map(list, bands.range))}: if it "
                "was trained on the dataset's values, say scale_255=false, and else range= what it was trained on"
            )
        model = copy_wrapper(model)
        model.use_range(bands.fed)
    if len(model.range or ()) > 1 and len(bands.range) not in (1, len(model.range or ())):
        raise SegproxError(
            f"{name} has a range for {len(model.range or ())} bands but the dataset's is for {len(bands.range)}"
        )
    return model


def register_model(name: str) -> Callable[[Make], Make]:
    """A decorator that gives a model a name: that of a function that returns a network or a `Segmenter`.

    Example:
        >>> import torch, segprox
        >>> @segprox.register_model("tiny")
        ... def tiny():
        ...     return torch.nn.Conv2d(3, 8, kernel_size=1)
        >>> segprox.load_model("tiny?mean=0.5,0.5,0.5")(torch.rand(1, 3, 16, 16)).shape
        torch.Size([1, 8, 16, 16])
    """

    def decorate(make: Make) -> Make:
        MODELS.register(name, make, make)
        return make

    return decorate


def register_model_source(name: str, example: str, about: str) -> Callable[[Build], Build]:
    """A decorator that gives a library of models a name, to be used as `name:identifier`.

    What is decorated is a function of an identifier and `ModelOptions` that returns a network, a `Network` with its
    preprocessing, or a `Segmenter`.

    Args:
        name: of the source.
        example: a full name, for messages.
        about: what it is, in a few words.

    Example:
        >>> import torch, segprox
        >>> @segprox.register_model_source("conv", "conv:8", "one convolution, with so many classes")
        ... def build(identifier, options):
        ...     return torch.nn.Conv2d(3, int(identifier), kernel_size=1)
        >>> segprox.load_model("conv:5")(torch.rand(1, 3, 16, 16)).shape
        torch.Size([1, 5, 16, 16])
    """

    def decorate(build: Build) -> Build:
        SOURCES.register(name, ModelSource(example, about, builder=build), build)
        return build

    return decorate


def list_models() -> list[str]:
    """The names of models: whole ones, and for each source an example.

    Example:
        >>> import segprox
        >>> segprox.list_models()[:2]
        ['demo-robust', 'demo-standard']
    """
    return [*sorted(MODELS.everything()), *(source.example for source in SOURCES.values())]


def settle(segmenter: Segmenter, options: ModelOptions) -> Segmenter:
    """The model on its device and in its precision; lean and compiled if that is asked for."""
    options.check_device()
    segmenter = segmenter.to(options.torch_device())
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
        segmenter.fused = True
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
