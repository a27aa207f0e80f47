"""What benchmarks/fidelity.py predicts with, where ranks sleep in place of computing."""

from __future__ import annotations

import sys

import pytest
import torch

from repo import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import fidelity
import fidelity_asleep as asleep


def test_a_block_sleeps_a_third_forward_and_two_thirds_backward(monkeypatch):
    taken = []
    monkeypatch.setattr(asleep, "_sleep", taken.append)
    block, x = asleep.Block(0.3), torch.ones(4, 2, requires_grad=True)
    out = block(x, torch.tensor([0, 4]))
    assert taken == [pytest.approx(0.1)] and torch.equal(out, x)
    out.sum().backward()
    assert taken == [pytest.approx(0.1)] * 3
    assert torch.equal(x.grad, torch.ones(4, 2)) and torch.equal(block.weight.grad, torch.zeros(8))


# torch's own check reads the gradients of what it made; since torch 2.14 it warns itself of that
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_its_ops_are_what_their_fakes_say():
    x, weight = torch.randn(3, 2, requires_grad=True), torch.zeros(8, requires_grad=True)
    torch.library.opcheck(asleep.product, (x, weight, 0.0))
    for op in (asleep.input_gradient, asleep.weight_gradient):
        torch.library.opcheck(op, (x.detach(), weight.detach(), 0.0))


def test_headlines_count_pairs_in_the_wrong_order():
    def row(variant, predicted, measured, spread=1.0):
        quartiles = [measured - spread, measured + spread]
        return {
            "ranks": 4, "link": "x", "variant": variant, "predicted_ms": predicted, "measured_ms": measured,
            "quartiles": quartiles, "error": predicted / measured - 1,
        }  # fmt: skip

    found = fidelity.headlines([row("a", 10.0, 20.0), row("b", 12.0, 18.0, 5.0), row("c", 30.0, 30.0)])
    assert (found["pairs"], found["pairs_in_wrong_order"], found["pairs_clearly_in_wrong_order"]) == (3, 1, 0)
    assert found["median_error"] == pytest.approx(1 / 3) and found["worst_error"] == pytest.approx(0.5)
