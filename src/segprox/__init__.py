"""segprox: how robust is a semantic segmentation model?

>>> import segprox
>>> scene = segprox.load_dataset("demo")[0]
>>> result = segprox.attack(segprox.load_model("demo-standard"), scene.image[None], scene.label[None], steps=2)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segprox.api import attack, audit, evaluate, transfer
    from segprox.attacks import (
        AlmaProx,
        Anneal,
        Attack,
        FixedEpsilonAttack,
        MinimalAttack,
        Palma,
        Progress,
        ProgressReporter,
        list_attacks,
        make_attack,
        register_attack,
        register_objective,
    )
    from segprox.bands import Bands
    from segprox.data import Dataset, Sample, list_datasets, load_dataset, register_dataset
    from segprox.errors import SegproxError
    from segprox.losses import Loss
    from segprox.models import Segmenter, list_models, load_model, register_model, register_model_source
    from segprox.problem import Problem
    from segprox.prox import prox_linf_box
    from segprox.report.audit import Audit
    from segprox.report.evaluation import Results, load_results
    from segprox.result import AttackResult
    from segprox.tracker import Tracker

__version__ = "0.1.0"

# Imported when first used: torch takes seconds, and neither --help nor a look at the version needs it.
_ROOMS = {
    "segprox.api": ("attack", "audit", "evaluate", "transfer"),
    "segprox.attacks": (
        "AlmaProx", "Anneal", "Attack", "FixedEpsilonAttack", "MinimalAttack", "Palma", "Progress",
        "ProgressReporter", "list_attacks", "make_attack", "register_attack", "register_objective",
    ),
    "segprox.bands": ("Bands",),
    "segprox.data": ("Dataset", "Sample", "list_datasets", "load_dataset", "register_dataset"),
    "segprox.errors": ("SegproxError",),
    "segprox.losses": ("Loss",),
    "segprox.models": ("Segmenter", "list_models", "load_model", "register_model", "register_model_source"),
    "segprox.problem": ("Problem",),
    "segprox.prox": ("prox_linf_box",),
    "segprox.report.audit": ("Audit",),
    "segprox.report.evaluation": ("Results", "load_results"),
    "segprox.result": ("AttackResult",),
    "segprox.tracker": ("Tracker",),
}  # fmt: skip
_WHERE = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "AlmaProx", "Anneal", "Attack", "AttackResult", "Audit", "Bands", "Dataset", "FixedEpsilonAttack", "Loss",
    "MinimalAttack", "Palma", "Problem", "Progress", "ProgressReporter", "Results", "Sample", "Segmenter",
    "SegproxError", "Tracker", "attack", "audit", "evaluate", "list_attacks", "list_datasets", "list_models",
    "load_dataset", "load_model", "load_results", "make_attack", "prox_linf_box", "register_attack",
    "register_dataset", "register_model", "register_model_source", "register_objective", "transfer",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
