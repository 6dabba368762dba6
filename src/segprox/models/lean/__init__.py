"""Input gradients that hold almost nothing.

An attack differentiates with respect to the image alone, through a network that is frozen and in eval mode. Autograd
does not know that: a convolution keeps its input for a gradient of its weights that nobody asks for, a ReLU keeps its
output where one bit per value would do. Inside `LeanOperations` these operations are replaced, whoever calls them, by
ones that keep only what the gradient of their input needs. Everything else runs as it is.
"""

from segprox.models.lean.fold import fold_batch_norms
from segprox.models.lean.make import Leanness, make_lean
from segprox.models.lean.meter import held_bytes
from segprox.models.lean.operations import OPERATIONS, LeanOperations

__all__ = ["OPERATIONS", "LeanOperations", "Leanness", "fold_batch_norms", "held_bytes", "make_lean"]
