"""Input gradients that hold almost nothing, and are the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import segprox
from segprox import Segmenter
from segprox.models import held_bytes, make_lean
from segprox.models.lean import OPERATIONS, LeanOperations, masks
from segprox.models.lean.make import _gradient
from segprox.models.lean.masks import pack_bits, select


@given(st.lists(st.booleans(), max_size=70), st.sampled_from([0.0, 0.1]))
def test_packed_masks_select(mask, otherwise):
    mask = torch.tensor(mask, dtype=torch.bool)
    values = torch.randn(len(mask), dtype=torch.float64)
    packed = pack_bits(mask)
    assert packed.numel() == (len(mask) + 7) // 8
    torch.testing.assert_close(select(values, packed, otherwise), torch.where(mask, values, values * otherwise))


def test_selection_in_chunks(monkeypatch):
    monkeypatch.setattr(masks, "_CHUNK", 3)
    mask, values = torch.rand(5, 41) > 0.5, torch.randn(5, 41)
    assert torch.equal(select(values, pack_bits(mask)), values * mask)
    turned = values.t()  # not contiguous
    assert torch.equal(select(turned, pack_bits(mask.t())), turned * mask.t())


def both(network, images):
    """The gradient of a random combination of outputs, plain and lean, and the bytes held by each."""
    network = network.double().eval().requires_grad_(False)
    found = []
    for operations in (None, LeanOperations()):
        held = {}

        def pack(value, held=held):
            held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        own = {value.untyped_storage().data_ptr() for value in [*network.parameters(), *network.buffers()]}
        point = images.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            if operations is None:
                outputs = network(point * 1)  # not a leaf, so that operations may work in place
            else:
                with operations:
                    outputs = network(point * 1)
        weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        (gradient,) = torch.autograd.grad(outputs, point, weights)
        found.append((gradient, outputs, sum(size for key, size in held.items() if key not in own)))
    return found


def assert_same_and_smaller(network, images, share):
    (plain, expected, held), (gradient, outputs, lean_held) = both(network, images)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, plain, rtol=1e-12, atol=1e-12)
    assert lean_held <= share * held


IMAGES = torch.randn(2, 4, 17, 22, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@settings(max_examples=60)
@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    groups=st.sampled_from([1, 2, 4]),
    mode=st.sampled_from(["zeros", "reflect", "replicate"]),
    bias=st.booleans(),
)
def test_convolutions(kernel, stride, padding, dilation, groups, mode, bias):
    torch.manual_seed(0)
    network = nn.Conv2d(4, 8, kernel, stride, padding, dilation, groups, bias, mode)
    assert_same_and_smaller(network, IMAGES, 0.02)


@settings(max_examples=40)
@given(
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
)
def test_transposed_convolutions(kernel, stride, padding, dilation, groups):
    torch.manual_seed(0)
    extra = min(stride, dilation + 1) - 1
    network = nn.ConvTranspose2d(4, 6, kernel, stride, padding, extra, groups, dilation=dilation)
    assert_same_and_smaller(network, IMAGES, 0.02)


@pytest.mark.parametrize(
    "network",
    [
        nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.ReLU6(inplace=True), nn.Hardtanh(-0.3, 0.5), nn.LeakyReLU(0.2),
        nn.LeakyReLU(0.2, inplace=True),
    ],
    ids=repr,
)  # fmt: skip
def test_gates_keep_a_bit_per_value(network):
    assert_same_and_smaller(network, IMAGES, 1 / 60)


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    "function",
    [torch.relu, functional.relu, lambda x: x.relu(), lambda x: (x * 2).relu_(), lambda x: torch.relu_(x + 1)],
)
def test_functions_and_methods_too(function):
    assert_same_and_smaller(Calls(function), IMAGES, 1 / 60)


def test_in_place_on_a_view_is_left_to_torch():
    def half(x):
        x = x * 2
        functional.relu(x[:, :2], inplace=True)
        return x

    (plain, _, _), (gradient, _, _) = both(Calls(half), IMAGES)
    torch.testing.assert_close(gradient, plain)


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm(affine):
    network = nn.BatchNorm2d(4, affine=affine)
    network.running_mean.normal_()
    network.running_var.uniform_(0.5, 2)
    assert_same_and_smaller(network, IMAGES, 0.05)


@pytest.mark.parametrize(
    "network",
    [
        nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 1, 1), nn.MaxPool2d((2, 3), (1, 2), (1, 0)),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.MaxPool2d(2, 2, 0, 2),
    ],
    ids=repr,
)  # fmt: skip
def test_max_pooling(network):
    assert_same_and_smaller(network, IMAGES, 0.15)


def test_attention_without_its_weights():
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            tokens = x.flatten(2).transpose(1, 2)
            return self.attention(tokens, tokens, tokens)[0]

    assert_same_and_smaller(Attention(), IMAGES, 0.2)


def test_trained_or_training_networks_are_left_alone():
    network = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))  # weights that want gradients
    with LeanOperations():
        network(IMAGES.float().requires_grad_()).sum().backward()
    assert network[0].weight.grad is not None
    assert network[1].weight.grad is not None


@pytest.mark.parametrize("again", [False, True])
def test_a_whole_model(again):
    images = torch.rand(1, 3, 64, 96)
    plain, model = segprox.load_model("demo-standard"), segprox.load_model("demo-standard")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    found = make_lean(model, again=again)
    assert found.plain == ()
    assert found.error < 1e-12
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert held_bytes(model, images) < held_bytes(plain, images) / 60
    scene = segprox.load_dataset("demo")[1]
    results = [
        segprox.attack(m, scene.image[None], scene.label[None], "pgd", steps=3, epsilon="4/255") for m in (plain, model)
    ]
    assert results[0].apsr.item() == pytest.approx(results[1].apsr.item(), abs=0.01)


def test_blocks_are_computed_again():
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = nn.Linear(3, 12), nn.Linear(12, 3)

        def forward(self, x):
            return x + self.narrow(functional.gelu(self.wide(x.movedim(1, 3)))).movedim(3, 1)

    network = nn.Sequential(nn.Sequential(*[Block() for _ in range(4)]), nn.Conv2d(3, 4, 1))
    plain, model = Segmenter(network), Segmenter(network)
    images = torch.rand(1, 3, 32, 32)
    before, expected = held_bytes(plain, images), _gradient(plain, images, plain.operations)
    make_lean(model)
    middle = held_bytes(model, images)
    again = make_lean(model, again=True)
    assert again.blocks == 4
    assert held_bytes(model, images) < middle <= before
    torch.testing.assert_close(_gradient(model, images, model.operations), expected)


def test_an_operation_that_is_wrong_is_found_and_left_plain(monkeypatch):
    def wrong(input, inplace=False):
        return input * 0.9 if input.requires_grad else NotImplemented

    monkeypatch.setitem(OPERATIONS, "relu", (wrong, (functional.relu, torch.relu)))
    model = segprox.load_model("demo-standard")
    found = make_lean(model)
    assert found.plain == ("relu",)
    assert found.error < 1e-12

    def broken(*_, **__):
        raise TypeError("no")

    monkeypatch.setitem(OPERATIONS, "batch norm", (broken, (functional.batch_norm,)))
    assert set(make_lean(model).plain) == {"relu", "batch norm"}


def test_lower_precision():
    images = torch.rand(1, 3, 64, 96)
    model = segprox.load_model("demo-standard?precision=bfloat16&lean=true")
    assert model.autocast is torch.bfloat16
    gradient = _gradient(model, images, model.operations)
    expected = _gradient(segprox.load_model("demo-standard?precision=bfloat16"), images, LeanOperations(OPERATIONS))
    cosine = functional.cosine_similarity(gradient.flatten(), expected.flatten(), dim=0)
    assert cosine > 0.98


def test_a_network_that_insists_on_single_precision():
    class Insists(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            assert x.dtype == torch.float32 or (_ for _ in ()).throw(RuntimeError("single precision only"))
            return self.inner(x).relu()

    assert make_lean(Segmenter(Insists())).plain == ()


def test_a_network_that_cannot_be_checked_stays_plain():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            assert x.shape[2] == 40, "another size, please"
            return self.inner(x).relu()

    model, images = Segmenter(Picky()), torch.rand(1, 3, 40, 40)
    before = held_bytes(model, images)
    assert set(make_lean(model).plain) == set(OPERATIONS)
    assert held_bytes(model, images) == before
    assert make_lean(model, size=(40, 40)).plain == ()
    assert held_bytes(model, images) < before / 10


def test_small_networks_are_left_alone_when_nobody_insists():
    plain, auto, lean_one = (segprox.load_model(f"demo-standard?lean={how}") for how in ("false", "auto", "true"))
    images = torch.rand(1, 3, 64, 96)
    assert held_bytes(auto, images) == held_bytes(plain, images) > 10 * held_bytes(lean_one, images)
    assert make_lean(auto, at_least=100).plain == ()
    assert held_bytes(auto, images) == held_bytes(lean_one, images)
