"""gather_parts: what it makes of a gather from joined parts, when it leaves it alone, and that no bit changes."""

from __future__ import annotations

import re

import expecttest
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import two_tables
from freescale.config import Config
from freescale.passes.gather_parts import gather_parts
from freescale.passes.graph import graph_text
from ranks import run_ranks

wait = torch.ops._c10d_functional.wait_tensor


def gathered(early, urgent, inverse):
    return torch.cat([wait(early), wait(urgent)]).index_select(0, inverse)


def traced(fn=gathered, early=3, urgent=2, positions=6):
    given = torch.randn(early, 4), torch.randn(urgent, 4), torch.randint(0, early + urgent, (positions,))
    gm = make_fx(fn, tracing_mode="symbolic")(*given)
    gm.graph.eliminate_dead_code()
    return gm, given


def named(text: str) -> str:
    """With names of sizes that do not depend on what this process has traced before."""
    found = dict.fromkeys(re.findall(r"\bs\d+\b", text))
    names = dict(zip(found, ("early", "columns", "urgent", "positions"), strict=True))
    return re.sub(r"\bs\d+\b", lambda m: names[m[0]], text)


class TestText(expecttest.TestCase):
    def test_reads_from_the_parts(self):
        gm, _ = traced()
        assert gather_parts(gm, Config()) == 1
        gm.graph.lint()
        self.assertExpectedInline(named(graph_text(gm.graph)), """\
early_1: float32[early, columns]
urgent_1: float32[urgent, columns]
inverse_1: int64[positions]
wait_tensor = _c10d_functional.wait_tensor(early_1)  # float32[early, columns]
wait_tensor_1 = _c10d_functional.wait_tensor(urgent_1)  # float32[urgent, columns]
sym_size_int = aten.sym_size.int(wait_tensor, 0)  # early
lt_scalar = aten.lt.Scalar(inverse_1, sym_size_int)  # bool[positions]
sym_size_int_1 = aten.sym_size.int(inverse_1, 0)  # positions
sym_size_int_2 = aten.sym_size.int(wait_tensor, 1)  # columns
unsqueeze_default = aten.unsqueeze(lt_scalar, 1)  # bool[positions, 1]
expand_default = aten.expand(unsqueeze_default, [sym_size_int_1, sym_size_int_2])  # bool[positions, columns]
_unsafe_masked_index_default = aten._unsafe_masked_index(wait_tensor, expand_default, [inverse_1], 0)  # float32[positions, columns]
sub_scalar = aten.sub.Scalar(inverse_1, sym_size_int)  # int64[positions]
logical_not_default = aten.logical_not(expand_default)  # bool[positions, columns]
_unsafe_masked_index_default_1 = aten._unsafe_masked_index(wait_tensor_1, logical_not_default, [sub_scalar], 0)  # float32[positions, columns]
where_self = aten.where.self(expand_default, _unsafe_masked_index_default, _unsafe_masked_index_default_1)  # float32[positions, columns]
return where_self""")


@pytest.mark.parametrize("fn", (
    lambda a, b, i: torch.cat([a, b]).index_select(0, i),  # nothing arrives
    lambda a, b, i: torch.cat([wait(a), b]).index_select(0, i),  # one part is here already
    lambda a, b, i: torch.cat([wait(a), wait(b), wait(a)]).index_select(0, i),
    lambda a, b, i: torch.cat([wait(a)[:2], wait(b)], 1).index_select(0, i % 2),
    lambda a, b, i: torch.cat([wait(a), wait(b)]).index_select(1, i % 4),
    lambda a, b, i: torch.cat([wait(a), wait(b)])[i.view(2, 3)],
    lambda a, b, i: (joined := torch.cat([wait(a), wait(b)])).index_select(0, i) + joined.sum(),
), ids=("no-wait", "one-wait", "three", "columns", "of-columns", "matrix-of-indices", "used-twice"))  # fmt: skip
def test_leaves_others_alone(fn):
    gm, _ = traced(fn)
    before = graph_text(gm.graph)
    assert gather_parts(gm, Config()) == 0 and graph_text(gm.graph) == before


def test_leaves_all_alone_without_code_generation():
    gm, _ = traced()
    before = graph_text(gm.graph)
    assert gather_parts(gm, Config(codegen="eager")) == 0 and graph_text(gm.graph) == before


def test_same_bits():
    """Parts of any size; minus zero, infinity and not-a-number too."""
    gm, _ = traced()
    assert gather_parts(gm, Config()) == 1
    gm.recompile()
    one_kernel = torch.compile(gm, dynamic=True)
    for early, urgent, positions in ((3, 2, 6), (0, 5, 8), (5, 0, 8), (1, 1, 1), (4, 3, 0), (700, 300, 2000)):
        parts = torch.randn(2, max(early, urgent), 4)
        parts[:, ::3, 0], parts[:, ::4, 1], parts[:, ::5, 2] = -0.0, float("inf"), float("nan")
        a, b, i = parts[0, :early], parts[1, :urgent].clone(), torch.randint(0, early + urgent, (positions,))
        expected = torch.cat([a, b])[i].view(torch.int32)
        assert torch.equal(one_kernel(a, b, i).view(torch.int32), expected)


def _trained():
    on, off = (two_tables.Trainer("rowwise_adagrad", passes, "inductor") for passes in ("all", "-gather_parts"))
    return two_tables.same(on.train(0.3, 8, wrapped=True), off.train(0.3, 8, wrapped=True))


@pytest.mark.thorough
def test_training_has_the_same_bits():
    assert run_ranks(_trained, 2) == [True, True]
