"""What an attack's gradient takes: bytes held for the backward, process peaks, time, and whether it is exact.

    python benchmarks/memory.py [--only TEXT] [--peaks | --others]

The paper's models with random weights: held for the backward at three sizes (the larger ones on the meta device, where
nothing is computed), plain, lean, and lean with blocks computed again; the error of the lean gradient; the time of a
forward and backward over plain, for a lean model with folded batch norms too. With --peaks instead the peaks of whole
processes, each over what it has with the weights loaded. With --others instead models of other libraries: the
self-check, and what is held at 512 x 256.
"""

import argparse
import ctypes
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import segprox
from segprox import Segmenter, load_model
from segprox.losses import dlr_plus
from segprox.models import Leanness, fold_batch_norms, held_bytes, make_lean
from segprox.models.lean.heap import LARGE, return_what_is_freed

MIB = 2**20
SIZES = [(256, 512), (512, 1024), (1024, 2048)]
R50, R101 = "mmseg:deeplabv3plus-r50-voc", "mmseg:deeplabv3plus-r101-voc"
W48 = "mmseg:fcn-hrnetv2-w48-cityscapes"
CHOSEN = (R50, R101, W48, "mmseg:segformer-mit-b0-cityscapes", "mmseg:segformer-mit-b3-cityscapes")
GLIBC_OWN = 1 << 25  # up to which glibc learns to keep freed memory
PEAKS = [
    ("network", R50, (256, 512), ("forward", "plain", "lean")),
    ("network", W48, (512, 1024), ("forward", "plain", "lean")),
    ("network", W48, (1024, 2048), ("forward", "lean")),
    ("network", R101, (1024, 2048), ("forward", "lean")),
    ("attack", R50, (512, 1024), ("plain", "lean")),
    ("loss", "19 classes", (1024, 2048), ("lean",)),
]
TIMM_ENCODERS = ("resnet50", "efficientnet_b0", "mobilenetv3_large_100")


def loaded(name: str, kind: str = "plain") -> Segmenter:
    torch.manual_seed(0)
    model = load_model(name, **({"checkpoint": "random", "window": "whole"} if name.startswith("mmseg:") else {}))
    shake(model)
    if kind != "plain":
        make_lean(model, recompute=kind == "recompute")
    return model


def shake(model: nn.Module) -> None:
    """Give batch norms statistics and weights: untrained ones are nearly the identity, and would hide an error."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.normal_(0, 0.1)


def three(name: str) -> tuple[dict[str, Segmenter], Leanness]:
    """A model plain, lean, and with blocks computed again: the lean one itself where that pays for none."""
    models = {"plain": loaded(name), "lean": loaded(name, "lean"), "recompute": loaded(name)}
    found = make_lean(models["recompute"], recompute=True)
    return (models if found.blocks else {**models, "recompute": models["lean"]}), found


def gradient(model: Segmenter, images: Tensor) -> Tensor:
    images = images.detach().requires_grad_()
    logits = model.logits(images)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=logits.dtype)
    return torch.autograd.grad(logits, images, weights)[0]


def errors(models: dict[str, Segmenter], dtype: torch.dtype) -> list[str]:
    """Of the lean gradient at 256 x 128 and of that with blocks again, relative to the largest entry of the plain."""
    images = torch.rand(1, 3, 128, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = {model: gradient(model.to(dtype), images) for model in models.values()}
    plain, *others = (found[model] for model in models.values())
    return [f"{((other - plain).abs().max() / plain.abs().max()).item():.1e}" for other in others]


def time_ratios(models: dict[str, Segmenter], repeats: int = 6) -> list[str]:
    """Seconds of the CPU for forward and backward at 512 x 256, over plain: medians of runs in turns."""
    times: dict[Segmenter, list[float]] = {model: [] for model in models.values()}
    images = torch.rand(1, 3, 256, 512)
    for repeat in range(repeats + 1):
        for model, seconds in times.items():
            return_what_is_freed(GLIBC_OWN if model is models["plain"] else LARGE)
            start = time.process_time()
            gradient(model, images)
            if repeat:  # the first warms up
                seconds.append(time.process_time() - start)
    plain, *others = (median(times[model]) for model in models.values())
    return [f"{other / plain:.2f}" for other in others]


def held(models: dict[str, Segmenter], height: int, width: int) -> list[str]:
    """At the smallest size computed, at others on the meta device, where the models then stay."""
    device = "cpu" if (height, width) == SIZES[0] else "meta"
    images = torch.rand(1, 3, height, width, device=device)
    found = {model: held_bytes(model.to(device), images) / MIB for model in models.values()}
    plain, lean, again = (found[model] for model in models.values())
    return [f"{plain:.1f}", f"{lean:.2f}", f"1/{plain / lean:.1f}", f"{again:.2f}", f"1/{plain / again:.1f}"]


def status(key: str) -> float:
    """MiB that the process has (`VmRSS`) or had at its peak (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def peak(what: str, name: str, kind: str, size: tuple[int, int]) -> None:
    """In a process of its own: print its peak in MiB over what there was before."""
    torch.set_num_threads(1)
    images = torch.rand(1, 3, *size)
    if what == "loss":
        logits, labels = torch.randn(1, 19, *size), torch.zeros(1, *size, dtype=torch.long)
    else:
        model = loaded(name, "lean" if kind == "forward" else kind)
    ctypes.CDLL(None).malloc_trim(0)  # what loading left behind is no part of it
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    if what == "loss":
        loss = dlr_plus(logits, labels)
        loss.pullback(torch.ones_like(loss.values))
    elif what == "attack":
        labels = torch.zeros(1, *size, dtype=torch.long)
        segprox.attack(model, images, labels, "alma-prox", steps=10)
    elif kind == "forward":
        with torch.no_grad():
            model.logits(images)
    else:
        gradient(model, images)
    print(f"{status('VmHWM') - before:.0f}")


def peak_rows() -> Iterator[list[str]]:
    script = sys.orig_argv[1 : sys.orig_argv.index(sys.argv[0]) + 1]  # with whatever runs it
    for what, name, (height, width), kinds in PEAKS:
        found = dict.fromkeys(("forward", "plain", "lean"), "")
        for kind in kinds:
            command = [sys.executable, *script, "--peak", what, name, kind, str(height), str(width)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            found[kind] = output[-1]
        yield [what, name, f"{width}x{height}", *found.values()]


def other_models(folder: Path) -> Iterator[tuple[str, str]]:
    import transformers

    config = transformers.SegformerConfig(
        num_labels=150, depths=[3, 4, 18, 3], hidden_sizes=[64, 128, 320, 512], decoder_hidden_size=768
    )
    transformers.SegformerForSemanticSegmentation(config).save_pretrained(folder)
    yield "hf: SegFormer-B3", f"hf:{folder}"
    names = [f"smp:{kind}/tu-{encoder}" for kind in ("UnetPlusPlus", "DeepLabV3Plus") for encoder in TIMM_ENCODERS]
    yield from ((name, f"{name}?checkpoint=random&num_classes=19") for name in names)
    yield "torchvision:deeplabv3_resnet50", "torchvision:deeplabv3_resnet50?checkpoint=random"
    yield from ((name, name) for name in ("demo-standard", "demo-robust"))


def print_others(console: Console, only: str) -> None:
    headings = ("model", "error", "left plain", "blocks", "plain MiB", "lean", "share", "recompute", "share")
    table = Table(*headings, title="self-check in float64, and held for the backward at 512x256")
    with tempfile.TemporaryDirectory() as folder:
        for name, full in other_models(Path(folder)):
            if only in name:
                models, found = three(full)
                left = ", ".join(found.plain)
                table.add_row(name, f"{found.error:.1e}", left, str(found.blocks), *held(models, *SIZES[0]))
                print(name, "done", file=sys.stderr)
    console.print(table)


def print_paper(console: Console, only: str) -> None:
    holds = Table("model", "size", "plain MiB", "lean", "share", "recompute", "share", title="held for the backward")
    other = Table(
        "model", "float64: lean", "recompute", "float32: lean", "recompute", "time: lean", "recompute", "folded",
        title="error of the gradient at 256x128, and time over plain at 512x256",
    )  # fmt: skip
    for name in CHOSEN:
        if only in name:
            models, _ = three(name)
            folded = loaded(name)
            fold_batch_norms(folded)
            make_lean(folded)
            times, single = time_ratios({**models, "folded": folded}), errors(models, torch.float32)
            rows = [held(models, *SIZES[0])]
            double = errors(models, torch.float64)
            for model in models.values():
                model.float()
            rows += [held(models, *size) for size in SIZES[1:]]
            for (height, width), row in zip(SIZES, rows):
                holds.add_row(name, f"{width}x{height}", *row)
            other.add_row(name, *double, *single, *times)
            print(name, "done", file=sys.stderr)
    console.print(holds)
    console.print(other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names that contain this text")
    parser.add_argument("--peaks", action="store_true")
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--peak", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    console = Console(width=140)
    if options.peak:
        what, name, kind, height, width = options.peak
        peak(what, name, kind, (int(height), int(width)))
    elif options.peaks:
        table = Table("", "model", "size", "forward", "plain", "lean", title="peak of a process, MiB")
        for row in peak_rows():
            table.add_row(*row)
            print(*row, file=sys.stderr)
        console.print(table)
    elif options.others:
        print_others(console, options.only)
    else:
        print_paper(console, options.only)


if __name__ == "__main__":
    main()
