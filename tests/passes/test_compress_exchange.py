"""compress_exchange: what becomes of launches, what it refuses, and training with it."""

from __future__ import annotations

import logging
import re
import sys
from fractions import Fraction
from unittest import mock

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_world import fake_world, golden_text, graphs_of
from freescale.config import Config
from freescale.kernels import compression, launch, row_packing
from freescale.kernels.ops.schemas import PRIORITY_NAMES
from freescale.passes.compress_exchange import DENSE_BLOCK, compress_exchange, dense_packing
from freescale.passes.graph import EXCHANGE_KEY, GraphExchange, exchanges, size_in_bytes
from ranks import RankFailed, run_ranks, run_ranks_apart

fs = torch.ops.freescale
LOSSY = {"passes": "all,compress_exchange", "codegen": "eager"}


class Model(nn.Module):
    def __init__(self, dim: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        import freescale

        torch.manual_seed(0)
        self.table = freescale.ShardedEmbedding(97, dim, name="item", optimizer="rowwise_adagrad", lr=0.1, dtype=dtype)
        self.out = nn.Linear(dim, dim, dtype=dtype)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found = self.table(batch["item"])
        return (torch.tanh(self.out(found)) * found).sum() / 8


# ---- graphs ----------------------------------------------------------------------------------------------------------


def _lines(options, dtype=torch.float32):
    def step():
        with fake_world(0, 4):
            run = torch.compile(Model(dtype=dtype), backend="freescale", fullgraph=True, options={**LOSSY, **options})
            run({"item": torch.arange(7)}).backward()

    found = graphs_of(step)
    return {
        # torch numbers sizes differently from release to release
        (way, name): re.sub(r"sym_size_int(_\d+)?", "size", "\n".join(x for x in text.splitlines() if "launch" in x))
        for (way, name), text in found.items()
    } | {("whole", name): text for (way, name), text in found.items() if way == "forward"}


@golden_text
class Golden(expecttest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        dense = {"dense": "allreduce", "compress": "rows:0.5,dense:0.1,which=all", "strict": True}
        (cls.largest,) = run_ranks_apart(_lines, [(dense,)])

    def test_largest(self):
        self.assertExpectedInline(self.largest["forward", "compress_exchange"], """\
all_to_all_rows_launch_default = freescale.all_to_all_rows_launch(primals_6, getitem_4, getitem_5, getitem_3, size, 0, item, 0, packing=largest:8/3:128)  # float32[u0, 8]; urgent rows, chunk, 6*floor(8*u0/3) bytes
wait_tensor_default = _c10d_functional.wait_tensor(all_to_all_rows_launch_default)  # float32[u0, 8]""")
        self.assertExpectedInline(self.largest["backward", "compress_exchange"], """\
all_reduce_launch_default = freescale.all_reduce_launch([view_2, mm_1], out.bias, out.weight, 0, packing=largest:1/15:72)  # float32[72]; dense gradients, dense, 72 bytes
all_to_all_launch_default = freescale.all_to_all_launch(div_2, getitem_3, getitem_5, size, 0, item, 0, packing=largest:8/3:128)  # float32[u1, 8]; urgent gradients, chunk, 6*floor(8*u1/3) bytes
wait_tensor_default = _c10d_functional.wait_tensor(all_to_all_launch_default)  # float32[u1, 8]
wait_tensor_default_1 = _c10d_functional.wait_tensor(all_reduce_launch_default)  # float32[72]""")


@pytest.mark.thorough
@golden_text
class GoldenOfOthers(expecttest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        wire = {"compress": "which=all", "wire": "fp8", "strict": True}
        cls.wire, cls.background = run_ranks_apart(_lines, [(wire,), ({"compress": "rows:0.5"},)])

    def test_wire(self):
        self.assertExpectedInline(self.wire["forward", "compress_exchange"], """\
all_to_all_rows_launch_default = freescale.all_to_all_rows_launch(primals_6, getitem_4, getitem_5, getitem_3, size, 0, item, 0, packing=fp8)  # float32[u0, 8]; urgent rows, chunk, 12*u0 bytes
wait_tensor_default = _c10d_functional.wait_tensor(all_to_all_rows_launch_default)  # float32[u0, 8]""")
        self.assertExpectedInline(self.wire["backward", "compress_exchange"], """\
all_to_all_launch_default = freescale.all_to_all_launch(div_2, getitem_3, getitem_5, size, 0, item, 0, packing=fp8:stochastic)  # float32[u1, 8]; urgent gradients, chunk, 12*u1 bytes
wait_tensor_default = _c10d_functional.wait_tensor(all_to_all_launch_default)  # float32[u1, 8]""")

    def test_urgent_stays_exact(self):
        """Without a LookaheadLoader everything is urgent."""
        before, after = (self.background["whole", n] for n in ("bucket_gradients", "compress_exchange"))
        assert before == after


def _launches_of_each_priority(n_recv: int = 6) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(6, 8)
    for priority, name in PRIORITY_NAMES.items():
        launch = graph.call_function(fs.all_to_all_launch.default, (x, x, x, n_recv, priority, "item", "0"))
        launch.meta["val"] = x.meta["val"]
        size = size_in_bytes(x.meta["val"])
        launch.meta[EXCHANGE_KEY] = GraphExchange("chunk", "gradients", name, size, launch, None, None, "item")
    graph.output(list(graph.nodes)[1:])
    return torch.fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("which, packed", (("", {"late", "early"}), (",which=all", {"urgent", "late", "early"})))
def test_urgent_launches_stay_as_they_are_unless_asked_for(which, packed):
    gm = _launches_of_each_priority()
    cfg = Config(passes="all,compress_exchange", compress=f"rows:0.5{which}")
    assert compress_exchange(gm, cfg) == len(packed)
    assert {x.priority for x in exchanges(gm.graph) if x.launch.kwargs.get("packing")} == packed


@pytest.mark.thorough
def test_a_pass_without_a_share_changes_nothing():
    (found,) = run_ranks_apart(_lines, [({},)])
    assert found["whole", "bucket_gradients"] == found["whole", "compress_exchange"]


def test_a_pass_without_a_share_says_so(caplog):
    module = sys.modules["freescale.passes.compress_exchange"]
    module._say_that_nothing_is_lost.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert module.compress_exchange(torch.fx.symbolic_trace(nn.Identity()), Config(passes="compress_exchange")) == 0
    assert "without a share (FREESCALE_COMPRESS) or a dtype (FREESCALE_WIRE): nothing is compressed" in caplog.text


@pytest.mark.parametrize(
    ("options", "dtype", "sentence"),
    [
        ({"compress": "rows:0.5,which=all"}, torch.bfloat16, "urgent rows of item are bfloat16: only float32 can be compressed"),
        ({"wire": "fp16", "compress": "which=all"}, torch.float64, "urgent rows of item are float64: only float32 can be compressed"),
        ({"wire": "fp16", "passes": "find_exchanges,compress_exchange"}, torch.float32,
         "urgent rows of item is not split: compress_exchange needs split_exchanges"),
        ({"compress": "dense:0.5", "dense": "allreduce", "passes": "find_exchanges,split_exchanges,compress_exchange"},
         torch.float32, "the gradient of out.weight is not in a bucket: compress_exchange needs bucket_gradients"),
    ],
)  # fmt: skip
def test_refused(options, dtype, sentence):
    with pytest.raises(RankFailed) as error:
        run_ranks_apart(_lines, [({"strict": True, **options}, dtype)])
    assert sentence in str(error.value)


def test_every_block_of_dense_gradients_sends_something():
    for share in (Fraction(1, 2), Fraction(1, 100), Fraction(1, 10**5)):
        for n in (1, 7, 8192, 8193, 12345, 10**6 + 1, 2**26 + 1):
            packing = dense_packing(n, share)
            blocks = compression.blocks_of(compression.Slabs.of(torch.tensor([n])), packing)
            assert int(blocks.entries.min()) >= 1 and packing.block_rows <= 65536, (share, n)
            if n > 10 * DENSE_BLOCK and share == Fraction(1, 100):
                assert int(blocks.entries.sum()) * 6 <= share * n * 4


# ---- training --------------------------------------------------------------------------------------------------------


def _batches(steps):
    rank = dist.get_rank()
    for step in range(steps):
        g = torch.Generator().manual_seed(100 * step + rank)
        yield {"item": torch.randint(0, 97, (5 + (7 * step + rank) % 30,), generator=g)}


def _train(options, ahead, steps=8):
    import freescale

    torch._dynamo.reset()
    model = Model()
    run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "eager", **options})
    optimizer = torch.optim.SGD(model.out.parameters(), lr=0.05)
    losses, batches = [], _batches(steps)
    for batch in freescale.LookaheadLoader(batches, run) if ahead else batches:
        optimizer.zero_grad()
        loss = run(batch)
        loss.backward()
        for p in model.out.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: t.clone() for n, t in model.state_dict().items()}


class Simulated:
    """Exact launches of what the definition makes of the rows: the same training, written another way."""

    def __init__(self, packings, which):
        self.packings, self.which, self.on, self.numbers = packings, which, True, {}
        self.launch = launch.launch

    def __call__(self, what, x, send_counts, recv_counts, n_recv, priority, table, group_name, **how):
        if self.on and "packing" not in how and (self.which == "all" or priority != 0):
            self.numbers[what, priority] = self.numbers.get((what, priority), 0) + 1
            rank, number = dist.get_rank(), self.numbers[what, priority]
            packed = row_packing.pack(self.packings[what], x, send_counts, send_counts, rank, number)
            x = x.clone()  # what goes to this rank itself stays
            packed.unpack(packed.x, x)
        return self.launch(what, x, send_counts, recv_counts, n_recv, priority, table, group_name, **how)


def _equals_a_simulation(options, which, rows, gradients, loops=(False, True)):
    """`loops`: without look-ahead, with it."""
    from freescale.runtime.lookahead import step

    for ahead in loops:
        launch._launches.clear()
        got = _train({"passes": "all,compress_exchange", "strict": True, **options}, ahead)
        launch._launches.clear()
        again = _train({"passes": "all,compress_exchange", "strict": True, **options}, ahead)
        simulated = Simulated({"rows": rows, "gradients": gradients}, which)
        apply = step.apply_late_gradients

        def apply_exactly(*args, simulated=simulated, apply=apply):
            simulated.on = False  # what is pending at the end of a loop travels as it is
            apply(*args)
            simulated.on = True

        with mock.patch.object(launch, "launch", simulated), mock.patch.object(step, "apply_late_gradients", apply_exactly):
            expected = _train({"strict": True}, ahead)
        exact = _train({"strict": True}, ahead)
        assert got[0] == again[0] and all(torch.equal(t, again[1][n]) for n, t in got[1].items())
        assert got[0] == expected[0] and all(torch.equal(t, expected[1][n]) for n, t in got[1].items())
        assert (got[0] == exact[0]) == (which == "background" and not ahead)
        shared = [got[1]["out.weight"].clone()]
        dist.all_reduce(shared[0])
        assert torch.equal(shared[0], got[1]["out.weight"] * dist.get_world_size())


CASES = {
    "background": ({"compress": "rows:0.3"}, "background", "largest:8/5:128", "largest:8/5:128"),
    "all": ({"compress": "rows:0.3,which=all"}, "all", "largest:8/5:128", "largest:8/5:128"),
    "fp8": ({"wire": "fp8", "compress": "which=all"}, "all", "fp8", "fp8:stochastic"),
    "bf16": ({"wire": "bf16"}, "background", "bf16", "bf16"),
    "fp16": ({"wire": "fp16", "compress": "which=all"}, "all", "fp16", "fp16"),
}


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=pytest.mark.slow if case in ("bf16", "fp16") else pytest.mark.thorough) for case in CASES
])  # fmt: skip
def test_training_equals_a_simulation(case):
    run_ranks(_equals_a_simulation, 2, *CASES[case])


def test_one_loop_equals_a_simulation():
    run_ranks(_equals_a_simulation, 2, *CASES["fp8"], (False,))


def _alone():
    for options in ({"compress": "rows:0.1,which=all"}, {"wire": "fp8", "compress": "which=all"}):
        got = _train({"passes": "all,compress_exchange", **options}, True)
        exact = _train({}, True)
        assert got[0] == exact[0] and all(torch.equal(t, exact[1][n]) for n, t in got[1].items())


@pytest.mark.thorough
def test_one_rank_loses_nothing():
    run_ranks(_alone, 1)


def _deprecated(options):
    """What one rank is told in deprecated words, the others are told in those that take their place."""
    given, instead = options
    mine = given if dist.get_rank() == 0 else instead
    got, expected = _train(mine, True), _train(instead, True)
    assert got[0] == expected[0] and all(torch.equal(t, expected[1][n]) for n, t in got[1].items())


DEPRECATED = [
    ({"passes": "all,compress_exchange", "wire": "fp16,stochastic"}, {"passes": "all,compress_exchange", "wire": "fp16"}),
    ({"passes": "all,compress_exchange", "compress": "rows:lossless,which=all", "strict": True}, {"strict": True}),
]


@pytest.mark.thorough
@pytest.mark.parametrize("options", DEPRECATED)
def test_ranks_agree_on_what_takes_the_place_of_a_deprecated_value(options):
    run_ranks(_deprecated, 2, options)


@pytest.mark.slow
def test_training_equals_a_simulation_on_four_ranks():
    run_ranks(_equals_a_simulation, 4, *CASES["background"])


def _generated_code():
    """What Inductor makes of it: buffers are kept as long as they are needed."""
    options = {"passes": "all,compress_exchange", "compress": "rows:0.3,which=all"}
    for ahead in (False, True):
        got = _train({**options, "codegen": "inductor"}, ahead)
        expected = _train(options, ahead)
        assert torch.allclose(torch.tensor(got[0]), torch.tensor(expected[0]), rtol=1e-4)


@pytest.mark.thorough
def test_generated_code_trains_alike():
    run_ranks(_generated_code, 2)


def _bytes(less):
    from freescale.kernels.transports import c10d, launch_record

    received, honest = [], c10d.start_all_to_all

    def counting(out, x, recv, send, group):
        received.append((sum(recv) - recv[group.rank()]) * out[:1].nbytes)  # from other ranks
        return honest(out, x, recv, send, group)

    found = {}
    for name, options in (("exact", {}), ("less", {"passes": "all,compress_exchange", "compress": less})):
        launch_record.records.clear()
        received.clear()
        with mock.patch.object(c10d, "start_all_to_all", counting):
            _train(options, False)
        found[name] = sum(received)
    assert sum(r.bytes for r in launch_record.records if " of item" in r.label) == found["less"]
    return found


@pytest.mark.thorough
def test_records_have_the_bytes_that_travel():
    for found in run_ranks(_bytes, 2, "rows:0.1,which=all"):
        assert 0.08 * found["exact"] < found["less"] <= 0.1 * found["exact"]
