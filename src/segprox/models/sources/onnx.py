"""Exported networks: `onnx:FILE`, converted to torch by onnx2torch and compared with what onnxruntime makes of them."""

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from segprox.errors import SegproxError, explained
from segprox.models.options import ModelOptions
from segprox.models.sources.base import Network
from segprox.models.windows import Size, size_of
from segprox.optional import require
from segprox.text import from_home

OPSET = 17  # onnx2torch knows few of the operators that came later
SMALL = (128, 256)  # height and width that most networks take
LOGITS_TOLERANCE = 1e-4  # of the logits' range
SLOPE_TOLERANCE = 0.1  # of the gradient's size: a wrong one is off by about 1, kinks and rounding by a few hundredths
STEPS = (1e-3, 1e-4, 3e-5)  # of finite differences, in images of [0, 1]: large ones cross kinks, small ones round
MOVES = 3  # directions of finite differences
ROUNDING = 4 * torch.finfo(torch.float32).eps  # of a logit, relative to the largest


class Input(NamedTuple):
    """What a file says of the images it takes; None where it leaves a choice."""

    name: str
    batch: int | None
    channels: int
    size: Size | None


class Exported(nn.Module):
    """A converted network that keeps to the sizes it was exported with."""

    def __init__(self, converted: nn.Module, fed: Input) -> None:
        super().__init__()
        self.converted, self.fed = converted, fed

    def forward(self, images: Tensor) -> Any:
        """What the file's first output is for images `[B, C, H, W]`."""
        if self.fed.size is not None and self.fed.size != size_of(images):
            raise SegproxError(
                f"the exported network takes images of {_written(self.fed.size)} only but is fed "
                f"{_written(size_of(images))}; an image that is smaller than the window can be padded by multiple"
            )
        if self.fed.batch is None:
            return self._first(images)
        return torch.cat([self._first(image[None]) for image in images])

    def _first(self, images: Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # onnx2torch indexes in a way that torch warns of
            outputs = self.converted(images)
        return outputs[0] if isinstance(outputs, (list, tuple)) else outputs


def build(identifier: str, options: ModelOptions) -> Network:
    """The network of a file, if it does in torch what it does in onnxruntime."""
    what, path = f"onnx:{identifier}", from_home(identifier)
    options.refuse("checkpoint", "num_classes", by=f"{what} has its own weights")
    if not path.is_file():
        raise SegproxError(f"there is no file {path}")
    onnx, runtime = require("onnx", "onnx"), require("onnxruntime", "onnx")
    with explained(f"{path} cannot be read as an ONNX model"):
        onnx.checker.check_model(str(path))
        model = onnx.load(str(path))
    fed = _input(onnx, model, what)
    _check_outputs(onnx, model, what)
    with explained(f"{what} cannot be run by onnxruntime"):
        session = runtime.InferenceSession(str(path), _settings(runtime), providers=["CPUExecutionProvider"])
    network = Exported(_converted(onnx, runtime, model, what), fed).eval()
    if fed.size is not None and options.resize not in (None, fed.size):
        raise SegproxError(f"{what} takes images of {_written(fed.size)} only, so leave out resize")
    _compare(network, session, _size_to_try(fed, options), 255.0 if options.scale_255 else 1.0, what)
    windows = options.window == fed.size
    return Network(network, {} if fed.size is None or windows else {"resize": fed.size})


def _written(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def _input(onnx: Any, model: Any, what: str) -> Input:
    """The one input that is not a weight, if it takes images as torch has them."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    if len(inputs) != 1:
        names = ", ".join(value.name for value in inputs) or "none"
        raise SegproxError(f"{what} should take one input, images, but its inputs are: {names}")
    kind = inputs[0].type.tensor_type
    if kind.elem_type != onnx.TensorProto.FLOAT:
        found = onnx.TensorProto.DataType.Name(kind.elem_type).lower()
        raise SegproxError(f"{what} should take images as 32-bit floats, which have gradients, but takes {found}")
    shape = [dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim]
    shown = ", ".join("?" if side is None else str(side) for side in shape)
    if len(shape) != 4 or (shape[1] is not None and shape[1] > 4 >= (shape[3] or 5)):
        raise SegproxError(f"{what} should take images [batch, channels, height, width] but takes [{shown}]")
    batch, channels, height, width = shape
    if batch not in (None, 1):
        raise SegproxError(f"{what} takes batches of {batch} only; export it with a batch of 1 or of any size")
    if (height is None) != (width is None):
        raise SegproxError(f"{what} should take images of one size or of any size but takes [{shown}]")
    size = None if height is None or width is None else (height, width)
    return Input(inputs[0].name, batch, channels or 3, size)


def _check_outputs(onnx: Any, model: Any, what: str) -> None:
    kind = model.graph.output[0].type.tensor_type
    if kind.elem_type != onnx.TensorProto.FLOAT:
        found = onnx.TensorProto.DataType.Name(kind.elem_type).lower()
        raise SegproxError(
            f"{what} should return logits as 32-bit floats but its first output is {found}: export it without the last "
            "step that turns logits into labels"
        )


def _settings(runtime: Any) -> Any:
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.log_severity_level = 3  # errors
    return settings


def _converted(onnx: Any, runtime: Any, model: Any, what: str) -> nn.Module:
    """The network as a module of torch, by way of what onnx2torch understands."""
    with _torchvision_or_none():
        onnx2torch = require("onnx2torch", "onnx")
    model = _simplified(onnx, runtime, _at_known_opset(model, what), what)
    for i, node in enumerate(model.graph.node):
        # Names of nodes become part of Python code in torch.fx, and a file must never bring code of its own.
        node.name = f"node{i}"
    _refuse_unknown(model, what)
    with explained(f"{what} cannot be converted to torch"):
        converted: nn.Module = onnx2torch.convert(model)
    for module in converted.modules():
        if isinstance(module, nn.LayerNorm):  # onnx2torch takes a shape that it does not know for 0
            module.normalized_shape = tuple(module.weight.shape)
    return converted


def _at_known_opset(model: Any, what: str) -> Any:
    """The model with operators that onnx2torch knows, if there is such a version of it."""
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), OPSET)
    if opset <= OPSET:
        return model
    converter = require("onnx.version_converter", "onnx")
    with explained(
        f"{what} uses operator set {opset}, which cannot be expressed in set {OPSET} (with torch, export it with "
        f"opset_version={OPSET}, dynamo=False)"
    ):
        model = converter.convert_version(model, OPSET)
    for node in model.graph.node:  # left over by the converter
        left = [entry for entry in node.attribute if entry.name == "noop_with_empty_axes" and entry.i == 0]
        for entry in left if node.op_type.startswith("Reduce") else ():
            node.attribute.remove(entry)
    return model


def _simplified(onnx: Any, runtime: Any, model: Any, what: str) -> Any:
    """The model with constants in place of what is computed from constants: onnx2torch needs weights to be such."""
    settings = _settings(runtime)
    settings.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with tempfile.TemporaryDirectory() as folder, explained(f"{what} cannot be simplified by onnxruntime"):
        settings.optimized_model_filepath = str(Path(folder) / "simple.onnx")
        runtime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
        return onnx.load(settings.optimized_model_filepath)


def _refuse_unknown(model: Any, what: str) -> None:
    """Name all operators that onnx2torch does not know, not just the first."""
    find = require("onnx2torch.node_converters.registry", "onnx").get_converter
    versions = {entry.domain: entry.version for entry in model.opset_import}
    unknown = set()
    for node in model.graph.node:
        try:
            find(domain=node.domain, operation_type=node.op_type, version=versions[node.domain])
        except NotImplementedError:
            unknown.add(node.op_type)
    if unknown:
        raise SegproxError(f"{what} has operators that onnx2torch cannot convert: {', '.join(sorted(unknown))}")


@contextmanager
def _torchvision_or_none() -> Iterator[None]:
    """Let onnx2torch be imported where torchvision cannot be, as beside another build of torch.

    It imports torchvision for two operators that find boxes (NonMaxSuppression, RoiAlign); segmentation has no boxes.
    """
    try:
        import torchvision  # type: ignore[import-untyped,unused-ignore]  # noqa: F401
    except (ImportError, RuntimeError, OSError):
        missing, operations = ModuleType("torchvision"), ModuleType("torchvision.ops")
        missing.ops = operations  # type: ignore[attr-defined]
        operations.roi_align = None  # type: ignore[attr-defined]
        stand_in = {"torchvision": missing, "torchvision.ops": operations}
        before = {name: sys.modules[name] for name in stand_in if name in sys.modules}
        sys.modules.update(stand_in)
        try:
            yield
        finally:
            for name in stand_in:
                del sys.modules[name]
            sys.modules.update(before)
    else:
        yield


def _size_to_try(fed: Input, options: ModelOptions) -> Size:
    asked = fed.size or options.resize or (options.window if isinstance(options.window, tuple) else None)
    if asked is not None:
        return asked
    multiple = options.multiple or 1
    return SMALL[0] + -SMALL[0] % multiple, SMALL[1] + -SMALL[1] % multiple


def _compare(network: Exported, session: Any, size: Size, scale: float, what: str) -> None:
    """Refuse a network whose logits or gradient on random images in [0, scale] are not those of onnxruntime."""
    fed, draw = network.fed, torch.Generator().manual_seed(0)
    images = scale * torch.rand(fed.batch or 2, fed.channels, *size, generator=draw)

    def run(points: Tensor) -> Tensor:
        made: Tensor = torch.from_numpy(session.run(None, {fed.name: points.numpy()})[0])
        return made

    tried = f"on random images of {_written(size)} (resize=HEIGHTxWIDTH says another size)"
    with explained(f"{what} cannot be run by onnxruntime {tried}"):
        expected = run(images)
    points = images.clone().requires_grad_()
    with explained(f"{what}, converted to torch, cannot be run {tried}"):
        found = network(points)
    if expected.ndim != 4 or found.shape != expected.shape:
        raise SegproxError(
            f"{what} should return logits [batch, classes, height, width] but returns {list(expected.shape)}, and "
            f"{list(found.shape)} in torch"
        )
    spread = (expected.max() - expected.min()).clamp(min=torch.finfo(torch.float32).tiny)
    error = ((found.detach() - expected).abs().max() / spread).item()
    if not error <= LOGITS_TOLERANCE:  # nor NaN
        raise SegproxError(
            f"{what}, converted to torch, is another network: its logits differ from onnxruntime's by {error:.1e} of "
            "their range"
        )
    error = _slope_error(run, points, found, scale)
    if not error <= SLOPE_TOLERANCE:
        raise SegproxError(
            f"{what}, converted to torch, has another gradient: it differs from finite differences of onnxruntime's "
            f"logits by {error:.0%} of its size"
        )


def _slope_error(run: Callable[[Tensor], Tensor], points: Tensor, found: Tensor, scale: float) -> float:
    """How far slopes are from finite differences of `run`, as a share of what slopes usually are, at the best step.

    Slopes are those of a random combination of logits along random moves of every value of the images, up or down.
    They are not compared at steps that rounding hides them at; where it does at all, nothing can be said, which is 0.
    """
    draw = torch.Generator().manual_seed(1)
    weights = torch.randn(found.shape, generator=draw)
    gradient, images = torch.zeros_like(points), points.detach()
    if found.requires_grad:
        (gradient,) = torch.autograd.grad(found, points, weights, allow_unused=True, materialize_grads=True)
    moves = [torch.randint(0, 2, images.shape, generator=draw) * 2.0 - 1 for _ in range(MOVES)]
    slopes = torch.stack([(gradient.double() * move).sum() for move in moves])
    rounding = ROUNDING * found.detach().abs().max() * weights.norm()
    errors = []
    for step in (scale * step for step in STEPS):
        changes = [run(images + step * move).double() - run(images - step * move).double() for move in moves]
        differences = torch.stack([(weights * change).sum() for change in changes]) / (2 * step)
        usual = torch.maximum(gradient.double().norm(), differences.square().mean().sqrt())
        if rounding / (2 * step) < SLOPE_TOLERANCE * usual:
            errors.append(float((slopes - differences).square().mean().sqrt() / usual))
    return min(errors, default=0.0)
