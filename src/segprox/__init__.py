"""segprox: how robust is a semantic segmentation model?

>>> import segprox
>>> scene = segprox.load_dataset("demo")[0]
>>> result = segprox.attack(segprox.load_model("demo-standard"), scene.image[None], scene.label[None], steps=2)
"""

from segprox.api import attack
from segprox.attacks import AlmaProx, Anneal, Attack, Palma, Progress, make_attack
from segprox.data import Sample, load_dataset
from segprox.errors import SegproxError
from segprox.models import Segmenter, load_model
from segprox.problem import Problem
from segprox.prox import prox_linf_box
from segprox.result import AttackResult

__version__ = "0.1.0"

__all__ = [
    "AlmaProx",
    "Anneal",
    "Attack",
    "AttackResult",
    "Palma",
    "Problem",
    "Progress",
    "Sample",
    "Segmenter",
    "SegproxError",
    "attack",
    "load_dataset",
    "load_model",
    "make_attack",
    "prox_linf_box",
]
