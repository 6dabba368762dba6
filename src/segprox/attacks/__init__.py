"""The attacks, one file each."""

from segprox.attacks.alma import Alma
from segprox.attacks.alma_prox import AlmaProx
from segprox.attacks.anneal import Anneal
from segprox.attacks.apgd import Apgd
from segprox.attacks.asma import Asma
from segprox.attacks.base import Attack, Callback, Cost, FixedEpsilonAttack, MinimalAttack, Progress, ProgressReporter
from segprox.attacks.bisection import Bisection
from segprox.attacks.dag import Dag
from segprox.attacks.ddn import Ddn
from segprox.attacks.fmn import Fmn
from segprox.attacks.memory import state_bytes
from segprox.attacks.objectives import register_objective
from segprox.attacks.palma import Palma
from segprox.attacks.pdgd import Pdgd
from segprox.attacks.pdpgd import Pdpgd
from segprox.attacks.pgd import Pgd
from segprox.attacks.registry import (
    ATTACKS,
    PAPER_ATTACKS,
    describe,
    find_attack,
    list_attacks,
    make_attack,
    norms,
    register_attack,
)
from segprox.attacks.sea import Sea
from segprox.attacks.square import Square, SquareMinimal

__all__ = [
    "ATTACKS",
    "PAPER_ATTACKS",
    "Alma",
    "AlmaProx",
    "Anneal",
    "Apgd",
    "Asma",
    "Attack",
    "Bisection",
    "Callback",
    "Cost",
    "Dag",
    "Ddn",
    "FixedEpsilonAttack",
    "Fmn",
    "MinimalAttack",
    "Palma",
    "Pdgd",
    "Pdpgd",
    "Pgd",
    "Progress",
    "ProgressReporter",
    "Sea",
    "Square",
    "SquareMinimal",
    "describe",
    "find_attack",
    "list_attacks",
    "make_attack",
    "norms",
    "register_attack",
    "register_objective",
    "state_bytes",
]
