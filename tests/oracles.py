"""Models and problems whose answers are known in closed form."""

import torch
from torch import Tensor, nn

from segprox import Segmenter


class Linear(nn.Module):
    """Logits of each pixel are a linear function of its own channels: z = weight @ x + bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(len(weight)) if bias is None else bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("kc,bchw->bkhw", self.weight, x) + self.bias.view(-1, 1, 1)


def channels_as_logits(num_classes: int, scale: float = 7.0) -> Segmenter:
    """z = scale * x: one channel per class."""
    return Segmenter(Linear(scale * torch.eye(num_classes)))


def random_linear(num_classes: int, channels: int, seed: int = 0) -> Segmenter:
    """Random weights; at mid-grey all logits are 0, so that small changes around it decide."""
    weight = torch.randn(num_classes, channels, generator=torch.Generator().manual_seed(seed))
    return Segmenter(Linear(weight, -0.5 * weight.sum(1)))


def smallest_untargeted(model: Segmenter, images: Tensor, labels: Tensor) -> Tensor:
    """Per pixel, the least linf perturbation that makes another class's logit the largest (away from the box)."""
    weight = model.model.weight
    logits = model(images)
    own = logits.gather(1, labels[:, None])
    reach = (weight[labels][..., None, :] - weight).abs().sum(-1).movedim(-1, 1)  # ||w_y - w_j||_1
    sizes = ((own - logits) / reach).masked_fill(reach == 0, torch.inf)
    return sizes.amin(1).clamp(min=0).detach()


def smallest_targeted(images: Tensor, targets: Tensor) -> Tensor:
    """The same towards a target, for `channels_as_logits`: raise the target's channel and lower all others by beta."""
    gaps = (images - images.gather(1, targets[:, None])) / 2
    return gaps.amax(1).clamp(min=0)


def smallest_norm(sizes: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """The least norm of each image that breaks a share `threshold` of its counted pixels."""
    best = []
    for size, counted in zip(sizes, mask):
        ordered = size[counted].sort().values
        best.append(ordered[int(torch.tensor(threshold * len(ordered) - 1e-9).ceil()) - 1])
    return torch.stack(best)


def prox_by_sorting(point: Tensor, step: Tensor, lower: Tensor, upper: Tensor, metric: Tensor) -> Tensor:
    """The proximity operator of step * linf + box, by walking through the sorted sizes; float64, any batch.

    The derivative of the objective in beta is step - sum over {size > beta} of metric * (|point| - beta): between two
    sizes it is linear, so the root lies where a segment crosses zero, or at a size where it jumps across.
    """
    result = []
    for p, s, lo, hi, h in zip(*(t.double().flatten(1) for t in (point, step[:, None], lower, upper, metric))):
        clipped = p.clamp(lo, hi)
        order = clipped.abs().argsort(descending=True)
        sizes = torch.cat([clipped.abs()[order], torch.zeros(1, dtype=torch.float64)])
        beta = sizes[0] if s.item() == 0 else torch.zeros((), dtype=torch.float64)
        weight_sum = moment_sum = 0.0
        for i, index in enumerate(order.tolist()):
            if s.item() == 0:
                break
            weight_sum += h[index].item()
            moment_sum += (h[index] * p[index].abs()).item()
            root = (moment_sum - s.item()) / weight_sum  # zero of the derivative while exactly these are clipped
            if root >= sizes[i].item():  # the derivative jumps across zero at this size
                beta = sizes[i]
                break
            if root >= sizes[i + 1].item():
                beta = torch.tensor(root, dtype=torch.float64)
                break
        result.append(clipped.clamp(-beta, beta))
    return torch.stack(result).view(point.shape)
