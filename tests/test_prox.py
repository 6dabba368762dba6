import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segprox import SegproxError, prox_linf_box
from segprox.prox import SOLVERS, exact, prox_workspace
from tests.oracles import prox_by_sorting

DTYPES = {torch.float32: 1e-6, torch.float64: 1e-12}  # relative error of beta that `exact` may have


def random_case(seed, batch=2, size=50, sigma=0.3, step=1.0, spread=4, dtype=torch.float32):
    """A point, steps, a box and a metric whose entries span `spread` orders of magnitude (0: no metric)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(batch, size, dtype=torch.float64, generator=g)
    point = sigma * torch.randn(batch, size, dtype=torch.float64, generator=g)
    steps = step * torch.rand(batch, dtype=torch.float64, generator=g)
    metric = 10 ** (spread * (torch.rand(batch, size, dtype=torch.float64, generator=g) - 0.5))
    case = [t.to(dtype) for t in (point, steps, -x, 1 - x, metric)]
    return case if spread > 0 else [*case[:4], None]


def oracle(point, step, lower, upper, metric):
    return prox_by_sorting(point, step, lower, upper, torch.ones_like(point) if metric is None else metric)


def objective(p, point, step, metric):
    weight = torch.ones_like(point) if metric is None else metric
    return (0.5 * weight.double() * (p - point).double() ** 2).sum(1) + step * p.abs().amax(1)


@settings(max_examples=2000)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    size=st.integers(1, 80),
    sigma=st.floats(-8, 4).map(lambda power: 10**power),  # large ones leave the box nearly everywhere
    step=st.floats(-8, 4).map(lambda power: 10**power),
    spread=st.sampled_from([0, 2, 12]),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_exact_agrees_with_sorting(seed, batch, size, sigma, step, spread, dtype):
    case = random_case(seed, batch, size, sigma, step, spread, dtype)
    found = prox_linf_box(*case)
    expected = oracle(*case)
    beta = expected.abs().amax(1)
    assert ((found.beta.double() - beta).abs() <= DTYPES[dtype] * beta).all()
    torch.testing.assert_close(found.result.double(), expected, rtol=DTYPES[dtype], atol=0)


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**31),
    sigma=st.sampled_from([1e-3, 0.03, 0.3, 3.0]),
    step=st.floats(-3, 4).map(lambda power: 10**power),
    spread=st.sampled_from([0, 2, 12]),
    dtype=st.sampled_from(list(DTYPES)),
    levels=st.sampled_from([None, 40, 1]),  # few distinct values: many equal elements, at the box too
)
def test_exact_agrees_with_sorting_when_there_are_many_elements(seed, sigma, step, spread, dtype, levels):
    point, steps, lower, upper, metric = random_case(seed, 1, 9000, sigma, step, spread, dtype)
    if levels is not None:
        point, lower = (torch.round(t * levels) / levels for t in (point, lower))
        upper = 1 + lower
    found = prox_linf_box(point, steps, lower, upper, metric)
    beta = oracle(point, steps, lower, upper, metric).abs().amax(1)
    assert ((found.beta.double() - beta).abs() <= DTYPES[dtype] * beta).all()


def test_float32_sums_are_accurate_for_ten_million_elements():
    g = torch.Generator().manual_seed(0)
    point = 0.1 * torch.randn(1, 10_000_000, generator=g)
    box, step = torch.ones_like(point), torch.tensor([3e5])  # most elements are active
    found = prox_linf_box(point, step, -box, box).beta.double()
    reference = prox_linf_box(point.double(), step.double(), -box.double(), box.double()).beta
    torch.testing.assert_close(found, reference, rtol=1e-6, atol=0)


def test_a_sample_that_misleads_costs_time_only():
    size = torch.full((20_000,), 0.5)
    weight = torch.full_like(size, 1e-6)
    weight[9] = 1e6  # not in the sample, but outweighs everything else
    size[9] = 0.9
    beta = exact.exact_size(size, size, weight, 10.0, torch.empty_like(size))
    assert beta == pytest.approx(size[9].item() - 10 / 1e6, rel=1e-9)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**31),
    sigma=st.sampled_from([1e-3, 0.03, 0.3, 3.0]),
    step=st.floats(-3, 4).map(lambda power: 10**power),
    spread=st.sampled_from([0, 2, 12]),
    dtype=st.sampled_from(list(DTYPES)),
    guess=st.sampled_from([0.0, 1e-9, 0.5, 0.96, 0.999, 1.0, 1.001, 1.04, 2.0, 1e9, math.nan]),
)
def test_a_guess_does_not_change_the_answer(seed, sigma, step, spread, dtype, guess):
    case = random_case(seed, 1, 9000, sigma, step, spread, dtype)
    beta = oracle(*case).abs().amax(1)
    found = prox_linf_box(*case, guess=guess * beta.to(dtype)).beta.double()
    assert ((found - beta).abs() <= DTYPES[dtype] * beta).all()


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, 60),
    sigma=st.sampled_from([1e-3, 0.03, 0.3, 3.0]),
    step=st.integers(-4, 2).map(lambda power: 10.0**power),
    spread=st.sampled_from([0, 4]),
)
def test_ternary_agrees_with_sorting(seed, size, sigma, step, spread):
    case = random_case(seed, 2, size, sigma, step, spread)
    found = prox_linf_box(*case, "ternary").result
    torch.testing.assert_close(found.double(), oracle(*case), rtol=0, atol=1.1e-5)
    assert (found >= case[2]).all()
    assert (found <= case[3]).all()


@pytest.mark.parametrize("solver", ["dfb", "adfb", "dr"])
@pytest.mark.parametrize("seed", range(6))
def test_splitting_methods_agree_with_sorting(solver, seed):
    # Gently: where the box holds everything that would move, they stop too early by the paper's rule.
    sigma, step = [(0.05, 0.1), (0.3, 1.0)][seed % 2]
    case = random_case(seed, 2, 400, sigma, step, 0, torch.float64)
    found = prox_linf_box(*case, solver, precision=1e-9).result
    torch.testing.assert_close(found, oracle(*case), rtol=0, atol=1e-5)


def test_finer_precision_is_finer():
    case = random_case(0, 3, 500, 0.1, 0.1, 4, torch.float64)
    expected = oracle(*case)
    for precision in (1e-2, 1e-5, 1e-9):
        error = (prox_linf_box(*case, "ternary", precision=precision).result - expected).abs().max()
        assert error <= precision


@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0, 4]))
def test_nothing_nearby_is_better(seed, spread):
    point, step, lower, upper, metric = random_case(seed, 2, 40, 0.3, 1.0, spread, torch.float64)
    found = prox_linf_box(point, step, lower, upper, metric).result
    value = objective(found, point, step, metric)
    g = torch.Generator().manual_seed(seed)
    for scale in (1e-1, 1e-3, 1e-5):
        other = (found + scale * torch.randn(found.shape, dtype=torch.float64, generator=g)).clamp(lower, upper)
        assert (value <= objective(other, point, step, metric) + 1e-12).all()


@pytest.mark.parametrize("solver", SOLVERS)
def test_batch_equals_alone(solver):
    point, step, lower, upper, metric = random_case(0, 4, 30_000, 0.1, 1.0, 2)
    point[1] *= 100  # needs more steps than its neighbours
    metric = metric if solver in ("exact", "ternary") else None
    together = prox_linf_box(point, step, lower, upper, metric, solver).result
    for i in range(4):
        one = slice(i, i + 1)
        weight = None if metric is None else metric[one]
        alone = prox_linf_box(point[one], step[one], lower[one], upper[one], weight, solver)
        assert torch.equal(together[one], alone.result)


@pytest.mark.parametrize("solver", SOLVERS)
class TestDegenerateCases:
    def call(self, solver, point, step, lower=-1.0, upper=1.0):
        point = torch.as_tensor(point, dtype=torch.float32).view(1, -1)
        box = (torch.as_tensor(end).expand(point.shape).float().contiguous() for end in (lower, upper))
        return prox_linf_box(point, torch.tensor([float(step)]), *box, None, solver).result

    def test_step_zero_only_clips(self, solver):
        found = self.call(solver, [0.3, -2.0, 0.0], 0)
        torch.testing.assert_close(found, torch.tensor([[0.3, -1.0, 0.0]]), rtol=0, atol=1.1e-5)

    def test_large_step_gives_zero(self, solver):
        torch.testing.assert_close(self.call(solver, [0.3, -2.0, 0.0], 1e3), torch.zeros(1, 3), rtol=0, atol=1.1e-5)

    def test_point_zero_stays(self, solver):
        assert not self.call(solver, [0.0, 0.0], 1).any()

    def test_box_of_width_zero(self, solver):
        found = self.call(solver, [0.5, 0.4], 0.2, [-1.0, 0.0], [1.0, 0.0])
        torch.testing.assert_close(found, torch.tensor([[0.3, 0.0]]), rtol=0, atol=2.1e-5)

    def test_one_element(self, solver):
        torch.testing.assert_close(self.call(solver, [0.5], 0.2), torch.tensor([[0.3]]), rtol=0, atol=2.1e-5)

    def test_nan_is_refused(self, solver):
        with pytest.raises(SegproxError, match="point 0 of the batch holds NaN"):
            self.call(solver, [0.5, math.nan], 0.2)

    @pytest.mark.parametrize("shape", [(2, 3, 4, 5), (0, 3, 2, 2), (2, 0)])
    def test_any_shape(self, solver, shape):
        point = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        box, step = torch.ones(shape), torch.full(shape[:1], 0.1)
        found = prox_linf_box(point, step, -box, box, None, solver)
        assert found.result.shape == shape
        assert found.beta.shape == shape[:1]


@pytest.mark.parametrize("solver", SOLVERS)
def test_in_place_with_a_workspace(solver):
    point, step, lower, upper, _ = random_case(0, 3, 500)
    expected = prox_linf_box(point, step, lower, upper, None, solver).result
    workspace = prox_workspace(point)
    for _ in range(2):
        copy = point.clone()
        found = prox_linf_box(copy, step, lower, upper, None, solver, out=copy, workspace=workspace)
        assert found.result is copy
        assert torch.equal(copy, expected)


def test_input_is_not_changed():
    case = random_case(0)
    copies = [t.clone() for t in case]
    prox_linf_box(*case)
    assert all(torch.equal(a, b) for a, b in zip(copies, case))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"solver": "magic"}, "there is no solver 'magic'; known are: exact, ternary, dfb, adfb, dr"),
        ({"solver": "dr", "metric": torch.ones(2, 5)}, "solver 'dr' works without a metric only"),
        ({"point": torch.ones(2, 5).half()}, "point must be float32 or float64 but is torch.float16"),
        ({"step": torch.ones(3)}, r"step must have shape \[2\], one per image, but has \[3\]"),
        ({"step": torch.tensor([1.0, -1.0])}, "step must not be negative"),
        ({"lower": torch.zeros(2, 4)}, r"lower must be shaped like point, \[2, 5\], but is \[2, 4\]"),
        ({"solver": "dfb", "max_iterations": 1}, "dfb did not reach its precision within 1 iterations"),
        ({"solver": "dr", "max_iterations": 1}, "dr did not reach its precision within 1 iterations"),
    ],
)
def test_refusals(change, message):
    box = torch.ones(2, 5)
    whole = {"point": 0.1 * torch.arange(10.0).view(2, 5), "step": torch.ones(2), "lower": -box, "upper": box, **change}
    with pytest.raises(SegproxError, match=message):
        prox_linf_box(**whole)
