"""The cases that attacks are developed on and judged by: networks, images, crops, goals and thresholds.

Choices are made on the cases of `development`; those of `judged` are looked at once, when choices are made, and then
become development cases for the next round. The two share no crop of an image with the same network, and no part of the
one fundus photograph. A row of a table is a case:

    KIND NETWORK IMAGE SIZE LABELS GOAL THRESHOLD

IMAGE is a name of the folder's test or validation split, `scene-N` of the embedded dataset, or `retina`. SIZE is
`whole` or HEIGHTxWIDTH+TOP+LEFT. LABELS are the `true` ones or the network's `own` clean prediction. GOAL is
`untargeted`, `to:CLASS` (every pixel) or `to:IMAGE` (what the network sees in another image). NETWORK may end in
`/CLASS`, the view of one class against the rest, `/nervous` or `/stubborn`.
"""

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from realbench import IGNORE, load_network, load_photograph, load_samples
from segprox import Problem, Sample, Segmenter, load_dataset, load_model

HALVES = {
    "development": """
whole       espnet-camvid                  0016E5_08017    whole            true untargeted      0.99
whole       efficientvit-b0-cityscapes     0001TP_010050   whole            own  untargeted      0.99
whole       demo-robust                    scene-4         whole            true untargeted      0.99
whole       demo-standard                  scene-5         whole            true untargeted      0.99
crop        espnet-camvid                  0016E5_07959    128x192+100+120  true untargeted      0.99
crop        espnet-camvid                  0016E5_08073    96x128+200+60    true untargeted      0.99
crop        espnet-camvid                  0001TP_010380   192x256+100+120  true untargeted      0.99
crop        espnet-camvid                  Seq05VD_f03900  128x192+120+200  own  untargeted      0.9
crop        espnetv2-0.5-cityscapes        0016E5_08101    96x128+150+150   own  untargeted      0.99
crop        espnetv2-0.5-cityscapes        0001TP_010050   128x192+60+240   own  untargeted      1.0
crop        espnetv2-1.0-cityscapes        0016E5_08131    128x192+180+40   own  untargeted      0.99
crop        espnetv2-1.0-cityscapes        Seq05VD_f03900  96x128+220+300   own  untargeted      0.9
crop        espnetv2-1.5-cityscapes        0016E5_08159    96x128+100+200   own  untargeted      0.99
crop        espnetv2-1.5-cityscapes        0001TP_010380   96x128+200+20    own  untargeted      0.99
crop        demo-standard/nervous          scene-6         whole            true untargeted      0.99
crop        demo-robust/stubborn           scene-7         whole            true untargeted      0.99
crop        demo-robust                    scene-5         64x96+40+80      true untargeted      1.0
targeted    espnet-camvid                  0016E5_08045    128x192+100+120  true to:road         0.99
targeted    espnet-camvid                  0001TP_010050   96x128+180+100   true to:sky          0.99
targeted    espnetv2-0.5-cityscapes        0016E5_07987    96x128+160+240   own  to:0016E5_08131 0.99
targeted    espnetv2-1.0-cityscapes        Seq05VD_f03900  96x128+60+100    own  to:vegetation   0.99
targeted    espnetv2-1.5-cityscapes        0016E5_07959    96x128+180+200   own  to:car          0.9
targeted    demo-standard                  scene-4         96x128+16+64     true to:1            0.99
targeted    efficientvit-b0-cityscapes     0016E5_08017    96x128+100+260   own  to:road         0.99
binary      lwnet-vessels                  retina          256x256+152+152  own  untargeted      0.99
binary      lwnet-vessels                  retina          96x128+40+200    own  untargeted      0.99
binary      espnet-camvid/road             0016E5_08101    128x192+150+100  own  untargeted      0.99
binary      espnetv2-0.5-cityscapes/car    0001TP_010380   96x128+190+180   own  untargeted      0.99
binary      efficientvit-b0-cityscapes/building 0016E5_08159 128x192+60+60  own  untargeted      0.99
transformer efficientvit-b0-cityscapes     0016E5_07987    128x192+140+140  own  untargeted      0.99
transformer efficientvit-b0-cityscapes     Seq05VD_f03900  96x128+200+200   own  untargeted      0.99
transformer efficientvit-b0-cityscapes     0016E5_08073    128x192+20+280   own  untargeted      0.9
whole       espnet-camvid                  Seq05VD_f03270  whole            true untargeted      0.99
whole       efficientvit-b0-cityscapes     Seq05VD_f04500  whole            own  untargeted      0.99
whole       demo-robust                    scene-1         whole            true untargeted      0.99
whole       demo-standard                  scene-3         whole            true untargeted      0.99
crop        espnet-camvid                  Seq05VD_f00870  128x192+200+240  true untargeted      0.99
crop        espnet-camvid                  0001TP_009450   96x128+60+300    true untargeted      0.99
crop        espnet-camvid                  Seq05VD_f02670  192x256+140+200  true untargeted      0.99
crop        espnet-camvid                  0001TP_009150   128x192+220+60   own  untargeted      0.9
crop        espnetv2-0.5-cityscapes        Seq05VD_f02070  96x128+180+180   own  untargeted      0.99
crop        espnetv2-0.5-cityscapes        Seq05VD_f05100  128x192+40+40    own  untargeted      1.0
crop        espnetv2-1.0-cityscapes        0001TP_008850   128x192+160+260  own  untargeted      0.99
crop        espnetv2-1.0-cityscapes        Seq05VD_f04500  96x128+240+40    own  untargeted      0.9
crop        espnetv2-1.5-cityscapes        Seq05VD_f01470  96x128+60+320    own  untargeted      0.99
crop        espnetv2-1.5-cityscapes        0001TP_009450   96x128+160+100   own  untargeted      0.99
crop        demo-standard/nervous          scene-0         whole            true untargeted      0.99
crop        demo-robust/stubborn           scene-2         whole            true untargeted      0.99
crop        demo-robust                    scene-3         64x96+20+40      true untargeted      1.0
targeted    espnet-camvid                  Seq05VD_f02370  128x192+180+160  true to:tree         0.99
targeted    espnet-camvid                  Seq05VD_f03600  96x128+40+280    true to:building     0.99
targeted    espnetv2-0.5-cityscapes        0001TP_008850   96x128+220+40    own  to:Seq05VD_f02070 0.99
targeted    espnetv2-1.0-cityscapes        Seq05VD_f00870  96x128+80+320    own  to:road         0.99
targeted    espnetv2-1.5-cityscapes        0001TP_009150   96x128+140+260   own  to:vegetation   0.9
targeted    demo-standard                  scene-2         96x128+16+100    true to:3            0.99
targeted    efficientvit-b0-cityscapes     Seq05VD_f03270  96x128+220+300   own  to:building     0.99
binary      lwnet-vessels                  retina          128x192+420+180  own  untargeted      0.99
binary      lwnet-vessels                  retina          96x128+20+340    own  untargeted      0.99
binary      espnet-camvid/building         Seq05VD_f04800  128x192+40+260   own  untargeted      0.99
binary      espnetv2-0.5-cityscapes/road   Seq05VD_f01170  96x128+200+300   own  untargeted      0.99
binary      efficientvit-b0-cityscapes/vegetation Seq05VD_f02670 128x192+20+40 own untargeted    0.99
transformer efficientvit-b0-cityscapes     0001TP_008850   128x192+40+120   own  untargeted      0.99
transformer efficientvit-b0-cityscapes     Seq05VD_f00270  96x128+240+320   own  untargeted      0.99
transformer efficientvit-b0-cityscapes     Seq05VD_f02370  128x192+60+40    own  untargeted      0.9
""",
    "judged": """
whole       espnet-camvid                  Seq05VD_f01770  whole            true untargeted      0.99
whole       efficientvit-b0-cityscapes     Seq05VD_f02970  whole            own  untargeted      0.99
whole       demo-robust                    scene-0         whole            true untargeted      0.99
whole       demo-standard                  scene-2         whole            true untargeted      0.99
crop        espnet-camvid                  Seq05VD_f04200  128x192+60+80    true untargeted      0.99
crop        espnet-camvid                  0001TP_009750   96x128+220+160   true untargeted      0.99
crop        espnet-camvid                  0001TP_008550   192x256+80+100   true untargeted      0.99
crop        espnet-camvid                  Seq05VD_f02970  128x192+180+20   own  untargeted      0.9
crop        espnetv2-0.5-cityscapes        Seq05VD_f01770  96x128+120+300   own  untargeted      0.99
crop        espnetv2-0.5-cityscapes        0001TP_009750   128x192+160+60   own  untargeted      1.0
crop        espnetv2-1.0-cityscapes        Seq05VD_f00570  128x192+40+200   own  untargeted      0.99
crop        espnetv2-1.0-cityscapes        0001TP_008550   96x128+200+220   own  untargeted      0.9
crop        espnetv2-1.5-cityscapes        Seq05VD_f04200  96x128+180+120   own  untargeted      0.99
crop        espnetv2-1.5-cityscapes        Seq05VD_f02970  96x128+40+240    own  untargeted      0.99
crop        demo-standard/nervous          scene-1         whole            true untargeted      0.99
crop        demo-robust/stubborn           scene-3         whole            true untargeted      0.99
crop        demo-robust                    scene-2         64x96+44+130     true untargeted      1.0
targeted    espnet-camvid                  Seq05VD_f00570  128x192+120+220  true to:pavement     0.99
targeted    espnet-camvid                  0001TP_009750   96x128+40+60     true to:road         0.99
targeted    espnetv2-0.5-cityscapes        Seq05VD_f04200  96x128+140+40    own  to:0001TP_008550 0.99
targeted    espnetv2-1.0-cityscapes        Seq05VD_f01770  96x128+220+100   own  to:building     0.99
targeted    espnetv2-1.5-cityscapes        Seq05VD_f00570  96x128+100+340   own  to:road         0.9
targeted    demo-standard                  scene-0         96x128+20+30     true to:2            0.99
targeted    efficientvit-b0-cityscapes     0001TP_009750   96x128+160+200   own  to:vegetation   0.99
binary      lwnet-vessels                  retina          128x144+200+0    own  untargeted      0.99
binary      lwnet-vessels                  retina          96x128+440+40    own  untargeted      0.99
binary      espnet-camvid/tree             0001TP_008550   128x192+20+140   own  untargeted      0.99
binary      espnetv2-0.5-cityscapes/building Seq05VD_f02970 96x128+120+200  own  untargeted      0.99
binary      efficientvit-b0-cityscapes/road Seq05VD_f01770 128x192+200+120  own  untargeted      0.99
transformer efficientvit-b0-cityscapes     Seq05VD_f04200  128x192+180+240  own  untargeted      0.99
transformer efficientvit-b0-cityscapes     Seq05VD_f00570  96x128+80+60     own  untargeted      0.99
transformer efficientvit-b0-cityscapes     0001TP_009750   128x192+100+20   own  untargeted      0.9
""",
}


class Case(NamedTuple):
    """One line of a table."""

    kind: str
    network: str
    image: str
    size: str
    labels: str
    goal: str
    threshold: float

    def __str__(self) -> str:
        return " ".join(map(str, self))


def list_cases(half: str, kinds: list[str] | None = None) -> list[Case]:
    """The cases of a half, of some kinds or all."""
    rows = [line.split() for line in HALVES[half].strip().splitlines()]
    cases = [Case(*row[:-1], threshold=float(row[-1])) for row in rows]
    return [case for case in cases if kinds is None or case.kind in kinds]


class OneAgainstRest(nn.Module):
    """Two logits: any other class, and the one."""

    def __init__(self, network: nn.Module, index: int) -> None:
        super().__init__()
        self.network, self.index = network, index

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[B, 2, H, W]`."""
        logits = self.network(images)
        others = torch.cat([logits[:, : self.index], logits[:, self.index + 1 :]], 1)
        return torch.stack([others.logsumexp(1), logits[:, self.index]], 1)


class Stubborn(nn.Module):
    """A network whose clean answer weighs so much more: nothing small changes it."""

    def __init__(self, network: Segmenter, image: Tensor, weight: float = 1.0) -> None:
        super().__init__()
        self.network = network
        with torch.no_grad():
            self.clean = weight * network(image[None])

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.network(images) + self.clean


class Nervous(nn.Module):
    """A network that sees the image's departure from the clean one many times as large."""

    def __init__(self, network: Segmenter, image: Tensor, gain: float = 20.0) -> None:
        super().__init__()
        self.network, self.image, self.gain = network, image[None], gain

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.network((self.image + self.gain * (images - self.image)).clamp(0, 1))


@lru_cache(maxsize=1)
def _samples(folder: Path) -> dict[str, Sample]:
    scenes = {f"scene-{i}": sample for i, sample in enumerate(load_dataset("demo"))}
    photograph = load_photograph(folder)
    retina = Sample("retina", photograph, torch.full(photograph.shape[1:], IGNORE[0]))  # what a network sees has to do
    return {**load_samples(folder, "test"), **load_samples(folder, "val"), **scenes, "retina": retina}


def _crop(size: str, *planes: Tensor) -> list[Tensor]:
    if size == "whole":
        return list(planes)
    extent, top, left = size.split("+")
    height, width = map(int, extent.split("x"))
    rows, columns = slice(int(top), int(top) + height), slice(int(left), int(left) + width)
    return [plane[..., rows, columns].contiguous() for plane in planes]


def load_case(folder: Path, case: Case) -> tuple[Segmenter, Problem]:
    """The network and the problem of a case."""
    name, _, view = case.network.partition("/")
    sample = _samples(folder)[case.image]
    image, label = _crop(case.size, sample.image, sample.label)
    model = load_model(name) if name.startswith("demo") else load_network(folder, name)
    names = list(getattr(model.model, "classes", ()))
    if view in ("nervous", "stubborn"):
        model = Segmenter({"nervous": Nervous, "stubborn": Stubborn}[view](model, image))
    elif view:
        model = Segmenter(OneAgainstRest(model, names.index(view)))
    if case.labels == "own":
        with torch.no_grad():
            label = model(image[None]).argmax(1)[0]
    kind, _, wanted = case.goal.partition(":")
    target: Tensor | int | None = None
    if kind == "to":
        target = _target(folder, model, names, wanted, case.size)
    problem = Problem.build(image[None], label[None], target=target, ignore=IGNORE, threshold=case.threshold)
    return model, problem


def _target(folder: Path, model: Segmenter, names: list[str], wanted: str, size: str) -> Tensor | int:
    if wanted in names or wanted.isdigit():
        return names.index(wanted) if wanted in names else int(wanted)
    (other,) = _crop(size, _samples(folder)[wanted].image)
    with torch.no_grad():
        return model(other[None]).argmax(1)
