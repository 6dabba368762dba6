"""From samples to outcomes."""

from segprox.run.outcome import Outcome, attack_sample

__all__ = ["Outcome", "attack_sample"]
