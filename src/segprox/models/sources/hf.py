"""Hugging Face transformers: `hf:nvidia/segformer-b0-finetuned-ade-512-512`, or a folder `save_pretrained` wrote."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from segprox.errors import SegproxError, explained
from segprox.models.options import ModelOptions
from segprox.models.sources.base import IMAGENET_MEAN, IMAGENET_STD, Network, load_checkpoint
from segprox.optional import require, torchvision_explained
from segprox.text import is_folder

HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
FIXED_SIZE = ("beit", "data2vec-vision", "dpt")  # they take images of one size only
RESIZED_MASKS = {"mask2former": (384, 384)}  # to which their post-processing brings masks before it combines them


class MaskProduct(nn.Module):
    """MaskFormer, Mask2Former, OneFormer: the scores of a pixel's classes from the queries' classes and masks.

    As in these models' own post-processing: the sum over queries of a class's probability times the mask's.
    """

    def __init__(self, model: nn.Module, masks: tuple[int, int] | None, extra: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model, self.masks = model, masks
        self.extra = list(extra)
        for name, value in extra.items():
            self.register_buffer(f"extra_{name}", value, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Scores `[B, K, h, w]` of normalised images `[B, 3, H, W]`."""
        extra = {name: getattr(self, f"extra_{name}").expand(len(images), -1) for name in self.extra}
        found = self.model(pixel_values=images, **extra)
        masks = found.masks_queries_logits
        if self.masks is not None:
            masks = functional.interpolate(masks, size=self.masks, mode="bilinear", align_corners=False)
        classes = found.class_queries_logits.softmax(-1)[..., :-1]  # the last is: no object
        scores = torch.einsum("bqk,bqhw->bkhw", classes, masks.sigmoid())
        if self.masks is not None:
            scores = functional.interpolate(scores, size=images.shape[2:], mode="bilinear", align_corners=False)
        return scores


def build(identifier: str, options: ModelOptions) -> Network:
    """A model by its id on the hub or its folder."""
    transformers = require("transformers", "hf")
    what = f"hf:{identifier}"
    options.refuse("num_classes", by=f"the configuration of {what} says how many classes there are")
    there = is_folder(identifier)
    if not there and not HUB_ID.fullmatch(identifier):
        raise SegproxError(f"{what}: there is no such folder, and an id on the hub looks like NAME or OWNER/NAME")
    if not there:
        _refuse_mistyped(identifier)
    with explained(f"{what} {'' if there else 'is no folder here, and '}cannot be loaded"), torchvision_explained(what):
        config = transformers.AutoConfig.from_pretrained(identifier)
        module = _load(transformers, identifier, config, options)
    if options.checkpoint is not None:
        load_checkpoint(module, options, what)
    names = [str(name) for _, name in sorted((config.id2label or {}).items())]
    universal = _is_universal(config)
    preprocessing = _preprocessing(transformers, identifier, config)
    if universal:
        module = MaskProduct(module, RESIZED_MASKS.get(config.model_type), _task(transformers, identifier, config))
        preprocessing["output"] = "logits"  # scores that may look like probabilities
    return Network(module, preprocessing, names)


def _refuse_mistyped(identifier: str) -> None:
    """Of what lies in a folder that is here, a folder is meant; the hub would be asked for it for half a minute."""
    owner, slash, name = identifier.partition("/")
    if not slash or not is_folder(owner):
        return
    if isinstance(require("huggingface_hub", "hf").try_to_load_from_cache(identifier, "config.json"), str):
        return
    raise SegproxError(
        f"hf:{identifier}: the folder {owner} has no folder {name}; a model of this name on the hub is only looked for "
        f"where there is no folder {owner}"
    )


def _is_universal(config: Any) -> bool:
    return any("ForUniversal" in name or "ForInstance" in name for name in config.architectures or [])


def _load(transformers: Any, identifier: str, config: Any, options: ModelOptions) -> nn.Module:
    kind = "AutoModelForUniversalSegmentation" if _is_universal(config) else "AutoModelForSemanticSegmentation"
    auto = getattr(transformers, kind)
    if options.random:
        made: nn.Module = auto.from_config(config)
        return made
    loaded, report = auto.from_pretrained(identifier, weights_only=True, output_loading_info=True)
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would fill them with random numbers
        raise SegproxError(
            f"hf:{identifier} lacks {len(missing)} of the model's weights (such as {missing[0]}): "
            "it was not trained for segmentation"
        )
    module: nn.Module = loaded
    return module


def _preprocessing(transformers: Any, identifier: str, config: Any) -> dict[str, Any]:
    """Normalisation as the processor's configuration says; ImageNet's if there is none."""
    try:
        settings, _ = transformers.ImageProcessingMixin.get_image_processor_dict(identifier)
    except OSError:
        settings = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}
    # The processor computes (255 x * factor - mean) / std.
    scale = 255 * float(settings.get("rescale_factor", 1 / 255)) if settings.get("do_rescale", True) else 255.0
    normalises = settings.get("do_normalize", "image_mean" in settings)
    mean = settings.get("image_mean", IMAGENET_MEAN) if normalises else (0.0,)
    std = settings.get("image_std", IMAGENET_STD) if normalises else (1.0,)
    preprocessing: dict[str, Any] = {
        "mean": tuple(value / scale for value in mean),
        "std": tuple(value / scale for value in std),
        "bgr": bool(settings.get("do_flip_channel_order", False)),
    }
    if config.model_type in FIXED_SIZE:
        size = config.image_size
        preprocessing["resize"] = (size, size) if isinstance(size, int) else tuple(size)
    return preprocessing


def _task(transformers: Any, identifier: str, config: Any) -> dict[str, Tensor]:
    """What OneFormer wants to be told besides the image: that the task is semantic segmentation."""
    if config.model_type != "oneformer":
        return {}
    tokenizer = transformers.CLIPTokenizer.from_pretrained(identifier)
    length = config.task_seq_len
    tokens = tokenizer("the task is semantic", padding="max_length", max_length=length, truncation=True)
    return {"task_inputs": torch.tensor([tokens["input_ids"]])}
