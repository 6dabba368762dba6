import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segprox import prox_linf_box
from tests.oracles import prox_by_sorting


def random_case(seed, batch, size, sigma, step_power, use_metric, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(batch, size, dtype=dtype, generator=g)
    point = sigma * torch.randn(batch, size, dtype=dtype, generator=g)
    step = torch.rand(batch, dtype=dtype, generator=g) * 10.0**step_power
    metric = 10 ** (4 * torch.rand(batch, size, dtype=dtype, generator=g) - 2) if use_metric else None
    return point, step, -x, 1 - x, metric


def objective(p, point, step, metric):
    weight = torch.ones_like(point) if metric is None else metric
    return (0.5 * weight * (p - point) ** 2).double().sum(1) + step * p.abs().amax(1)


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 4),
    size=st.integers(1, 60),
    sigma=st.sampled_from([1e-3, 0.03, 0.3, 3.0]),  # the last one leaves the box nearly everywhere
    step_power=st.integers(-4, 2),
    use_metric=st.booleans(),
)
def test_agrees_with_sorting(seed, batch, size, sigma, step_power, use_metric):
    point, step, lower, upper, metric = random_case(seed, batch, size, sigma, step_power, use_metric)
    found = prox_linf_box(point, step, lower, upper, metric)
    ones = torch.ones_like(point) if metric is None else metric
    expected = prox_by_sorting(point, step, lower, upper, ones)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1.1e-5)
    assert (found >= lower).all()
    assert (found <= upper).all()


@given(seed=st.integers(0, 2**31), use_metric=st.booleans())
def test_nothing_nearby_is_better(seed, use_metric):
    point, step, lower, upper, metric = random_case(seed, 2, 40, 0.3, 0, use_metric, torch.float64)
    found = prox_linf_box(point, step, lower, upper, metric, precision=1e-12)
    value = objective(found, point, step, metric)
    g = torch.Generator().manual_seed(seed)
    for scale in (1e-1, 1e-3, 1e-5):
        other = (found + scale * torch.randn(found.shape, dtype=torch.float64, generator=g)).clamp(lower, upper)
        assert (value <= objective(other, point, step, metric) + 1e-12).all()


def test_finer_precision_is_finer():
    point, step, lower, upper, metric = random_case(0, 3, 500, 0.1, -1, True, torch.float64)
    exact = prox_by_sorting(point, step, lower, upper, metric)
    for precision in (1e-2, 1e-5, 1e-9):
        error = (prox_linf_box(point, step, lower, upper, metric, precision=precision) - exact).abs().max()
        assert error <= precision


def test_batch_equals_alone():
    point, step, lower, upper, metric = random_case(0, 4, 30_000, 0.1, 0, True)
    point[1] *= 100  # needs more steps than its neighbours
    together = prox_linf_box(point, step, lower, upper, metric)
    for i in range(4):
        one = slice(i, i + 1)
        assert torch.equal(together[one], prox_linf_box(point[one], step[one], lower[one], upper[one], metric[one]))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 7), (1, 1), (0, 3, 2, 2)])
def test_any_shape(shape):
    point = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    box = torch.ones(shape)
    assert prox_linf_box(point, torch.full(shape[:1], 0.1), -box, box).shape == shape


def test_extreme_steps():
    point, _, lower, upper, metric = random_case(0, 1, 50, 0.3, 0, False)
    nothing = prox_linf_box(point, torch.zeros(1), lower, upper, metric)
    torch.testing.assert_close(nothing, point.clamp(lower, upper), rtol=0, atol=1.1e-5)
    everything = prox_linf_box(point, torch.full((1,), 1e6), lower, upper, metric)
    torch.testing.assert_close(everything, torch.zeros_like(point), rtol=0, atol=1.1e-5)
    assert not prox_linf_box(torch.zeros_like(point), torch.ones(1), lower, upper).any()


def test_input_is_not_changed():
    point, step, lower, upper, metric = random_case(0, 2, 50, 0.3, 0, True)
    copies = [t.clone() for t in (point, step, lower, upper, metric)]
    prox_linf_box(point, step, lower, upper, metric)
    assert all(torch.equal(a, b) for a, b in zip(copies, (point, step, lower, upper, metric)))
