"""The one thing attacks see of a model: images in [0, 1] in, logits at the images' size out."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from segprox.bands import Range, read_range
from segprox.devices import without_tf32
from segprox.errors import SegproxError
from segprox.models.outputs import fitted, looks_like_probabilities, unwrapped, within_unit_interval
from segprox.models.windows import (
    Augmentation,
    Size,
    View,
    average_of_views,
    average_of_windows,
    checked_windows,
    places,
    size_of,
    views_of,
)
from segprox.problem import check_range

OutputKind = Literal["auto", "logits", "probabilities"]


class Segmenter(nn.Module):
    """Any segmentation network, seen as float images `[B, C, H, W]` in [0, 1] to logits `[B, K, H, W]`.

    The network is used in place: it is put into eval mode and its parameters are frozen (see `restored`). It may return
    a tensor, a tuple or list (its first entry), a dict with `out` or `logits`, or an object with `.logits`.

    Args:
        model: the network.
        mean: what is subtracted from each channel, in the units the network was trained with (after `scale_255`).
        std: what each channel is then divided by.
        bgr: the network expects blue first.
        scale_255: the network expects values in 0..255.
        range: the network expects values in this range, (lowest, highest) for all bands or a sequence of such pairs,
            one for each; images are shares of it.
        channels: keep these channels of the output only, in this order.
        binary: the network has one output channel, the logit (or probability) of class 1; it is seen as two logits.
        output: what the network returns: `logits`; `probabilities`, which are turned into logits by a logarithm; or
            `auto`, logits too, but refused if they look like probabilities.
        multiple: the network needs sides that are multiples of this: normalised images are padded with zeros at the
            bottom and the right, and the logits are cropped.
        resize: the network takes images of this height and width only: they are resized to it, the logits back.
        window, stride: the network is used by windows of this height and width, so far apart (by default side by side);
            logits are averaged where they overlap. See docs/how-to/windows.md.
        tta: the network is used at these scales, and mirrored if `"flip"` is among them; probabilities are averaged.
        channels_last: keep weights and images in that memory format, which is faster on many GPUs.
        class_names: names of the output's classes, where known.

    Example:
        >>> import torch, segprox
        >>> network = torch.nn.Conv2d(3, 5, kernel_size=3, stride=2, padding=1)
        >>> segmenter = segprox.Segmenter(network, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
        >>> segmenter(torch.rand(1, 3, 32, 64)).shape
        torch.Size([1, 5, 32, 64])
    """

    mean: Tensor
    std: Tensor
    low: Tensor
    width: Tensor

    def __init__(
        self,
        model: nn.Module,
        *,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
        bgr: bool = False,
        scale_255: bool = False,
        range: tuple[float, float] | Sequence[tuple[float, float]] | None = None,
        channels: Sequence[int] | None = None,
        binary: bool = False,
        output: OutputKind = "auto",
        multiple: int = 1,
        resize: Size | None = None,
        window: Size | None = None,
        stride: int | Size | None = None,
        tta: Sequence[Augmentation] = (),
        channels_last: bool = False,
        class_names: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if not all(0 < value < math.inf for value in std) or not all(map(math.isfinite, mean)):
            raise SegproxError(f"std must be positive and mean finite but they are {list(std)} and {list(mean)}")
        if multiple < 1 or (multiple > 1 and resize is not None):
            raise SegproxError(f"multiple must be at least 1, and 1 beside resize, but is {multiple}")
        if output not in get_args(OutputKind):
            raise SegproxError(f"output must be one of {', '.join(get_args(OutputKind))} but is {output!r}")
        if range is not None and scale_255:
            raise SegproxError(f"range={list(range)} and scale_255 both say what the network expects; leave one out")
        self.model = model
        like = next(model.parameters(), torch.empty(0))
        dtype = like.dtype if like.is_floating_point() else torch.float32
        # Kept out of the state dict: they describe how the network is fed, they are not weights.
        self.register_buffer("mean", torch.tensor(mean, dtype=dtype, device=like.device).view(-1, 1, 1), False)
        self.register_buffer("std", torch.tensor(std, dtype=dtype, device=like.device).view(-1, 1, 1), False)
        self.bgr, self.scale_255, self.binary, self.output = bgr, scale_255, binary, output
        self.range: Range | None = None
        if range is not None:
            self.use_range(read_range(range))
        self.channels = None if channels is None else list(channels)
        self.multiple, self.resize, self.channels_last = multiple, resize, False
        self.use_windows(window, stride)
        self.use_views(tta)
        self.class_names = tuple(class_names)
        self.autocast: torch.dtype | None = None  # the precision of most of the network's operations, if lower
        self.fused = False  # whether small pieces of attacks on it are compiled
        self.operations: AbstractContextManager[Any] = nullcontext()  # within which the network runs: see `lean`
        if channels_last:
            self.use_channels_last()
        self._plain = not bgr and not scale_255 and not range and tuple(mean) == (0.0,) and tuple(std) == (1.0,)
        self.found_training = [name for name, module in model.named_modules() if module.training]  # for `check`
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "Segmenter":
        """Stay in eval mode, whatever is asked: a robustness figure of a network in train mode is meaningless."""
        return super().train(False)

    def use_channels_last(self) -> None:
        """Keep weights and images in that memory format from now on."""
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing from torch's hints
        self.channels_last = True

    def use_range(self, values: Range) -> None:
        """Feed the network values in this range from now on."""
        ends = self.mean.new_tensor(values)
        self.register_buffer("low", ends[:, 0].view(-1, 1, 1), False)
        self.register_buffer("width", (ends[:, 1] - ends[:, 0]).view(-1, 1, 1), False)
        self.range, self._plain = values, False

    def use_windows(self, window: Size | None, stride: int | Size | None = None) -> None:
        """Use the network by windows of this height and width, so far apart, from now on; None: on whole images."""
        if window is not None:
            self._refuse_for_one_size()
        self.window, self.stride = checked_windows(window, stride, self.multiple)

    def use_views(self, tta: Sequence[Augmentation]) -> None:
        """Use the network at these scales, and mirrored if `"flip"` is among them, from now on."""
        views = views_of(tta)
        if any(view.scale != 1 for view in views):
            self._refuse_for_one_size()
        self.tta, self.views = tuple(tta), views

    def _refuse_for_one_size(self) -> None:
        if self.resize is not None:
            raise SegproxError("a network that takes one size only (resize) has neither windows nor scales")

    @property
    def device(self) -> torch.device:
        """Where the network lives."""
        return self.mean.device

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[B, K, H, W]` of images `[B, C, H, W]`, with every check of the input and the output."""
        check_range(images)
        if any(module.training for module in self.modules()):  # someone called train() on the network itself
            self.eval()
        return self._logits(images, self._check_output)

    def logits(self, images: Tensor) -> Tensor:
        """Like `forward` without looking at values, hence without waiting for the device: for attack loops."""
        return self._logits(images, None)

    def in_one_piece(self, images: Tensor) -> Tensor:
        """Logits of whole images, once: without windows, scales and flips. What the network itself is measured by."""
        return self._look(images, View(), self._network(images), None, None)

    def pieces(self, size: Size) -> list[Size]:
        """Height and width of all that the network is fed for an image of that size."""
        fed = [_padded(view.size(size), self.multiple) for view in self.views or (View(),)]
        windows = [window for each in fed for window in places(each, self.window, self.stride)]
        return [(rows.stop - rows.start, columns.stop - columns.start) for rows, columns in windows]

    def _logits(self, images: Tensor, check: Callable[[Tensor], None] | None) -> Tensor:
        look = partial(self._look, network=self._network(images), window=self.window, check=check)
        if not self.views:
            return look(images, View())
        return average_of_views(images, [partial(look, view=view) for view in self.views])

    def _look(
        self,
        images: Tensor,
        view: View,
        network: Callable[..., Tensor],
        window: Size | None,
        check: Callable[[Tensor], None] | None,
    ) -> Tensor:
        """Logits of images at their size, from one view of them; `check` sees those of the view."""
        seen = view.see(images)
        prepared = self._prepare(seen)
        windows = places(size_of(prepared), window, self.stride)
        if len(windows) > 1:
            logits = average_of_windows(prepared, network, windows)
        else:
            logits = network(prepared, size_of(prepared if self.resize is None else seen))
        logits = logits[:, :, : seen.shape[2], : seen.shape[3]]
        if check is not None:
            check(logits.detach())
        return view.back(logits, size_of(images))

    def _network(self, images: Tensor) -> Callable[..., Tensor]:
        """The network as it is used for these images now, and again in their backward."""
        return partial(self._run, dtype=images.dtype, autocast=self.autocast)

    def _run(
        self, prepared: Tensor, size: Size | None = None, *, dtype: torch.dtype, autocast: torch.dtype | None
    ) -> Tensor:
        """Logits of what the network is fed, at that size or at the one of `prepared`."""
        lower = nullcontext() if autocast is None else torch.autocast(prepared.device.type, autocast)
        with self.operations, lower:
            outputs = unwrapped(self.model(prepared))
        outputs = outputs.to(dtype)  # attacks compute in one precision, whatever the network's is
        if self.channels is not None:
            if max(self.channels) >= outputs.shape[1]:
                raise SegproxError(
                    f"channels {self.channels} do not fit a model with {outputs.shape[1]} output channels"
                )
            outputs = outputs[:, self.channels]
        outputs = fitted(self._as_logits(outputs), size_of(prepared), size or size_of(prepared))
        if outputs.shape[1] < 2:
            raise SegproxError(
                "the model has one output channel; pass binary=True if it is the logit of the foreground class"
            )
        return outputs

    def full_precision(self, images: Tensor) -> Tensor:
        """Like `logits` in the precision of the weights, without TF32: what counts when an attack claims a success."""
        lower, self.autocast = self.autocast, None
        try:
            with without_tf32():
                return self.logits(images)
        finally:
            self.autocast = lower

    def described(self) -> dict[str, Any]:
        """How the network is fed and read, as plain data: beside its weights, all that determines the logits."""
        return {
            "network": type(self.model).__name__,
            "mean": self.mean.flatten().tolist(),
            "std": self.std.flatten().tolist(),
            "channels": self.channels,
            "precision": str(self.autocast or self.mean.dtype),
            **{name: getattr(self, name) for name in ("bgr", "scale_255", "binary", "output", "multiple", "resize")},
            # Only where they are used: results of other models stay known by what described them before.
            **{name: getattr(self, name) for name in ("range", "window", "stride", "tta") if getattr(self, name)},
        }

    def _prepare(self, images: Tensor) -> Tensor:
        self._check_bands(images.shape[1])
        images = images.to(self.mean.dtype)
        if self.resize is not None:
            images = functional.interpolate(images, size=self.resize, mode="bilinear", align_corners=False)
        if not self._plain:
            images = self._normalise(images)
        if self.multiple > 1:
            (height, width), (fed_height, fed_width) = size_of(images), _padded(size_of(images), self.multiple)
            images = functional.pad(images, (0, fed_width - width, 0, fed_height - height))
        return images.to(memory_format=torch.channels_last) if self.channels_last else images

    def _normalise(self, images: Tensor) -> Tensor:
        if self.range is not None:
            images = images * self.width + self.low
        if self.bgr:
            images = images.flip(1)
        if self.scale_255:
            images = images * 255
        return (images - self.mean) / self.std

    def _check_bands(self, count: int) -> None:
        lengths = {"range": len(self.range or "-"), "mean": len(self.mean), "std": len(self.std)}
        for name, length in lengths.items():
            if length not in (1, count) and (count > 1 or name == "range"):  # a grey image is all colours of a mean
                raise SegproxError(f"images have {count} bands but {name} of the model is for {length}")

    def _as_logits(self, outputs: Tensor) -> Tensor:
        if self.binary:
            if outputs.shape[1] != 1:
                raise SegproxError(f"binary=True needs one output channel but the model has {outputs.shape[1]}")
            # softmax of (0, z) is (1 - sigmoid(z), sigmoid(z))
            other = 1 - outputs if self.output == "probabilities" else torch.zeros_like(outputs)
            outputs = torch.cat([other, outputs], dim=1)
        if self.output == "probabilities":
            outputs = outputs.clamp(min=torch.finfo(outputs.dtype).tiny).log()
        return outputs

    def _check_output(self, logits: Tensor) -> None:
        if self.output != "auto" or logits.numel() == 0:
            return
        if not self.binary and looks_like_probabilities(logits):
            raise SegproxError(
                "the model seems to return probabilities (all in [0, 1] and summing to 1), which hide gradients; "
                "return logits, or pass output='probabilities'"
            )
        if self.binary and within_unit_interval(logits[:, 1]):  # a logit nearly never is, on a whole image
            raise SegproxError(
                "the model's one channel seems to be a probability (all in [0, 1]); return its logit, or say what it "
                "is with output='probabilities' or output='logits'"
            )


def _padded(size: Size, multiple: int) -> Size:
    """The size with sides that are multiples."""
    return size[0] + -size[0] % multiple, size[1] + -size[1] % multiple


def copy_wrapper(model: Segmenter) -> Segmenter:
    """A copy of the wrapper around the same network."""
    return deepcopy(model, {id(model.model): model.model})  # deepcopy takes what is in its memo for copied already


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Put train/eval modes and `requires_grad` of `model` back as they were when the block ends."""
    modes = [(module, module.training) for module in model.modules()]
    grads = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, requires_grad in grads:
            parameter.requires_grad_(requires_grad)
