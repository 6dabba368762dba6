import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segprox.losses import cross_entropy, dlr, dlr_plus, houdini, js_divergence, margin, soft_margin, tsallis

LOSSES = {"margin": margin, "dlr_plus": dlr_plus, "dlr": dlr}


def random_case(classes, seed=0, size=(2, 6, 5)):
    generator = torch.Generator().manual_seed(seed)
    batch, height, width = size
    logits = torch.randn(batch, classes, height, width, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, classes, size, generator=generator)
    weights = torch.rand(size, dtype=torch.float64, generator=generator)
    return logits, labels, weights


def by_definition(logits, labels, targeted):
    """DLR+ pixel by pixel, from the formula, with autograd."""
    rows, wanted = logits.movedim(1, -1).reshape(-1, logits.shape[1]), labels.flatten()
    values = []
    for z, y in zip(rows, wanted.tolist()):
        others = torch.cat([z[:y], z[y + 1 :]])
        ordered = list(z.sort(descending=True).values)
        while len(ordered) < 4:
            ordered.append(ordered[len(z) - 1] - 1)
        if targeted:
            values.append(-(z[y] - others.max()) / (ordered[0] - (ordered[2] + ordered[3]) / 2))
        else:
            values.append((z[y] - others.max()) / (ordered[0] - ordered[2]))
    return torch.stack(values).view(labels.shape)


@given(classes=st.integers(2, 8), seed=st.integers(0, 2**31), targeted=st.booleans())
def test_dlr_plus_and_its_gradient_follow_the_formula(classes, seed, targeted):
    logits, labels, weights = random_case(classes, seed, (2, 3, 2))
    values, pullback = dlr_plus(logits, labels, targeted=targeted)
    leaf = logits.clone().requires_grad_()
    expected = by_definition(leaf, labels, targeted)
    torch.testing.assert_close(values, expected.detach())
    (gradient,) = torch.autograd.grad((weights * expected).sum(), leaf)
    torch.testing.assert_close(pullback(weights), gradient)


@given(classes=st.integers(2, 8), seed=st.integers(0, 2**31), softness=st.floats(0.01, 10))
def test_the_soft_margin_and_its_gradient_follow_the_formula(classes, seed, softness):
    logits, labels, weights = random_case(classes, seed, (2, 3, 2))
    each = torch.tensor([softness, 2 * softness], dtype=torch.float64).view(2, 1, 1)
    values, pullback = soft_margin(logits, labels, softness=each)
    leaf = logits.clone().requires_grad_()
    own = torch.nn.functional.one_hot(labels, classes).movedim(-1, 1).bool()
    others = leaf.masked_fill(own, -math.inf)
    expected = (leaf * own).sum(1) - each * (others / each.unsqueeze(1)).logsumexp(1)
    torch.testing.assert_close(values, expected.detach())
    (gradient,) = torch.autograd.grad((weights * expected).sum(), leaf)
    torch.testing.assert_close(pullback(weights), gradient)


def test_the_soft_margin_becomes_the_margin():
    logits, labels, weights = random_case(6)
    hard, soft = margin(logits, labels), soft_margin(logits, labels, softness=torch.full((2, 1, 1), 1e-5).double())
    torch.testing.assert_close(soft.values, hard.values)
    torch.testing.assert_close(soft.pullback(weights), hard.pullback(weights))


def test_in_the_soft_margin_nan_pushes_nowhere_and_large_logits_do_not_overflow():
    logits, labels, weights = random_case(4)
    logits[0, :, 0, 0] = math.nan
    logits[1, 0, 0, 0], labels[1, 0, 0] = 1e30, 0
    gradient = soft_margin(logits, labels, softness=torch.full((2, 1, 1), 1e-3).double()).pullback(weights)
    assert gradient.isfinite().all()
    assert (gradient[0, :, 0, 0] == 0).all()
    assert gradient[1, 0, 0, 0] == weights[1, 0, 0]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("classes", [2, 3, 4, 9])
def test_gradients_match_finite_differences(name, targeted, classes):
    logits, labels, weights = random_case(classes)
    loss, h = LOSSES[name], 1e-6
    gradient = loss(logits, labels, targeted=targeted).pullback(weights)
    direction = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ahead, behind = (loss(logits + s * h * direction, labels, targeted=targeted).values for s in (1, -1))
    numeric = (weights * (ahead - behind)).sum() / (2 * h)
    torch.testing.assert_close((gradient * direction).sum(), numeric, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", [margin, dlr_plus])
@pytest.mark.parametrize("targeted", [False, True])
def test_sign_says_whether_the_goal_is_reached(loss, targeted):
    logits, labels, _ = random_case(5)
    reached = (logits.argmax(1) == labels) == targeted
    assert torch.equal(loss(logits, labels, targeted=targeted).values < 0, reached)


@pytest.mark.parametrize("loss", [margin, dlr_plus])
@pytest.mark.parametrize("targeted", [False, True])
def test_tolerance_tightens_the_constraint(loss, targeted):
    logits, labels, _ = random_case(5)
    plain, tight = (loss(logits, labels, targeted=targeted, tolerance=t).values for t in (0.0, 0.1))
    torch.testing.assert_close(tight, plain + 0.1)


@given(seed=st.integers(0, 2**31), scale=st.floats(1e-3, 1e3), targeted=st.booleans())
def test_dlr_plus_does_not_depend_on_the_scale_of_logits(seed, scale, targeted):
    logits, labels, _ = random_case(6, seed)
    one, other = (dlr_plus(z, labels, targeted=targeted).values for z in (logits, scale * logits + 3))
    torch.testing.assert_close(one, other)


@given(seed=st.integers(0, 2**31), targeted=st.booleans())
def test_dlr_plus_does_not_depend_on_the_order_of_classes(seed, targeted):
    logits, labels, weights = random_case(6, seed)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    value, pullback = dlr_plus(logits, labels, targeted=targeted)
    moved_value, moved_pullback = dlr_plus(logits[:, order], order.argsort()[labels], targeted=targeted)
    torch.testing.assert_close(value, moved_value)
    torch.testing.assert_close(pullback(weights)[:, order], moved_pullback(weights))


def test_two_classes_give_a_soft_sign_of_the_margin():
    logits, labels, _ = random_case(2)
    m = margin(logits, labels).values
    torch.testing.assert_close(dlr_plus(logits, labels).values, m / (1 + m.abs()))


def test_dlr_is_the_negative_of_dlr_plus():
    logits, labels, weights = random_case(5)
    torch.testing.assert_close(dlr(logits, labels).values, -dlr_plus(logits, labels).values)
    torch.testing.assert_close(dlr(logits, labels).pullback(weights), -dlr_plus(logits, labels).pullback(weights))


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_equal_logits_give_finite_values(classes):
    values, pullback = dlr_plus(torch.zeros(1, classes, 2, 2), torch.zeros(1, 2, 2, dtype=torch.long))
    assert (values == 0).all()
    assert pullback(torch.ones(1, 2, 2)).isfinite().all()


def test_neither_logits_nor_weights_are_changed():
    logits, labels, weights = random_case(5)
    copies = logits.clone(), weights.clone()
    for loss in LOSSES.values():
        loss(logits, labels).pullback(weights)
    assert torch.equal(logits, copies[0])
    assert torch.equal(weights, copies[1])


def log_p(logits):
    return logits - logits.exp().sum(1, keepdim=True).log()


def at_label(values, labels):
    return values.gather(1, labels[:, None])[:, 0]


def cross_entropy_by_definition(logits, labels):
    return -at_label(log_p(logits), labels)


def js_by_definition(logits, labels):
    """The mean of the divergences of p and of the one-hot label from their mean."""
    log_of_p, one_hot = log_p(logits), torch.nn.functional.one_hot(labels, logits.shape[1]).movedim(-1, 1)
    log_of_mean = ((log_of_p.exp() + one_hot) / 2).log()
    from_p = (log_of_p.exp() * (log_of_p - log_of_mean)).sum(1)
    from_label = -at_label(log_of_mean, labels)  # the label's own entropy is 0
    return (from_p + from_label) / 2


def tsallis_by_definition(q):
    def formula(logits, labels):
        p = at_label(log_p(logits), labels).exp()
        return -p.log() if q == 1 else (1 - p ** (1 - q)) / (1 - q)

    return formula


def houdini_by_definition(logits, labels):
    gap = logits.amax(1) - at_label(logits, labels)
    return 0.5 * (1 + torch.erf(gap / math.sqrt(2))) * -at_label(log_p(logits), labels)


QS = [-2.0, 0.0, 0.5, 1.0]
ENTROPIES = {
    "cross_entropy": (cross_entropy, cross_entropy_by_definition),
    "js_divergence": (js_divergence, js_by_definition),
    "houdini": (houdini, houdini_by_definition),
    **{f"tsallis {q:g}": (partial(tsallis, q=q), tsallis_by_definition(q)) for q in QS},
}


@pytest.mark.parametrize("name", ENTROPIES)
@given(classes=st.integers(2, 8), seed=st.integers(0, 2**31), spread=st.sampled_from([0.1, 1.0, 5.0]))
def test_entropies_and_their_gradients_follow_the_formula(name, classes, seed, spread):
    loss, formula = ENTROPIES[name]
    logits, labels, weights = random_case(classes, seed, (2, 3, 2))
    logits, weights = spread * logits + 2, weights - 0.5  # weights of either sign
    leaf = logits.clone().requires_grad_()
    expected = formula(leaf, labels)
    (gradient,) = torch.autograd.grad((weights * expected).sum(), leaf)
    values, pullback = loss(logits, labels)
    torch.testing.assert_close(values, expected.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(pullback(weights), gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ENTROPIES)
@given(classes=st.integers(2, 8), seed=st.integers(0, 2**31), spread=st.sampled_from([0.1, 1.0, 5.0]))
def test_entropies_are_accurate_in_float32(name, classes, seed, spread):
    loss, formula = ENTROPIES[name]
    logits, labels, _ = random_case(classes, seed, (2, 3, 2))
    logits = (spread * logits).float()
    torch.testing.assert_close(
        loss(logits, labels).values.double(), formula(logits.double(), labels), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("lead", [1e3, 1e4, 1e30])  # the smaller p, and its root, are 0 in float32
def test_entropies_of_certain_pixels(lead, classes):
    logits = torch.zeros(1, classes, 1, 2)
    logits[0, 0] = lead
    labels, ones = torch.tensor([[[0, 1]]]), torch.ones(1, 1, 2)  # p_y is 1, then 0
    towards = [[0.0, 1.0], [0.0, -1.0], [0.0, 0.0]][:classes]  # the gradient of -log p_y at p_y = 1 and 0
    nowhere = [[0.0, 0.0]] * classes
    expected = {
        "cross_entropy": ([0, lead], towards),
        "js_divergence": ([0, math.log(2)], nowhere),
        "houdini": ([0, lead], towards),
        "tsallis -2": ([0, 1 / 3], nowhere),
        "tsallis 0": ([0, 1], nowhere),
        "tsallis 0.5": ([0, 2], nowhere),
        "tsallis 1": ([0, lead], towards),
    }
    for name, (loss, _) in ENTROPIES.items():
        values, pullback = loss(logits, labels)
        assert values.flatten().tolist() == pytest.approx(expected[name][0], rel=1e-6, abs=1e-6)
        assert pullback(ones)[0, :, 0].tolist() == expected[name][1]


@given(seed=st.integers(0, 2**31), spread=st.sampled_from([1.0, 10.0, 100.0]))
def test_js_divergence_lies_between_0_and_log_2(seed, spread):
    logits, labels, _ = random_case(4, seed)
    values = js_divergence(spread * logits, labels).values
    assert (values >= -1e-15).all()
    assert (values <= math.log(2) + 1e-15).all()


def test_tsallis_goes_to_cross_entropy_with_q_to_1():
    logits, labels, _ = random_case(4)
    expected = cross_entropy_by_definition(logits, labels)
    for gap in (1e-4, 1e-8, 1e-12):  # 1 - p^gap would cancel
        found = tsallis(logits, labels, 1 - gap).values
        torch.testing.assert_close(found, expected, rtol=0, atol=10 * gap + 1e-12)


@pytest.mark.parametrize("name", ENTROPIES)
def test_entropies_change_no_input_and_pull_back_as_often_as_asked(name):
    logits, labels, weights = random_case(5)
    copies = logits.clone(), weights.clone()
    values, pullback = ENTROPIES[name][0](logits, labels)
    value_copy, first = values.clone(), pullback(weights).clone()
    assert torch.equal(pullback(weights), first)
    assert torch.equal(values, value_copy)
    assert torch.equal(logits, copies[0])
    assert torch.equal(weights, copies[1])


@pytest.mark.parametrize("targeted", [False, True, torch.arange(322).view(2, 23, 7) % 3 == 0])
@pytest.mark.parametrize("loss", [margin, dlr_plus])
def test_strips_change_nothing(loss, targeted, monkeypatch):
    torch.manual_seed(0)
    logits, labels, weights = torch.randn(2, 5, 23, 7), torch.randint(0, 5, (2, 23, 7)), torch.rand(2, 23, 7)
    whole = loss(logits, labels, targeted=targeted, tolerance=0.1)
    monkeypatch.setattr("segprox.losses.strips.LARGEST", 0)
    monkeypatch.setattr("segprox.losses.strips.STRIP", logits.nbytes // 5)  # strips of 4 rows, the last of 3
    parts = loss(logits, labels, targeted=targeted, tolerance=0.1)
    assert torch.equal(parts.values, whole.values)
    assert torch.equal(parts.pullback(weights), whole.pullback(weights))
