"""Lets torchvision be imported beside a torch build that its compiled operators do not fit.

A registry's torchvision wheel may be built for CUDA while torch is a CPU build. Its compiled operators then do not
load, and importing it fails at the first place that describes one of them. None of these (non-maximum suppression)
takes part in a segmentation network, so tests declare them without an implementation. Where torchvision works, this
does nothing.

    python -m tests.torchvision_ops attack --model smp:Unet/resnet34 ...
    python -m tests.torchvision_ops benchmarks/memory.py ...

runs the command line, or a script, with it.
"""

import importlib
import runpy
import sys
from pathlib import Path

import torch

DECLARED: list[torch.library.Library] = []  # a library's operators vanish with it


def make_importable() -> None:
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        DECLARED.append(library)
        importlib.import_module("torchvision")


if __name__ == "__main__":
    make_importable()
    if sys.argv[1:] and sys.argv[1].endswith(".py"):
        sys.argv = sys.argv[1:]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as python does: scripts import their neighbours
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        from segprox.cli import main

        main()
