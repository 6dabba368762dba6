"""Two families of attacks on the same image, so that a weak one is visible."""

from dataclasses import dataclass

from torch import Tensor

from segprox.attacks import Attack, Callback, FixedEpsilonAttack
from segprox.data import Sample
from segprox.errors import SegproxError
from segprox.models import Segmenter
from segprox.result import AttackResult


@dataclass(frozen=True, eq=False)
class Finding:
    """What a minimal and a fixed-epsilon attack found on one image, and whether they agree.

    An image that one of them breaks within epsilon and the other does not was not beyond the other's reach: it was too
    weak there, and its verdict on other images deserves less trust.
    """

    image: str  # its name
    minimal: AttackResult
    fixed: AttackResult
    epsilon: float

    @property
    def norm(self) -> float:
        """The size of what the minimal attack found, in the norm of both."""
        return self.minimal.norm.item()

    @property
    def broken_by_minimal(self) -> bool:
        """Whether the minimal attack succeeded within epsilon."""
        return bool(self.minimal.success) and self.norm <= self.epsilon

    @property
    def too_weak(self) -> str | None:
        """`minimal` or `fixed`, if that one missed what the other found."""
        if self.broken_by_minimal == bool(self.fixed.success):
            return None
        return "fixed" if self.broken_by_minimal else "minimal"

    @property
    def robust(self) -> bool:
        """Whether neither attack broke the image within epsilon."""
        return not (self.broken_by_minimal or bool(self.fixed.success))


def audit_sample(
    model: Segmenter,
    sample: Sample,
    minimal: Attack,
    fixed: FixedEpsilonAttack,
    *,
    ignore: tuple[int, ...] = (255,),
    target: Tensor | int | None = None,
    callback: Callback | None = None,
) -> Finding:
    """Run both attacks on one sample.

    Example:
        >>> import segprox
        >>> from segprox.run import audit_sample
        >>> scene, model = segprox.load_dataset("demo")[0], segprox.load_model("demo-standard")
        >>> minimal, fixed = segprox.make_attack("fmn", steps=5), segprox.make_attack("pgd", epsilon="1/255", steps=5)
        >>> audit_sample(model, scene, minimal, fixed).robust
        True
    """
    if minimal.family != "minimal":
        raise SegproxError("an audit needs a minimal attack first, such as palma; see: segprox list attacks")
    if minimal.norm != fixed.norm:
        raise SegproxError(f"an audit needs two attacks of one norm, not {minimal.norm} and {fixed.norm}")
    images, labels = sample.image[None], sample.label[None]
    smallest, most = (
        attack(model, images, labels, target=target, ignore=ignore, callback=callback) for attack in (minimal, fixed)
    )
    return Finding(sample.name, smallest, most, fixed.epsilon)
