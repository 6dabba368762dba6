"""Exported networks: what is loaded is what onnxruntime runs, and what cannot be loaded is told."""

import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn

import segprox
from segprox import SegproxError
from segprox.models.sources import onnx as source

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
if find_spec("onnx2torch") is None:  # which may need the stand-in for torchvision to be imported
    pytest.skip("onnx2torch is not installed", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")  # exporters warn of each other, and of themselves
FLOAT, INT64, UINT8 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.UINT8


class Net(nn.Module):
    """Strides, a batch norm, pooling over the image and logits at a quarter of its size, twice enlarged."""

    def __init__(self, classes=4):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.last = nn.Conv2d(8, classes, 1)

    def forward(self, x):
        x = self.second(self.first(x))
        x = x + torch.sigmoid(x.mean((2, 3), keepdim=True))
        return nn.functional.interpolate(self.last(x), scale_factor=2.0, mode="bilinear", align_corners=False)


def exported(path, network, fixed=False, opset=17):
    """By the exporter that needs no tracing by dynamo, which takes long and another package."""
    axes = {} if fixed else {"image": {0: "batch", 2: "height", 3: "width"}}
    torch.onnx.export(
        network.eval(), (torch.rand(1, 3, 32, 48),), path, input_names=["image"], dynamic_axes=axes, dynamo=False,
        opset_version=opset,
    )  # fmt: skip
    return path


def made(path, nodes, weights=(), *, takes=(FLOAT, ["b", 3, "h", "w"]), returns=(FLOAT, ["b", 3, "h", "w"]), opset=17):
    """A file of these nodes from `image` to `logits`."""
    helper = onnx.helper
    inputs, outputs = (
        [helper.make_tensor_value_info(name, *kind)] for name, kind in (("image", takes), ("logits", returns))
    )
    graph = helper.make_graph(nodes, "graph", inputs, outputs, [onnx.numpy_helper.from_array(v, n) for n, v in weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(model, path)
    return path


def node(kind, inputs, outputs=("logits",), **attributes):
    return onnx.helper.make_node(kind, list(inputs), list(outputs), **attributes)


def answer(path, images):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])


def at_size(logits, size):
    return nn.functional.interpolate(logits, size=size, mode="bilinear", align_corners=False)


@pytest.mark.parametrize("opset", [13, 17, 20])
def test_logits_are_those_of_onnxruntime_and_gradients_those_of_the_network(tmp_path, opset):
    network = Net()
    path = exported(tmp_path / "net.onnx", network, opset=opset)
    model = segprox.load_model(f"onnx:{path}?mean=0.4,0.5,0.6&std=0.2,0.3,0.4&multiple=4")
    images = torch.rand(2, 3, 40, 56)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
    theirs = at_size(answer(path, (images - mean) / std), (40, 56))
    torch.testing.assert_close(model(images), theirs, rtol=1e-4, atol=1e-5)
    plain = segprox.Segmenter(network, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    weights, gradients = torch.randn_like(theirs), []
    for each in (model, plain):
        points = images.clone().requires_grad_()
        gradients.append(torch.autograd.grad(each.logits(points), points, weights)[0])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_a_network_of_one_size_is_fed_that_size(tmp_path):
    path = exported(tmp_path / "net.onnx", Net(), fixed=True)
    images = torch.rand(2, 3, 50, 70)
    fed = at_size(images, (32, 48))
    theirs = at_size(torch.cat([answer(path, image[None]) for image in fed]), (50, 70))
    model = segprox.load_model(f"onnx:{path}")
    assert model.resize == (32, 48)
    torch.testing.assert_close(model(images), theirs, rtol=1e-4, atol=1e-5)
    windowed = segprox.load_model(f"onnx:{path}?window=32x48&stride=16")
    assert windowed.resize is None
    assert windowed(images).shape == (2, 4, 50, 70)
    with pytest.raises(SegproxError, match="takes images of 32x48 only but is fed 20x48"):
        windowed(torch.rand(1, 3, 20, 70))
    with pytest.raises(SegproxError, match="takes images of 32x48 only, so leave out resize"):
        segprox.load_model(f"onnx:{path}?resize=64x64")


def test_lean_and_attacked(tmp_path):
    path = exported(tmp_path / "net.onnx", Net())
    model = segprox.load_model(f"onnx:{path}?lean=true")
    images = torch.rand(1, 3, 32, 48)
    result = segprox.attack(model, images, model(images).argmax(1), "fmn", steps=5)
    assert result.norm.isfinite().all()


def test_names_of_nodes_are_never_code(tmp_path):
    """Torch writes a network's code from the names of its parts; a file must not write it."""
    marker = tmp_path / "ran"
    path = made(tmp_path / "net.onnx", [node("Relu", ["image"], name=f'a"), open("{marker}", "w')])
    model = segprox.load_model(f"onnx:{path}?output=logits")
    model(torch.rand(1, 3, 8, 8))
    assert not marker.exists()
    assert "open" not in model.model.converted.code


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y * 1.01, "is another network: its logits differ from onnxruntime's by .* of their range"),
        (lambda y: y * torch.nan, "is another network: its logits differ"),
        (lambda y: y.detach(), "has another gradient: .* by 100% of its size"),
        (lambda y: torch.cat([y[:, :2], y[:, 2:].detach()], 1), "has another gradient"),
        (lambda y: y[:, :, ::2], "should return logits .* in torch"),
    ],
)
def test_a_conversion_that_changes_the_network_is_refused(tmp_path, monkeypatch, change, message):
    path = exported(tmp_path / "net.onnx", Net())
    first = source.Exported._first
    monkeypatch.setattr(source.Exported, "_first", lambda self, images: change(first(self, images)))
    with pytest.raises(SegproxError, match=message):
        segprox.load_model(f"onnx:{path}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"nodes": [node("Det", ["image"], ["d"]), node("Expand", ["image", "s"])],
          "weights": [("s", np.ones(4, np.int64))]}, "operators that onnx2torch cannot convert: Det"),
        ({"nodes": [node("ArgMax", ["image"], axis=1)], "returns": (INT64, ["b", 1, "h", "w"])},
         "first output is int64: export it"),
        ({"nodes": [node("Cast", ["image"], to=FLOAT)], "takes": (UINT8, ["b", 3, "h", "w"])}, "but takes uint8"),
        ({"nodes": [node("Relu", ["image"])], "takes": (FLOAT, [1, 32, 32, 3]), "returns": (FLOAT, [1, 32, 32, 3])},
         r"\[batch, channels, height, width\] but takes \[1, 32, 32, 3\]"),
        ({"nodes": [node("Relu", ["image"])], "takes": (FLOAT, ["b", 3]), "returns": (FLOAT, ["b", 3])},
         r"but takes \[\?, 3\]"),
        ({"nodes": [node("Relu", ["image"])], "takes": (FLOAT, [4, 3, 32, 32])}, "batches of 4 only; export it with"),
        ({"nodes": [node("Relu", ["image"])], "takes": (FLOAT, [1, 3, 32, "w"])}, "one size or of any size but takes"),
        ({"nodes": [node("Reshape", ["image", "s"])], "weights": [("s", np.array([1, 3, 32, 48]))],
          "returns": (FLOAT, [1, 3, 32, 48])}, "cannot be run by onnxruntime on random images of 128x256"),
        ({"nodes": [node("GlobalAveragePool", ["image"], ["g"]), node("Flatten", ["g"])], "returns": (FLOAT, ["b", 3])},
         r"should return logits .* but returns \[2, 3\]"),
    ],
)  # fmt: skip
def test_refused(tmp_path, content, message):
    path = made(tmp_path / "net.onnx", **content)
    with pytest.raises(SegproxError, match=message):
        segprox.load_model(f"onnx:{path}")


def test_files_and_options_that_are_refused(tmp_path):
    path = exported(tmp_path / "net.onnx", Net())
    with pytest.raises(SegproxError, match=r"there is no file .*missing\.onnx"):
        segprox.load_model(f"onnx:{tmp_path / 'missing.onnx'}")
    for content in (b"", b"not a network", path.read_bytes()[:-50]):
        (tmp_path / "other.onnx").write_bytes(content)
        with pytest.raises(SegproxError, match=r"other\.onnx cannot be read as an ONNX model"):
            segprox.load_model(f"onnx:{tmp_path / 'other.onnx'}")
    for option in ("checkpoint=random", "num_classes=3"):
        with pytest.raises(SegproxError, match="has its own weights, so leave out"):
            segprox.load_model(f"onnx:{path}?{option}")


def test_what_is_missing_is_told(tmp_path, monkeypatch):
    path = exported(tmp_path / "net.onnx", Net())
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(SegproxError, match=r"onnxruntime.*segprox\[onnx\]"):
        segprox.load_model(f"onnx:{path}")


def test_torchvision_that_cannot_be_imported_is_not_needed(tmp_path, monkeypatch):
    path = exported(tmp_path / "net.onnx", Net())
    for name in [name for name in sys.modules if name.split(".")[0] in ("onnx2torch", "torchvision")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)  # an import of it fails
    assert segprox.load_model(f"onnx:{path}")(torch.rand(1, 3, 32, 48)).shape == (1, 4, 32, 48)
    assert sys.modules["torchvision"] is None
