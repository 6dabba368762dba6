"""MMSegmentation: `mmseg:CONFIG?checkpoint=FILE`, or a model by a short name: `mmseg:deeplabv3plus-r50-voc`."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from segprox.errors import SegproxError, explained
from segprox.models.options import ModelOptions
from segprox.models.sources.base import Network, load_checkpoint, published
from segprox.optional import require

URL = "https://download.openmmlab.com/mmsegmentation/v0.5"
TRAINING_ONLY = ["auxiliary_head.", "decode_head.loss_decode.", "data_preprocessor."]


class Preset(NamedTuple):
    """A model with a short name: its configuration in the library, and its published file of weights."""

    config: str
    checkpoint: str

    @property
    def url(self) -> str:
        """Where the weights are published: below a folder of their kind and one of their own."""
        folder = "hrnet" if "_hr" in self.checkpoint else self.checkpoint.partition("_")[0]
        return f"{URL}/{folder}/{self.checkpoint.rsplit('_', 2)[0]}/{self.checkpoint}"


PAPER = {  # its models, with the weights that it used
    "deeplabv3plus-r50-voc": Preset(
        "deeplabv3plus_r50-d8_4xb4-40k_voc12aug-512x512",
        "deeplabv3plus_r50-d8_512x512_40k_voc12aug_20200613_161759-e1b43aa9.pth",
    ),
    "deeplabv3plus-r101-voc": Preset(
        "deeplabv3plus_r101-d8_4xb4-40k_voc12aug-512x512",
        "deeplabv3plus_r101-d8_512x512_40k_voc12aug_20200613_205333-faf03387.pth",
    ),
    "fcn-hrnetv2-w48-voc": Preset(
        "fcn_hr48_4xb4-40k_voc12aug-512x512",
        "fcn_hr48_512x512_40k_voc12aug_20200613_222111-1b0f18bc.pth",
    ),
    "fcn-hrnetv2-w48-cityscapes": Preset(
        "fcn_hr48_4xb2-160k_cityscapes-512x1024",
        "fcn_hr48_512x1024_160k_cityscapes_20200602_190946-59b7973e.pth",
    ),
    "deeplabv3plus-r50b-cityscapes": Preset(
        "deeplabv3plus_r50b-d8_4xb2-80k_cityscapes-512x1024",
        "deeplabv3plus_r50b-d8_512x1024_80k_cityscapes_20201225_213645-a97e4e43.pth",
    ),
    "segformer-mit-b0-cityscapes": Preset(
        "segformer_mit-b0_8xb1-160k_cityscapes-1024x1024",
        "segformer_mit-b0_8x1_1024x1024_160k_cityscapes_20211208_101857-e7f88502.pth",
    ),
    "segformer-mit-b3-cityscapes": Preset(
        "segformer_mit-b3_8xb1-160k_cityscapes-1024x1024",
        "segformer_mit-b3_8x1_1024x1024_160k_cityscapes_20211206_224823-a8f8a177.pth",
    ),
}
LEFT_OUT = {  # by the paper, because a gradient of theirs took more than 40 GB at 2048 x 1024
    "deeplabv3plus-r101-cityscapes": Preset(
        "deeplabv3plus_r101-d8_4xb2-80k_cityscapes-512x1024",
        "deeplabv3plus_r101-d8_512x1024_80k_cityscapes_20200606_114143-068fcfe9.pth",
    ),
    "segformer-mit-b4-cityscapes": Preset(
        "segformer_mit-b4_8xb1-160k_cityscapes-1024x1024",
        "segformer_mit-b4_8x1_1024x1024_160k_cityscapes_20211207_080709-07f6c333.pth",
    ),
    "segformer-mit-b5-cityscapes": Preset(
        "segformer_mit-b5_8xb1-160k_cityscapes-1024x1024",
        "segformer_mit-b5_8x1_1024x1024_160k_cityscapes_20211206_072934-87a052ec.pth",
    ),
}
PRESETS = PAPER | LEFT_OUT


class WholeImage(nn.Module):
    """A segmentor of the library without its data preprocessor, applied to all it is fed: windows are `Segmenter`'s."""

    def __init__(self, segmentor: nn.Module) -> None:
        super().__init__()
        self.segmentor = segmentor

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[B, K, H, W]` of normalised images `[B, 3, H, W]`."""
        size = tuple(images.shape[2:])
        encode_decode: Any = self.segmentor.encode_decode
        logits: Tensor = encode_decode(images, [{"img_shape": size} for _ in images])
        return logits


def build(identifier: str, options: ModelOptions) -> Network:
    """A model by its short name, or any other by its configuration's name or file."""
    options.refuse("num_classes", by=f"the configuration of mmseg:{identifier} says how many classes there are")
    preset = PRESETS.get(identifier)
    if preset is not None and options.checkpoint is None:
        options = dataclasses.replace(options, checkpoint=str(published(preset.checkpoint, preset.url)))
    require("mmcv", "mmseg")
    require("mmseg.models", "mmseg")
    config = _read_config(preset.config if preset else identifier)
    what = f"mmseg:{identifier}"
    with explained(f"{what} cannot be built"):
        segmentor = require("mmseg.registry", "mmseg").MODELS.build(_for_inference(config.model))
    checkpoint = load_checkpoint(segmentor, options, what, optional=TRAINING_ONLY)
    # The paper uses its models on whole images, as its times and memory show, also those that are meant to slide.
    windows = {} if preset else _windows(config.model)
    return Network(WholeImage(segmentor), _preprocessing(config.model) | windows, _class_names(checkpoint.meta))


def _read_config(name: str) -> Any:
    path = Path(name) if name.endswith(".py") else _find_config(name)
    if not path.is_file():
        raise SegproxError(f"there is no configuration {path}")
    config = require("mmengine.config", "mmseg")
    with explained(f"{path} cannot be read"):
        content = config.Config.fromfile(path)
        require("mmengine.registry", "mmseg").init_default_scope("mmseg")
    if "model" not in content:
        raise SegproxError(f"{path} is not the configuration of a model: it has no entry `model`")
    return content


def _find_config(name: str) -> Path:
    """A configuration that comes with the installed library."""
    file = require("mmseg", "mmseg").__file__
    assert file is not None
    root = Path(file).parent / ".mim" / "configs"
    found = sorted(root.glob(f"*/{name}.py"))
    if not found:
        alike = get_close_matches(name, [path.stem for path in sorted(root.glob("*/*.py"))], n=3, cutoff=0.3)
        hint = f"; it has, for example: {', '.join(alike)}" if alike else ""
        raise SegproxError(
            f"mmsegmentation has no configuration {name!r}, and it is no short name ({', '.join(PRESETS)}){hint}"
        )
    return found[0]


def _for_inference(model: Any) -> Any:
    """The configuration without downloads of pretrained backbones, and with batch norm that needs one device only."""
    for part in _dicts(model):
        part.pop("pretrained", None)
        if isinstance(part.get("init_cfg"), Mapping) and part["init_cfg"].get("type") == "Pretrained":
            part["init_cfg"] = None
        if part.get("type") == "SyncBN":
            part["type"] = "BN"
    return model


def _dicts(config: Any) -> Iterator[Any]:
    if isinstance(config, Mapping):
        yield config
    for value in list(config.values()) if isinstance(config, Mapping) else config:
        if isinstance(value, (Mapping, list, tuple)):
            yield from _dicts(value)


def _preprocessing(model: Any) -> dict[str, Any]:
    """What the library does at test time.

    Its data preprocessor gets blue first, flips it if asked to, and normalises 0..255; windows come after it.
    """
    settings = model.get("data_preprocessor") or {}
    flips = bool(settings.get("bgr_to_rgb") or settings.get("rgb_to_bgr"))
    preprocessing: dict[str, Any] = {"scale_255": True, "bgr": not flips}
    if settings.get("mean") is not None:
        preprocessing |= {"mean": tuple(settings["mean"]), "std": tuple(settings["std"])}
    divisor = (settings.get("test_cfg") or {}).get("size_divisor")
    preprocessing |= {"multiple": int(divisor)} if divisor else {}
    return preprocessing


def _windows(model: Any) -> dict[str, Any]:
    test = model.get("test_cfg") or {}
    return {"window": tuple(test["crop_size"]), "stride": tuple(test["stride"])} if test.get("mode") == "slide" else {}


def _class_names(meta: Mapping[str, Any]) -> Sequence[str]:
    """Names that the library's runner saved, as it did before and after its version 1."""
    about = meta.get("dataset_meta") or meta
    names = about.get("classes") or about.get("CLASSES") or ()
    return tuple(str(name) for name in names)
