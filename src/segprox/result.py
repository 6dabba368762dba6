"""What an attack returns."""

from dataclasses import dataclass

from torch import Tensor

from segprox.trace import Trace


@dataclass(frozen=True, eq=False)
class AttackResult:
    """What an attack found, one entry per image.

    Example:
        >>> import segprox
        >>> scene = segprox.load_dataset("demo")[0]
        >>> result = segprox.attack(segprox.load_model("demo-standard"), scene.image[None], scene.label[None], steps=2)
        >>> result.images.shape, result.forwards.tolist()
        (torch.Size([1, 3, 128, 256]), [2])
    """

    images: Tensor  # [B, C, H, W]: the best adversarial images, in [0, 1]
    norm: Tensor  # [B]: the size of their perturbations, in the attack's norm
    apsr: Tensor  # [B]: attack pixel success rates, float64
    success: Tensor  # [B] bool: whether the APSR reaches the problem's threshold
    forwards: Tensor  # [B] int64: model evaluations spent
    backwards: Tensor  # [B] int64: gradients spent
    seconds: float  # for the whole batch
    traces: tuple[Trace, ...] = ()  # [B]: the norms it would have returned after fewer queries
