"""The attacks, one file each."""

from segprox.attacks.alma_prox import AlmaProx
from segprox.attacks.base import Attack, Callback, Progress
from segprox.attacks.registry import ATTACKS, make_attack

__all__ = ["ATTACKS", "AlmaProx", "Attack", "Callback", "Progress", "make_attack"]
