"""How long one forward and one backward of the paper's models take at the paper's sizes, plain and lean.

    python benchmarks/seconds.py                   # one CPU thread, in seconds of that thread
    python benchmarks/seconds.py --device cuda     # on a GPU, in seconds

Weights are random: they do not change the time. One pass warms up, and the median of --repeats others is printed. On a
CPU, convolutional networks are measured on images of half the height and width, and multiplied by 4; `--whole` measures
the whole images. Transformers are always measured whole, because attention grows faster than the image.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

import segprox

VOC, CITYSCAPES = (512, 683), (1024, 2048)  # short side 512 at 4:3; whole images
MODELS = {
    "mmseg:deeplabv3plus-r50-voc": VOC,
    "mmseg:deeplabv3plus-r101-voc": VOC,
    "mmseg:fcn-hrnetv2-w48-voc": VOC,
    "ddcat:voc": (384, 512),  # long side 512
    "mmseg:deeplabv3plus-r50b-cityscapes": CITYSCAPES,
    "mmseg:fcn-hrnetv2-w48-cityscapes": CITYSCAPES,
    "mmseg:segformer-mit-b0-cityscapes": CITYSCAPES,
    "mmseg:segformer-mit-b3-cityscapes": CITYSCAPES,
    "ddcat:cityscapes": (512, 1024),
}


def clock(device: torch.device) -> Callable[[], float]:
    """Seconds of this process on a CPU, which others that share it do not change much; of the wall elsewhere."""
    if device.type == "cpu":
        return time.process_time
    return lambda: (torch.accelerator.synchronize(), time.perf_counter())[1]


def measure(model: segprox.Segmenter, height: int, width: int, repeats: int) -> tuple[float, float]:
    """Seconds of a forward and of a backward: medians."""
    now, images = clock(model.device), torch.rand(1, 3, height, width, device=model.device).requires_grad_()
    forwards, backwards = [], []
    for _ in range(1 + repeats):
        start = now()
        logits = model.logits(images)
        middle = now()
        torch.autograd.grad(logits.sum(), images)
        forwards.append(middle - start)
        backwards.append(now() - middle)
        del logits
    return statistics.median(forwards[1:]), statistics.median(backwards[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--whole", action="store_true", help="no image is measured at half its sides")
    parser.add_argument("--lean-only", action="store_true", help="plain gradients may need 20 GiB")
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose names have it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table = Table("model", "image", "gradient", "forward", "backward", "palma, 200", "alma-prox, 500")
    for name, (height, width) in MODELS.items():
        if args.only not in name:
            continue
        half = args.device == "cpu" and not args.whole and "segformer" not in name
        times = 4 if half else 1
        for lean in ("true",) if args.lean_only else ("true", "false"):
            model = segprox.load_model(f"{name}?checkpoint=random&lean={lean}", device=args.device)
            try:
                forward, backward = measure(model, height // (1 + half), width // (1 + half), args.repeats)
            except (RuntimeError, MemoryError) as error:
                print(f"{name}, lean={lean}: {str(error).splitlines()[0]}", flush=True)
                continue
            forward, backward = forward * times, backward * times
            cells = [name, f"{width}x{height}", "lean" if lean == "true" else "plain", f"{forward:.2f}"]
            cells += [f"{backward:.2f}"]
            for attack in ("palma", "alma-prox"):
                cost = segprox.make_attack(attack).cost()
                cells.append(f"{(cost.forwards * forward + cost.backwards * backward) / 60:.1f} min")
            print(" | ".join(cells), flush=True)
            table.add_row(*cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
