"""A model by sliding windows: logits against MMSegmentation's own, memory against the whole image, and an attack.

    python benchmarks/windows.py --size 1024x2048 --window 512 --stride 384 --steps 10

Weights are random. Peaks are those of a process of their own for each way to use the model, over what it has with the
weights loaded.
"""

import argparse
import ctypes
import multiprocessing
import time
import warnings
from pathlib import Path

import torch

import segprox
from segprox.models import held_bytes

NAME = "mmseg:segformer-mit-b0-cityscapes?checkpoint=random&device=cpu"
MIB = 2**20


def load(window: str):
    torch.manual_seed(0)
    return segprox.load_model(f"{NAME}&{window}")


def scene(height: int, width: int) -> torch.Tensor:
    """Smooth noise with 8 bits `[3, H, W]`."""
    coarse = torch.rand(1, 3, height // 32, width // 32, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 1)
    return (255 * smooth[0]).to(torch.uint8)


def logits_of_library(model, image: torch.Tensor, window: int, stride: int) -> torch.Tensor:
    from mmseg.structures import SegDataSample

    segmentor = model.model.segmentor
    segmentor.test_cfg = type(segmentor.test_cfg)(mode="slide", crop_size=(window,) * 2, stride=(stride,) * 2)
    size = tuple(image.shape[1:])
    sample = SegDataSample(metainfo={"img_shape": size, "ori_shape": size})
    with torch.no_grad():  # blue first, as it reads files
        return segmentor.test_step({"inputs": [image.flip(0)], "data_samples": [sample]})[0].seg_logits.data[None]


def status(field: str) -> float:
    """A size of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def peak(options: str, image: torch.Tensor, connection) -> None:
    """What a forward and a backward add to the most memory of this process, and how long they take."""
    model, images = load(options), (image[None].float() / 255).requires_grad_()
    ctypes.CDLL(None).malloc_trim(0)  # what loading left behind is no part of it
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before, start = status("VmRSS"), time.perf_counter()
    model.logits(images).sum().backward()
    connection.send((status("VmHWM") - before, time.perf_counter() - start))


def in_a_process(options: str, image: torch.Tensor) -> tuple[float, float]:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=peak, args=(options, image, there))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:  # killed: more memory than there is
        return float("nan"), float("nan")
    finally:
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1024x2048")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--stride", type=int, default=384)
    parser.add_argument("--steps", type=int, default=10)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    height, width = map(int, chosen.size.split("x"))
    image = scene(height, width)
    images = image[None].float() / 255
    options = f"window={chosen.window}&stride={chosen.stride}"
    model = load(options)
    with torch.no_grad():
        ours = model.logits(images)
    theirs = logits_of_library(model, image, chosen.window, chosen.stride)
    spread = (theirs.max() - theirs.min()).item()
    print(f"{chosen.size}, {len(model.pieces((height, width)))} windows of {chosen.window} at stride {chosen.stride}")
    print(f"logits: largest difference from the library's {(ours - theirs).abs().max().item():.1e}, range {spread:.3g}")

    print("| used | held, MiB | peak, MiB | seconds of a forward and backward |\n|---|---|---|---|")
    for way in ("window=whole", "window=whole&lean=true", options, f"{options}&lean=true"):
        held = held_bytes(load(way).to("meta"), images.to("meta")) / MIB
        most, seconds = in_a_process(way, image)
        print(f"| `{way}` | {held:.0f} | {most:.0f} | {seconds:.0f} |", flush=True)

    model = load(f"{options}&lean=true")
    start = time.perf_counter()
    result = segprox.attack(model, images, ours.argmax(1), "palma", steps=chosen.steps)
    print(
        f"PALMA, {chosen.steps} iterations: linf {result.norm.item() * 255:.3f}/255, APSR {result.apsr.item():.4f}, "
        f"{result.forwards.item()} forwards, {result.backwards.item()} backwards, {time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
