"""What an attack's gradient takes: bytes held for the backward, process peaks, time, and whether it is exact.

    python benchmarks/memory.py [--only TEXT] [--peaks]

The paper's models with random weights: held for the backward at three sizes (the largest on the meta device, where
nothing is computed), plain, lean, and lean with blocks computed again; the error of the lean gradient; the time of a
forward and backward, lean over plain, in turns. With --peaks also the peak of the process over what it has with the
weights loaded, each in a process of its own.
"""

import argparse
import resource
import subprocess
import sys
import time
import warnings
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from segprox import Segmenter, load_model
from segprox.models import PAPER_MODELS, held_bytes, make_lean

SIZES = [(256, 512), (512, 1024), (1024, 2048)]
CHOSEN = ("r50-voc", "r101-voc", "w48-cityscapes", "b0-", "b3-")


def loaded(name: str, kind: str = "plain") -> Segmenter:
    model = load_model(name, checkpoint="random")
    if kind != "plain":
        make_lean(model, again=kind == "again")
    return model


def gradient(model: Segmenter, images: Tensor) -> Tensor:
    images = images.detach().requires_grad_()
    logits = model.logits(images)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=logits.dtype)
    return torch.autograd.grad(logits, images, weights)[0]


def error(name: str, dtype: torch.dtype) -> float:
    """The largest error of the lean gradient at 256 x 128, relative to the largest entry of the plain one."""
    torch.manual_seed(0)
    model = load_model(name, checkpoint="random").to(dtype)
    images = torch.rand(1, 3, 128, 256, dtype=dtype)
    plain = gradient(model, images)
    make_lean(model)
    return ((gradient(model, images) - plain).abs().max() / plain.abs().max()).item()


def time_ratios(name: str, repeats: int = 3) -> tuple[float, float]:
    """Forward and backward at 512 x 256, lean and again over plain: medians of runs in turns."""
    models = {kind: loaded(name, kind) for kind in ("plain", "lean", "again")}
    times: dict[str, list[float]] = {kind: [] for kind in models}
    images = torch.rand(1, 3, 256, 512)
    for repeat in range(repeats + 1):
        for kind, model in models.items():
            start = time.perf_counter()
            gradient(model, images)
            if repeat:  # the first warms up
                times[kind].append(time.perf_counter() - start)
    return tuple(median(times[kind]) / median(times["plain"]) for kind in ("lean", "again"))


def peak(name: str, kind: str, size: tuple[int, int]) -> None:
    """In a process of its own: print the peak in MiB over what there was before, of a forward and backward."""
    torch.set_num_threads(1)
    model = loaded(name, "plain" if kind == "forward" else kind)
    images = torch.rand(1, 3, *size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    current = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() // 1024  # noqa: SIM115, PTH123
    if kind == "forward":
        with torch.no_grad():
            model.logits(images)
    else:
        point = images.requires_grad_()
        logits = model.logits(point)
        torch.autograd.grad(logits, point, torch.ones_like(logits))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print((after - current) // 1024 if after > before else -1)


def peaks(name: str, size: tuple[int, int], kinds: tuple[str, ...]) -> list[str]:
    found = []
    for kind in kinds:
        command = [sys.executable, __file__, "--peak", name, kind, str(size[0]), str(size[1])]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        found.append(output[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names that contain this text")
    parser.add_argument("--peaks", action="store_true")
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.peak:
        name, kind, height, width = options.peak
        peak(name, kind, (int(height), int(width)))
        return
    torch.set_num_threads(1)
    names = [name for name in PAPER_MODELS if any(part in name for part in CHOSEN) and options.only in name]
    console = Console(width=140)
    held = Table("model", "size", "plain MiB", "lean", "ratio", "lean, again", "ratio", title="held for the backward")
    other = Table("model", "error float64", "error float32", "time lean / plain", "time again / plain")
    for name in names:
        models = {kind: loaded(name, kind) for kind in ("plain", "lean", "again")}
        for height, width in SIZES:
            device = "meta" if height == 1024 else "cpu"
            images = torch.rand(1, 3, height, width, device=device)
            found = [held_bytes(model.to(device), images) / 2**20 for model in models.values()]
            ratios = [f"{found[0] / value:.1f}" for value in found[1:]]
            held.add_row(
                name, f"{width}x{height}", f"{found[0]:.1f}", f"{found[1]:.2f}", ratios[0], f"{found[2]:.2f}", ratios[1]
            )
        del models
        lean, again = time_ratios(name)
        errors = [f"{error(name, dtype):.1e}" for dtype in (torch.float64, torch.float32)]
        other.add_row(name, *errors, f"{lean:.2f}", f"{again:.2f}")
        print(name, "done", file=sys.stderr)
    console.print(held)
    console.print(other)
    if options.peaks:
        table = Table("model", "size", "forward only", "plain", "lean", title="process peak over loaded weights, MiB")
        for name, size in (("r50-voc", (256, 512)), ("w48-cityscapes", (512, 1024))):
            full = next(model for model in PAPER_MODELS if name in model)
            table.add_row(full, f"{size[1]}x{size[0]}", *peaks(full, size, ("forward", "plain", "lean")))
        for name in ("w48-cityscapes", "r101-voc"):
            full = next(model for model in PAPER_MODELS if name in model)
            table.add_row(
                full, "2048x1024", *peaks(full, (1024, 2048), ("forward",)), "-", *peaks(full, (1024, 2048), ("lean",))
            )
        console.print(table)


if __name__ == "__main__":
    main()
