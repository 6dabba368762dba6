"""Draw the picture of the README: python scripts/draw_demo.py docs/images/demo.png."""

import sys

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Patch

import segprox


def main(file: str) -> None:
    scenes, model = segprox.load_dataset("demo"), segprox.load_model("demo-standard")
    name, image, label = scenes[1]
    found = segprox.attack(model, image[None], label[None])  # PALMA, 200 steps
    size, delta = found.norm.item(), found.images[0] - image
    palette = torch.tensor([*scenes.palette, (0, 0, 0)], dtype=torch.uint8)
    with torch.no_grad():
        before, after = (model(images).argmax(1)[0] for images in (image[None], found.images))
    counted = label < len(scenes.classes)
    right = (before == label)[counted].float().mean().item()
    gain = 0.5 / size
    panels = {
        "image": image.permute(1, 2, 0),
        f"perturbation, amplified {gain:.0f} times": (0.5 + gain * delta).clamp(0, 1).permute(1, 2, 0),
        "adversarial image": found.images[0].permute(1, 2, 0),
        f"prediction: {right:.1%} right": palette[before],
        "true labels (black: not counted)": palette[label.clamp(max=len(scenes.classes))],
        f"adversarial prediction: {found.apsr.item():.1%} wrong": palette[after],
    }
    figure, axes = plt.subplots(2, 3, figsize=(12, 4.9), layout="constrained")
    for ax, (title, shown) in zip(axes.flat, panels.items(), strict=True):
        ax.imshow(shown)
        ax.set_title(title, fontsize=10)
        ax.axis("off")
    colours = [tuple(value / 255 for value in colour) for colour in scenes.palette]
    handles = [Patch(color=colour, label=text) for colour, text in zip(colours, scenes.classes, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.suptitle(f"{name}: {found.apsr.item():.1%} wrong with no value changed by more than {size * 255:.2f}/255")
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    main(sys.argv[1])
