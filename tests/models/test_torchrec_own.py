"""TorchRec's own tests, freescale compiled into every DistributedModelParallel: equal to the unsharded model.

What they do, and what of it is replaced: tests/support/torchrec_own.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interpreted import needs_gpu
from ranks import HAS_TORCHREC, RankFailed, run_ranks
from torchrec_own import Case, compare

pytestmark = pytest.mark.skipif(not HAS_TORCHREC, reason="TorchRec or FBGEMM is not installed")
thorough = pytest.mark.thorough

EAGER = {"codegen": "eager", "strict": True}  # strict: nothing is left to TorchRec
INDUCTOR = {"strict": True}
SENT = ("bytes_urgent", "bytes_early", "bytes_back_urgent", "bytes_late")

SEQUENCES = {
    "row_wise": Case({"sequence": "row_wise"}),
    "table_wise": Case({"sequence": "table_wise"}, optimizer="rowwise_adagrad"),  # one table: a rank without any
    "column_wise": Case({"sequence": "column_wise"}, count=2, optimizer="adagrad"),
    "data_parallel": Case({"sequence": "data_parallel", "pooled": "row_wise"}),
    "duplicates removed": Case({"sequence": "row_wise"}, dedup=True, optimizer="sgd"),
    "float16": Case({"sequence": "row_wise"}, half=True),
    "beside pooled": Case({"sequence": "table_wise", "pooled": "row_wise"}),
    "adam": Case({"sequence": "row_wise"}, optimizer="adam"),
    "quantized": Case({"sequence": "row_wise"}, quantized=True),
}
INT32 = {"use_offsets": True, "indices_dtype": torch.int32, "offsets_dtype": torch.int32, "lengths_dtype": torch.int32}
# (Weighted tables and an optimizer in backward do not go together: the unsharded model of TorchRec's test gets new
# parameters for weighted tables after the optimizer was attached.)
POOLED = {
    "row_wise": Case({"pooled": "row_wise"}, optimizer="rowwise_adagrad"),
    "table_wise": Case({"pooled": "table_wise"}, count=2, optimizer="rowwise_adagrad"),
    "column_wise": Case({"pooled": "column_wise"}, optimizer="adagrad"),
    "table_row_wise": Case({"pooled": "table_row_wise", "weighted": "table_row_wise"}),
    "table_column_wise": Case({"pooled": "table_column_wise"}, optimizer="sgd"),
    "grid": Case({"pooled": "grid_shard"}, local_size=2),  # four ranks
    "weighted": Case({"pooled": "row_wise", "weighted": "row_wise"}),
    "means": Case({"pooled": "table_wise"}, mean=True, samples=(3, 6, 2)),
    "batch sizes of ranks": Case({"pooled": "row_wise"}, given={"variable_batch_size": True}),
    "partial row-wise adam": Case({"pooled": "table_wise"}, optimizer="partial_rowwise_adam"),
    "quantized": Case({"pooled": "table_wise"}, quantized=True),
    "no samples": Case({"pooled": "column_wise"}, samples=(4, 0, 3)),
    "int32 offsets": Case({"pooled": "row_wise"}, given=INT32),
    "float16": Case({"pooled": "table_wise"}, half=True, given={"atol": 1e-4, "rtol": 1e-4}),  # the unsharded sums are halves
}
# What TorchRec itself cannot do on a CPU, and what it says then.
TORCHREC_FAILS = {
    "sequence, data_parallel": "split_with_sizes expects split_sizes to sum exactly",  # FBGEMM's lookup sums every list
    "sequence, duplicates removed": "fbgemm::jagged_unique_indices",  # has no kernel for a CPU
    "sequence, adam": "is not supported in CPU mode",  # freescale takes the step itself (adam_on_cpu.py)
    "pooled, partial row-wise adam": "is not supported in CPU mode",
    "pooled, batch sizes of ranks": "invalid tensor size",  # gloo has no reduce_scatter of uneven sizes
}


def ranks_of(case: Case) -> int:
    return 4 if "grid_shard" in case.tables.values() else 2


def compiled(case: Case, lookahead: bool, options: dict[str, Any] = EAGER, device: str = "cpu", **of_ranks: Any) -> None:
    """TorchRec's test passes, and freescale did it: one graph of the model, and nothing left to TorchRec."""
    for outcome in run_ranks(compare, ranks_of(case), case, options, lookahead, device, **of_ranks):
        report = outcome.report
        assert (report["graphs"], report["graph_breaks"], report["refused"]) == (1, 0, []), report
        # The graph of the evaluation, and at most torch's own graph for a size of 0.
        assert 1 <= report["recompiles"] <= 1 + (0 in case.samples), report
        assert min(report["exchanges"].values()) > 0, report
        assert outcome.warnings == []
        if lookahead:
            assert {entry["step"] for entry in outcome.stats} == set(range(len(case.samples)))
            sent = {name: sum(entry[name] for entry in outcome.stats) for name in SENT}
            assert min(sent.values()) > 0, sent


def cases(plain: tuple[str, ...], without: str, kinds: dict[str, Case]) -> list[Any]:
    """All but the quick one, with a LookaheadLoader and without; `plain`: those that are thorough without."""
    found = []
    for name, case in kinds.items():
        found.append(pytest.param(case, False, id=f"{name}-plain", marks=[] if name in plain else pytest.mark.slow))
        found.append(pytest.param(case, True, id=f"{name}-ahead"))
    return [x for x in found if x.id != without]


def test_pooled_tables_under_a_lookahead_loader():
    compiled(POOLED["row_wise"], True)


@thorough
@pytest.mark.parametrize(("case", "lookahead"), cases(("row_wise", "data_parallel", "beside pooled"), "", SEQUENCES))
def test_sequences(case, lookahead):
    compiled(case, lookahead)


@thorough
@pytest.mark.parametrize(("case", "lookahead"), cases(("row_wise", "grid", "weighted", "no samples", "batch sizes of ranks"), "row_wise-ahead", POOLED))
def test_pooled_tables(case, lookahead):
    compiled(case, lookahead)


@pytest.mark.parametrize("lookahead", (pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=thorough)))
def test_with_generated_code(lookahead):
    compiled(SEQUENCES["beside pooled"], lookahead, INDUCTOR)


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCHREC_FAILS)
def test_what_torchrec_alone_cannot_do_on_a_cpu(name):
    """It is tested with freescale above. If this fails, TorchRec has learned it: nothing is wrong with freescale."""
    kind, _, which = name.partition(", ")
    case = {"sequence": SEQUENCES, "pooled": POOLED}[kind][which]
    with pytest.raises(RankFailed, match=TORCHREC_FAILS[name]):
        run_ranks(compare, 2, case, None)


# ---- left to TorchRec, with a warning, and equal all the same --------------------------------------------------------

LEFT = {
    "data_parallel": Case({"pooled": "data_parallel", "weighted": "data_parallel"}, count=4),
    "batch sizes of features": Case({"pooled": "table_wise"}, given={"variable_batch_per_feature": True}),
    "TensorDict, pooled": Case({"pooled": "table_wise"}, tensordict=True),
    "TensorDict, sequence": Case({"sequence": "row_wise"}, tensordict=True),
}


@thorough
@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_torchrec(name):
    for outcome in run_ranks(compare, 2, LEFT[name], {}):
        assert any("TorchRec's own path is used" in said for said in outcome.warnings), outcome.warnings


class TestOnAGpu:
    """Ranks share one GPU; TorchRec takes each for a host of its own, as it puts rank 1 on the second GPU otherwise."""

    pytestmark = needs_gpu

    @pytest.mark.parametrize("lookahead", (False, True))
    @pytest.mark.parametrize("other", ("sequence", "weighted"))
    def test_beside_pooled_tables(self, other, lookahead):
        case = Case({"pooled": "row_wise", other: "row_wise"}, local_size=1)
        env = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        compiled(case, lookahead, EAGER, device="cuda:0", backend="cpu:gloo,cuda:nccl", env=env)
