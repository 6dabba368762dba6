import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segprox.attacks.penalty import penalty, penalty_derivative


def column(value):
    return torch.tensor([value], dtype=torch.float64)


@given(y=st.floats(-5, 5), rho=st.floats(1e-3, 100), mu=st.floats(1e-6, 10))
def test_derivative_matches_finite_differences(y, rho, mu):
    h = 1e-6
    if abs(y) < 2 * h:
        return
    ahead, behind = (penalty(column(y + s * h), column(rho), column(mu)) for s in (1, -1))
    exact = penalty_derivative(column(y), column(rho), column(mu))
    torch.testing.assert_close(exact, (ahead - behind) / (2 * h), rtol=1e-4, atol=1e-7 * max(1.0, rho**2))


@given(rho=st.floats(1e-3, 100), mu=st.floats(1e-6, 10))
def test_penalty_is_smooth_at_zero_with_slope_mu(rho, mu):
    for y in (-1e-12, 0.0, 1e-12):
        torch.testing.assert_close(penalty_derivative(column(y), column(rho), column(mu)), column(mu))
        torch.testing.assert_close(penalty(column(y), column(rho), column(mu)), column(0.0), rtol=0, atol=1e-10)


@given(y=st.floats(-5, 5), rho=st.floats(1e-3, 100), mu=st.floats(1e-6, 10))
def test_multipliers_grow_when_violated_and_shrink_when_satisfied(y, rho, mu):
    slope = penalty_derivative(column(y), column(rho), column(mu)).item()
    assert slope >= 0
    assert slope >= mu if y >= 0 else slope <= mu


def test_values_of_the_paper():
    # mu y + mu rho y^2 + rho^2 y^3 / 6 and mu y / (1 - max(1, rho) y)
    assert penalty(column(2.0), column(3.0), column(0.5)).item() == pytest.approx(1 + 6 + 12)
    assert penalty(column(-2.0), column(0.5), column(0.5)).item() == pytest.approx(-1 / 3)
    assert penalty(column(-2.0), column(3.0), column(0.5)).item() == pytest.approx(-1 / 7)


def test_authors_derivative_vanishes_at_the_boundary_only_when_violated():
    y, rho, mu = column(2.0), column(3.0), column(0.5)
    assert penalty_derivative(y, rho, mu, "authors").item() == pytest.approx(0.5 * 2 + 2 * 0.5 * 3 * 2 + 9 * 4 / 2)
    assert penalty_derivative(column(0.0), rho, mu, "authors").item() == 0
    negative = column(-0.3)
    assert torch.equal(penalty_derivative(negative, rho, mu, "authors"), penalty_derivative(negative, rho, mu))
