"""Segmentation models of torchvision: `torchvision:deeplabv3_resnet50?checkpoint=FILE`."""

from segprox.errors import explained
from segprox.models.options import ModelOptions
from segprox.models.sources.base import IMAGENET_MEAN, IMAGENET_STD, Network, load_checkpoint
from segprox.optional import require

VOC_CLASSES = 21  # of the weights that torchvision publishes
AUXILIARY = "aux_classifier."  # a head that is used in training only


def build(identifier: str, options: ModelOptions) -> Network:
    """The architecture of that name with the weights of a file."""
    models = require("torchvision.models", "torchvision")
    what = f"torchvision:{identifier}"
    known = models.list_models(module=models.segmentation)
    with explained(f"{what} cannot be built (known are: {', '.join(known)})"):
        module = models.get_model(
            identifier, weights=None, weights_backbone=None, num_classes=options.num_classes or VOC_CLASSES
        )
    load_checkpoint(module, options, what, optional=[AUXILIARY])
    return Network(module, {"mean": IMAGENET_MEAN, "std": IMAGENET_STD})
