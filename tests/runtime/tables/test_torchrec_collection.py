"""TorchRec's sharded collections in one compiled graph: the same training as eager TorchRec."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trec
from listening import listen
from ranks import HAS_TORCHREC, run_ranks
from shared_ranks import Outcomes, run_together

pytestmark = pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")

STEPS = 20


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) if a.numel() else 0.0


def _compiled(model, **kwargs):
    torch._dynamo.reset()
    return torch.compile(model, backend="freescale", **kwargs)


@lru_cache(maxsize=1)  # the next one resets Dynamo (no defaults: it tells calls apart by how they are written)
def _trained(layout: str, optimizer: str, ddp: bool, codegen: str, small: bool) -> tuple[Any, Any, Any]:
    """Of this rank: a model, the same compiled, and its beginning."""
    import freescale.backend as backend

    backend.COMPILED.clear()
    model = trec.build(layout, optimizer, ddp, small=small)
    run = _compiled(model, fullgraph=not ddp, options={"codegen": codegen, "strict": True})
    return model, run, (trec.snapshot(model), trec.optimizer_state(model))


def _against_eager(
    layout: str, optimizer: str, ddp: bool = False, codegen: str = "eager", small: bool = False
) -> float:
    """Largest relative difference to eager TorchRec."""
    none = layout != "mixed"
    eager = trec.build(layout, optimizer, ddp, small=small)
    expected = trec.train(eager, eager, STEPS, none=none)
    model, run, beginning = _trained(layout, optimizer, ddp, codegen, small)
    trec.put_back(model, *beginning)
    losses = trec.train(model, run, STEPS, none=none)
    a, b = trec.snapshot(model), trec.snapshot(eager)
    assert a.keys() == b.keys()
    worst = max(_relative(a[name], b[name]) for name in a)
    scale = max(map(abs, expected))
    # something was trained at all
    assert expected[0] != expected[-1] and b["ec.embeddings.item.weight/0" if layout != "table_wise" else "mix.weight"].abs().sum() > 0
    return max(worst, max(abs(x - y) for x, y in zip(losses, expected, strict=True)) / scale)


OPTIMIZERS = ("sgd", "rowwise_adagrad")


def _every_optimizer(*args: Any) -> dict[str, float]:
    return {optimizer: _against_eager(args[0], optimizer, *args[1:]) for optimizer in OPTIMIZERS}


slow = pytest.mark.slow


@pytest.mark.parametrize("case", ("row_wise, sgd", "row_wise, rowwise_adagrad", "mixed, sgd"))
def test_equals_eager_torchrec(case, checked):
    """All tables with one of the optimizers, two with the other."""
    assert max(checked.of(case)) <= 1e-6


@pytest.mark.thorough
def test_table_wise_tables_equal_eager_torchrec():
    assert max(run_ranks(_against_eager, 2, "table_wise", "sgd")) <= 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ("row_wise", "table_wise", "mixed"))
def test_all_tables_equal_eager_torchrec(layout):
    assert max(run_ranks(_against_eager, 2, layout, "rowwise_adagrad")) <= 1e-6


@pytest.mark.thorough
def test_column_wise_tables_equal_eager_torchrec():
    assert max(run_ranks(_against_eager, 2, "column_wise", "rowwise_adagrad")) <= 1e-6


@slow
@pytest.mark.parametrize("layout", ("row_wise", "table_wise", "mixed", "column_wise"))
def test_equals_eager_torchrec_on_four_ranks(layout):
    for found in run_ranks(_every_optimizer, 4, layout):
        assert max(found.values()) <= 1e-6, found


def test_two_tables_equal_eager_torchrec_under_inductor():
    assert max(run_ranks(_against_eager, 2, "mixed", "rowwise_adagrad", False, "inductor", True)) <= 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize("small", (pytest.param(True, marks=slow), False), ids=("two tables", "all"))
def test_equals_eager_torchrec_under_inductor_with_ddp(small):
    for found in run_ranks(_every_optimizer, 2, "mixed", True, "inductor", small):
        assert max(found.values()) <= 1e-6, found


def _replicated_against_sharded() -> float:
    """A table that is data-parallel or row-wise learns the same (eager TorchRec cannot train the former on CPU)."""
    tables = []
    for layout in ("row_wise", "mixed"):
        model, run, beginning = _trained(layout, "sgd", True, "eager", False)
        trec.put_back(model, *beginning)
        for group in model.fused_optimizer.param_groups:
            group["lr"] = 0.1
        trec.train(model, run, 8, none=False, lr=0.1, scheduled=False)
        tables.append(trec.snapshot(model))
    sharded, replicated = tables
    name = next(n for n in replicated if "user" in n)
    shard = next(v for n, v in sharded.items() if "user" in n)
    block = -(-trec.USERS // dist.get_world_size())
    mine = replicated[name][dist.get_rank() * block :][: shard.shape[0]]
    fresh = trec.snapshot(trec.build("mixed", "sgd"))[name]
    assert not torch.equal(fresh, replicated[name])
    return _relative(mine, shard)


@pytest.mark.thorough
def test_data_parallel_tables_are_averaged():
    assert max(run_ranks(_replicated_against_sharded, 2)) <= 1e-6


def _fifty_batches(ddp: bool):
    from torch._dynamo.utils import counters

    import freescale.backend as backend
    from freescale.driver import REPORT

    model, run, _ = _trained("row_wise", "sgd", ddp, "eager", False)
    counters["graph_break"].clear()

    def counts() -> tuple[Counter[str], Counter[str]]:
        return Counter(REPORT.graphs) + Counter(REPORT.from_cache), Counter(REPORT.exchanges)

    graphs, exchanges = counts()
    trec.train(model, run, 50)
    fifty = list(backend.COMPILED.values()), counts()[0] - graphs, counts()[1] - exchanges
    trec.train_on(model, run, [trec.batch(s, dist.get_rank(), none=False, samples=1) for s in range(6)])
    breaks = [b for b in counters["graph_break"] if "set_runtime_stats_and_log" not in b and "ddp" not in b]
    return *fifty, breaks, list(backend.COMPILED.values())


def test_fifty_batches_take_two_compilations(checked):
    """One for random lengths and empty histories, one for ranks without samples; and one more for one sample."""
    _expect_two_compilations(checked.of("fifty batches"))


@pytest.mark.thorough
def test_fifty_batches_with_ddp_take_two_compilations():
    _expect_two_compilations(run_ranks(_fifty_batches, 2, True))


def _expect_two_compilations(ranks):
    for compiled, graphs, exchanges, breaks, with_one_sample in ranks:
        assert compiled == [2] and with_one_sample == [3]
        assert graphs == {"forward": 2, "backward": 2} and exchanges == {"forward": 2, "backward": 2}
        assert breaks == []


def _no_checkpoint_after_a_failed_transfer(model):
    from freescale.kernels.transports import open_transports

    def drain():
        raise RuntimeError("rank 1 is gone")

    open_transports._open["staged", "the group"] = None, SimpleNamespace(drain=drain)
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        model.state_dict()
    open_transports._open.clear()


def _checkpoints(small: bool = True):
    """eager -> compiled -> eager by TorchRec's own state_dict, against ten eager steps without a stop."""
    whole = trec.build("row_wise", "rowwise_adagrad", small=small)
    trec.train(whole, whole, 9)
    first = trec.build("row_wise", "rowwise_adagrad", small=small)
    trec.train(first, first, 3)
    second, run, _ = _trained("row_wise", "rowwise_adagrad", False, "eager", small)
    second.load_state_dict(first.state_dict())
    second.fused_optimizer.load_state_dict(first.fused_optimizer.state_dict())
    trec.train(second, run, 3, first=3)
    third = trec.build("row_wise", "rowwise_adagrad", small=small)
    third.load_state_dict(second.state_dict())
    third.fused_optimizer.load_state_dict(second.fused_optimizer.state_dict())
    assert first.state_dict().keys() == second.state_dict().keys() == third.state_dict().keys()
    _no_checkpoint_after_a_failed_transfer(second)
    trec.train(third, third, 3, first=6)
    # loading into a model that is compiled already reaches its rows
    second.load_state_dict(third.state_dict())
    a, b, c = (trec.snapshot(m) for m in (third, whole, second))
    assert all(torch.equal(a[n], c[n]) for n in a)
    return max(_relative(a[n], b[n]) for n in a)


def test_checkpoints_go_both_ways(checked):
    assert max(checked.of("checkpoints")) <= 1e-6


@pytest.mark.thorough
def test_checkpoints_of_all_tables_go_both_ways():
    assert max(run_ranks(_checkpoints, 2, False)) <= 1e-6


def _fall_back(layout: str, strict: bool | None, optimizer: str = "sgd", fused: dict[str, Any] | None = None):
    said = listen()
    eager = trec.build(layout, optimizer, small=True, **(fused or {}))
    expected = trec.train(eager, eager, 3, none=False)
    model = trec.build(layout, optimizer, small=True, **(fused or {}))
    options = {"codegen": "eager"} | ({} if strict is None else {"strict": strict})
    losses = trec.train(model, _compiled(model, options=options), 3, none=False)
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True)), said


# name: why, optimizer, for FBGEMM
LEFT = {
    "ema": ("their optimizer is ema_in_place_row_wise_adagrad", "ema", {}),
    "clipping": ("gradient_clipping", "sgd", {"gradient_clipping": True, "max_gradient": 1e-3}),
}


def _expect_left(name, ranks):
    """Our owner applies the sum of a row's gradients, twice in a step with look-ahead: not what these optimizers do."""
    for difference, said in ranks:
        assert len([s for s in said if "TorchRec's own path" in s and LEFT[name][0] in s]) == 1, said
        assert difference <= 1e-6


def test_what_is_no_matter_of_rows_is_left_to_torchrec(checked):
    _expect_left("ema", checked.of("ema"))


@pytest.mark.thorough
def test_clipped_gradients_are_left_to_torchrec():
    _expect_left("clipping", run_ranks(_fall_back, 2, "row_wise", False, *LEFT["clipping"][1:]))


def _half_output() -> list[str | None]:
    from torchrec.modules.embedding_configs import DataType

    from freescale.runtime.tables import torchrec_support

    model = trec.build("row_wise", "sgd", output_dtype=DataType.FP16)
    found = [m for m in model.modules() if type(m).__name__ == "ShardedEmbeddingCollection"]
    return [torchrec_support.unsupported_reason(m) for m in found]


def test_half_precision_output_is_left_to_torchrec():
    for reasons in run_ranks(_half_output, 1):
        assert reasons and all("output_dtype" in str(r) for r in reasons), reasons


def test_what_is_left_to_torchrec_is_an_error_under_strict():
    for error in run_ranks(_fall_back, 2, "row_wise", True, "ema", expect_errors=True):
        assert "ema_in_place" in error and "'user'" in error
    for error in run_ranks(_fall_back, 2, "row_wise", None, "ema", env={"FREESCALE_STRICT": "1"}, expect_errors=True):
        assert "ema_in_place" in error and "'user'" in error


def _weighted():
    from torchrec import KeyedJaggedTensor

    model = trec.build("row_wise", "sgd", small=True)
    run = _compiled(model, options={"codegen": "eager"})
    kjt, weight = trec.batch(1, dist.get_rank(), none=False)
    weighted = KeyedJaggedTensor(kjt.keys(), kjt.values(), torch.rand(kjt.values().shape[0]), kjt.lengths())
    from freescale.runtime.tables import torchrec_support

    torchrec_support._warn_once.cache_clear()
    said = listen("freescale.runtime.tables.torchrec_support")
    expected = float(model(weighted, weight))
    return abs(float(run(weighted, weight)) - expected), list(said)


def test_weighted_features_are_left_to_torchrec(checked):
    for difference, refused in checked.of("weighted"):
        assert difference <= 1e-6 and len(refused) == 1 and "weighted" in refused[0]


def _bad_id(feature: str, value: int) -> str:
    model, run, beginning = _trained("mixed", "sgd", False, "eager", False)
    trec.put_back(model, *beginning)
    trec.train(model, run, 1, none=False)
    kjt, weight = trec.batch(1, dist.get_rank(), none=False)
    if dist.get_rank() == 1:
        at = kjt.keys().index(feature)
        kjt.values()[sum(kjt.length_per_key()[:at])] = value
    with pytest.raises(IndexError) as caught:
        run(kjt, weight)
    return str(caught.value)


BAD_IDS = (("candidate", "item", 4711), ("tiny", "tiny", 4711), ("candidate", "item", -1))


@pytest.mark.parametrize("feature, table, value", BAD_IDS)
def test_an_id_outside_its_table_is_an_error_on_every_rank(feature, table, value, checked):
    for error in checked.of(f"id {value} of {feature}"):
        assert f"rank 1: id {value} is outside table '{table}' (feature '{feature}')" in error


# Those that share a model are neighbours.
CHECKS = {
    "fifty batches": partial(_fifty_batches, False),
    "row_wise, sgd": partial(_against_eager, "row_wise", "sgd"),
    "row_wise, rowwise_adagrad": partial(_against_eager, "row_wise", "rowwise_adagrad", small=True),
    "checkpoints": _checkpoints,
    "mixed, sgd": partial(_against_eager, "mixed", "sgd"),
    **{f"id {value} of {feature}": partial(_bad_id, feature, value) for feature, _, value in BAD_IDS},
    "ema": partial(_fall_back, "row_wise", False, *LEFT["ema"][1:]),
    "weighted": _weighted,
}


@pytest.fixture(scope="module")
def checked() -> Outcomes:
    return run_together(CHECKS, 2)


def test_reasons_to_leave_a_collection_to_torchrec():
    """Kinds of tables that cannot be built on a CPU; unsupported_reason reads TorchRec's plan, so a stand-in for it will do."""
    from types import SimpleNamespace as Stub

    from freescale.runtime.tables.torchrec_support import unsupported_reason

    def reason(sharding: str, kernel: str, dtype: str = "FP32") -> str | None:
        plan = {"t": Stub(sharding_type=sharding, compute_kernel=kernel)}
        config = Stub(name="t", data_type=Stub(value=dtype))
        return unsupported_reason(Stub(module_sharding_plan=plan, _embedding_configs=[config], _env=None))

    assert reason("row_wise", "fused_uvm_caching") == "table 't' uses compute kernel fused_uvm_caching"
    assert reason("table_wise", "fused_uvm") == "table 't' uses compute kernel fused_uvm"
    assert reason("grid_shard", "fused") == "table 't' is sharded grid_shard"
    assert reason("row_wise", "fused", "BF16") == "table 't' holds BF16 rows"
    assert reason("data_parallel", "dense", "FP16") == "table 't' is data_parallel and holds FP16 rows"
