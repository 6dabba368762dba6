"""Input gradients that hold almost nothing, and are the same."""

import subprocess
import sys
from pathlib import Path

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
from segprox.models.lean.masks import pack_bits, select
from segprox.models.lean.self_check import gradient_on


@given(st.lists(st.booleans(), max_size=70), st.sampled_from([0.0, 0.1]))
def test_packed_masks_select(mask, otherwise):
    mask = torch.tensor(mask, dtype=torch.bool)
    values = torch.randn(len(mask), dtype=torch.float64)
    packed = pack_bits(mask)
    assert packed.numel() == (len(mask) + 7) // 8
    torch.testing.assert_close(select(values, packed, otherwise), torch.where(mask, values, values * otherwise))


@given(st.lists(st.booleans(), max_size=70))
def test_devices_pack_alike(mask):
    mask = torch.tensor(mask, dtype=torch.bool)
    packed = masks._pack_anywhere(mask)
    assert torch.equal(packed, pack_bits(mask))
    assert torch.equal(masks._unpack_anywhere(packed), masks._unpack_bits(packed))
    assert torch.equal(masks._unpack_bits(packed)[: len(mask)].bool(), mask)


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
        nn.LeakyReLU(0.2, inplace=True), nn.Hardtanh(-0.3, 0.5, inplace=True), nn.PReLU(), nn.PReLU(4),
    ],
    ids=repr,
)  # fmt: skip
def test_gates_keep_a_bit_per_value(network):
    if isinstance(network, nn.PReLU):
        nn.init.uniform_(network.weight, -0.5, 0.5)
    assert_same_and_smaller(network, IMAGES, 1 / 60)
    assert_same_and_smaller(network, IMAGES.mul(10).round().div(10), 1 / 60)  # with values at the kinks themselves


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    "function",
    [
        torch.relu, functional.relu, lambda x: x.relu(), lambda x: (x * 2).relu_(), lambda x: torch.relu_(x + 1),
        lambda x: x.clamp(-0.3, 0.5), lambda x: torch.clamp(x, min=0.3), lambda x: x.clip(max=0.3),
        lambda x: torch.clamp_(x + 0, -0.3, 0.5), lambda x: (x * 1).clamp_(0, 1), lambda x: x.clip_(0, 1),
        lambda x: functional.hardtanh_(x * 1, -0.3, 0.5), lambda x: functional.leaky_relu_(x * 1, 0.3),
    ],
)  # fmt: skip
def test_functions_and_methods_too(function):
    assert_same_and_smaller(Calls(function), IMAGES, 1 / 60)
    assert_same_and_smaller(Calls(function), IMAGES.mul(10).round().div(10), 1 / 60)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clamp(torch.tensor(-0.3), torch.tensor(0.5)),
        lambda x: functional.conv2d(x, torch.ones(1, 4, 2, 2, dtype=torch.float64), padding="same"),
        lambda x: functional.max_pool2d(x, 17, 1, 8), lambda x: functional.max_pool2d(x, 2, return_indices=True)[0],
        lambda x: functional.avg_pool2d(x[0], 2), lambda x: functional.pad(x[0], (1, 1, 1, 1), mode="replicate"),
        lambda x: functional.adaptive_avg_pool2d(x, 1), lambda x: functional.instance_norm(x),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_what_cannot_be_lean_is_plain(function):
    (plain, _, held), (gradient, _, lean_held) = both(Calls(function), IMAGES)
    assert torch.equal(gradient, plain)
    assert lean_held == held


@pytest.mark.parametrize(
    "network",
    [
        nn.Hardswish(), nn.Hardswish(inplace=True), nn.SiLU(), nn.SiLU(inplace=True), nn.GELU(), nn.Sigmoid(),
        nn.Softmax(1), nn.GroupNorm(2, 4), nn.LayerNorm(22), nn.InstanceNorm2d(4), nn.Upsample(scale_factor=2),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.Dropout(),
    ],
    ids=repr,
)  # fmt: skip
def test_others_hold_one_map_and_no_more(network):
    """Their own input or output, which their gradient needs: nothing is left to be saved."""
    (_, _, held), (_, _, lean_held) = both(network, IMAGES)
    assert lean_held == held <= 1.1 * IMAGES.nbytes  # with statistics per channel, or per row


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
    for value in network.parameters():  # as made, they change nothing
        nn.init.normal_(value)
    assert_same_and_smaller(network, IMAGES, 0.05)


def test_instance_norm_with_the_statistics_of_training():
    network = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    network.running_mean.normal_()
    network.running_var.uniform_(0.5, 2)
    for value in network.parameters():  # as made, they change nothing
        nn.init.normal_(value)
    assert_same_and_smaller(network, IMAGES, 0.05)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name(padding):
    assert_same_and_smaller(nn.Conv2d(4, 8, (3, 5), padding=padding, dilation=2), IMAGES, 0.02)


@pytest.mark.parametrize(
    "network",
    [
        nn.AvgPool2d(2), nn.AvgPool2d((2, 3), (1, 2), (1, 0)), nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True), nn.AvgPool2d(3, divisor_override=2), nn.AdaptiveAvgPool2d((3, 5)),
        nn.AdaptiveAvgPool2d((None, 5)),
    ],
    ids=repr,
)  # fmt: skip
def test_average_pooling_keeps_nothing(network):
    assert_same_and_smaller(network, IMAGES, 0)


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


class NormsInARow(nn.Module):
    """As at the beginning of a transformer's stage: the first norm's result goes on and into another norm."""

    def __init__(self, between=lambda x: x):
        super().__init__()
        self.first, self.second, self.between = nn.LayerNorm(22), nn.LayerNorm(22, eps=1e-3), between
        for norm in (self.first, self.second):
            nn.init.uniform_(norm.weight, -2, 2)
            nn.init.uniform_(norm.bias, -2, 2)

    def forward(self, x):
        x = self.between(self.first(x))
        return x + self.second(x)


def test_a_norm_of_a_norm_keeps_one_input_for_both():
    assert_same_and_smaller(NormsInARow(), IMAGES, 0.6)


def test_a_norm_of_something_changed_in_place_keeps_it():
    (plain, _, held), (gradient, _, lean_held) = both(NormsInARow(lambda x: x.mul_(x.detach().cos())), IMAGES)
    torch.testing.assert_close(gradient, plain, rtol=1e-12, atol=1e-12)
    assert lean_held == held


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


@pytest.mark.parametrize("recompute", [False, True])
def test_a_whole_model(recompute):
    images = torch.rand(1, 3, 64, 96)
    plain, model = segprox.load_model("demo-standard"), segprox.load_model("demo-standard")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    found = make_lean(model, recompute=recompute)
    assert found.plain == ()
    assert found.error < 1e-12
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert held_bytes(model, images) < held_bytes(plain, images) / 60
    scene = segprox.load_dataset("demo")[1]
    results = [
        segprox.attack(m, scene.image[None], scene.label[None], "pgd", steps=3, epsilon="4/255") for m in (plain, model)
    ]
    assert results[0].apsr.item() == pytest.approx(results[1].apsr.item(), abs=0.01)


def test_blocks_are_recomputed():
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
    before, expected = held_bytes(plain, images), gradient_on(plain, images, plain.operations)
    make_lean(model)
    middle = held_bytes(model, images)
    again = make_lean(model, recompute=True)
    assert again.blocks == 4
    assert held_bytes(model, images) < middle <= before
    torch.testing.assert_close(gradient_on(model, images, model.operations), expected)


def test_blocks_are_recomputed_only_where_that_pays():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())

        def forward(self, x):
            return x + self.inner(x)

    model, images = Segmenter(nn.Sequential(*[Block() for _ in range(3)])), torch.rand(1, 3, 32, 32)
    make_lean(model)
    before = held_bytes(model, images)
    assert make_lean(model, recompute=True).blocks == 0  # masks are smaller than inputs
    assert held_bytes(model, images) == before


@pytest.mark.parametrize(
    ("stages", "blocks", "chosen"),
    [
        (2, 6, 12),  # each block: 12 inputs stay and 3 are needed at a time; each stage: 2 and 18
        (8, 2, 8),  # 16 and 3; 8 and 6
    ],
)
def test_of_blocks_within_blocks_those_that_hold_less_are_recomputed(stages, blocks, chosen):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.GELU(), nn.GELU(), nn.GELU())

        def forward(self, x):
            return x + self.inner(x)

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model = Segmenter(nn.Sequential(*[Stage() for _ in range(stages)]))
    assert make_lean(model, recompute=True).blocks == chosen


class Changes(nn.Module):
    """A block that changes what it is fed, so that it cannot be computed again."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.GELU(), nn.GELU(), nn.GELU())

    def forward(self, x):
        return self.inner(x.mul_(0.9))


def test_blocks_that_change_what_they_are_fed_are_not_recomputed():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.blocks = nn.Conv2d(3, 4, 1), nn.Sequential(Changes(), Changes())

        def forward(self, x):
            return self.blocks(self.first(x))

    network = Network()
    plain, model = Segmenter(network), Segmenter(network)
    images = torch.rand(1, 3, 32, 32)
    expected = gradient_on(plain, images, plain.operations)
    assert make_lean(model, recompute=True).blocks == 0
    torch.testing.assert_close(gradient_on(model, images, model.operations), expected)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs to see the memory of a process")
def test_freed_memory_goes_back():
    """Large tensors that come and go between small ones that stay leave no room occupied."""
    code = """
import sys, torch
from pathlib import Path
from segprox.models.lean.heap import return_what_is_freed
if sys.argv[1] == "lean":
    return_what_is_freed()
def pages():
    return int(Path("/proc/self/statm").read_text().split()[1])
torch.ones(1 << 22)  # freed at once: from here on glibc keeps such memory for itself
before, kept = pages(), []
for _ in range(20):
    large = torch.ones(1 << 20)
    kept.append(torch.ones(1 << 14))
    large = torch.ones((1 << 20) + (len(kept) << 14))
    kept.append(torch.ones(1 << 14))
del large
print((pages() - before) * 4096 / 2**20)
"""
    found = {
        kind: float(subprocess.run([sys.executable, "-c", code, kind], capture_output=True, check=True).stdout)
        for kind in ("plain", "lean")
    }
    assert found["lean"] < 8 < found["plain"], found  # 2.5 MiB are kept


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
    gradient = gradient_on(model, images, model.operations)
    expected = gradient_on(segprox.load_model("demo-standard?precision=bfloat16"), images, LeanOperations(OPERATIONS))
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
