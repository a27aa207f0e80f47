"""TorchRec's own comparison of a sharded and an unsharded model, with its models, tables and inputs, on our ranks.

All of it is in TorchRec's wheel (`torchrec.distributed.test_utils`) and runs unmodified, except for how ranks start,
the number of steps (three, each with its own batch, instead of one), and the sharded model: it is compiled, and
optionally trained under a LookaheadLoader.
"""

from __future__ import annotations

import os
import sys
import types
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import adam_on_cpu
import trec
from listening import listen

MISSING = "torchrec.distributed.tests.test_sequence_model"  # test_sharding imports a name from it; it is in no wheel
ROWS, SCALE = 200, 100


@dataclass(frozen=True)
class Case:
    """`tables`: sharding of each kind of tables; the kinds are "sequence", "pooled" and "weighted"."""

    tables: dict[str, str]
    optimizer: str | None = None  # in backward; by default FBGEMM's SGD, compared with torch.optim.SGD
    mean: bool = False
    half: bool = False
    dedup: bool = False
    quantized: bool = False  # quantized communication
    tensordict: bool = False  # instead of a KeyedJaggedTensor
    count: int = 1  # tables of each kind; pooled ones have one or two more, which share features
    samples: tuple[int, ...] = (4, 3, 5)  # per rank, in each step
    local_size: int | None = None  # ranks per host
    given: dict[str, Any] = field(default_factory=dict)  # passed to TorchRec's test unchanged


@dataclass(frozen=True)
class Outcome:
    report: dict[str, Any]
    stats: list[dict[str, Any]]
    warnings: list[str]


def own_modules() -> Any:
    """TorchRec's modules that contain its tests."""
    if MISSING not in sys.modules:
        stand_in = types.ModuleType(MISSING)
        stand_in.TestEmbeddingCollectionSharder = None  # type: ignore[attr-defined]  # only used for 2D
        sys.modules[MISSING] = stand_in
    from torchrec.distributed.test_utils import test_model_parallel, test_sharding

    return test_model_parallel, test_sharding


def sharders(case: Case, test_sharding: Any) -> list[Any]:
    found = []
    names = {"sequence": "embedding_collection", "pooled": "embedding_bag_collection"}
    for kind, name in names.items():
        if kind in case.tables:
            how = case.tables[kind]
            kernel = "dense" if how == "data_parallel" else "fused"
            quantized = {"qcomms_config": quantization()} if case.quantized else {}
            found.append(test_sharding.create_test_sharder(name, how, kernel, **quantized))
            if kind == "sequence":
                found[-1]._use_index_dedup = case.dedup
    return found


def quantization() -> Any:
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig

    return QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)


def optimizer_of(name: str) -> tuple[Any, dict[str, Any]]:
    from torchrec.optim import Adam, PartialRowWiseAdam
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    if "adam" in name:
        kind = PartialRowWiseAdam if "rowwise" in name else Adam
        return kind, {"lr": 0.05, "eps": 1e-3, "beta1": 0.8, "beta2": 0.95}
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}
    return kinds[name], {"lr": 0.05} if name == "sgd" else {"lr": 0.05, "eps": 1e-8}


def build_own(case: Case, device: torch.device) -> Any:
    """TorchRec's test class with the tables of `case` and our ranks."""
    test_model_parallel, test_sharding = own_modules()
    from torchrec import EmbeddingConfig
    from torchrec.modules.embedding_configs import DataType

    class Own(test_model_parallel.ModelParallelTestShared):
        def _build_tables_and_groups(self, data_type: Any = DataType.FP32) -> None:
            super()._build_tables_and_groups(data_type)
            if "pooled" not in case.tables:
                self.tables, self.mean_tables = [], []
            sequences = [
                EmbeddingConfig(
                    num_embeddings=ROWS,
                    embedding_dim=16,
                    name=f"sequence_{i}",
                    feature_names=[f"sequence_feature_{i}"] + ["another_feature"] * (i == 0),
                    data_type=data_type,
                )
                for i in range(case.count if "sequence" in case.tables else 0)
            ]
            self.tables, self.mean_tables = self.tables + sequences, self.mean_tables + sequences
            for table in (*self.tables, *self.mean_tables, *self.weighted_tables):
                table.num_embeddings = ROWS  # more than a batch has ids, so that two batches share only some

        def _run_multi_process_test(self, *, callable: Any, backend: str, **arguments: Any) -> None:
            test_sharding.sharding_single_rank_test_single_process(
                pg=dist.group.WORLD, device=device, rank=dist.get_rank(), **arguments
            )

    own = Own()
    own.num_features = case.count
    own.num_shared_features = own.num_weighted_features = 2 if case.count > 2 else 1
    own.table_names = [f"table_{i}" for i in range(own.num_features + own.num_shared_features)]
    own.backend = "gloo"
    return own


def constraints(case: Case, tables: list[Any]) -> dict[str, Any]:
    """Tables of these sizes are split along columns, for column-wise shardings."""
    from torchrec.distributed.planner.types import ParameterConstraints

    kinds = sorted(set(case.tables.values()))  # grid sharding must be requested here too
    least = 8 if "grid_shard" in kinds else 4  # columns
    return {
        table.name: ParameterConstraints(sharding_types=kinds, min_partition=max(least, table.embedding_dim // 2))
        for table in tables
    }


def _copy(input: Any) -> Any:
    """TorchRec's inputs are views of one global batch; their storage offsets differ and would be guarded on."""
    return replace(input, float_features=input.float_features.clone(), label=input.label.clone())


class Training:
    """Replaces the steps of TorchRec's test."""

    def __init__(self, case: Case, test_sharding: Any, options: dict[str, Any] | None, lookahead: bool) -> None:
        self.case, self.lookahead, self.options = case, lookahead, options
        self.inputs: list[Any] = []
        self.stats: list[dict[str, Any]] = []
        self.step = test_sharding.gen_full_pred_after_one_step
        self.generate = test_sharding.gen_model_and_input
        self.sharded = test_sharding.DistributedModelParallel
        self.test_sharding = test_sharding

    def model_and_input(self, *args: Any, batch_size: int, random_seed: int | None, **kwargs: Any) -> Any:
        kwargs["input_type"] = "td" if self.case.tensordict else "kjt"
        for step, samples in enumerate(self.case.samples):
            model, inputs = self.generate(*args, batch_size=samples, random_seed=step, **kwargs)
            self.inputs += inputs
        return model, inputs

    def shard(self, *args: Any, **kwargs: Any) -> Any:
        model = self.sharded(*args, **kwargs)
        if self.options is not None:
            model.compile(backend="freescale", options=self.options)
        return model

    def train(self, model: Any, optimizer: Any, input: Any) -> torch.Tensor:
        """Train the sharded model, then the unsharded one, which gets the batches of all ranks as one."""
        import freescale

        device = input.label.device
        if isinstance(model, self.sharded):
            self.model, self.beginning = model, trec.snapshot(model)
            batches = [_copy(local[dist.get_rank()]).to(device) for _, local in self.inputs]
            loader = freescale.LookaheadLoader(batches, model) if self.lookahead else batches
        else:
            batches = loader = [whole.to(device) for whole, _ in self.inputs]
        for batch in loader:
            if len(batch.label) or loader is not batches:  # without samples, no training step of the unsharded model
                self.step(model, optimizer, batch, skip_inference=True)
        if loader is not batches:
            self.stats = loader.stats()
        with torch.no_grad():
            prediction = self.step(model, optimizer, batches[-1], skip_training=True)
        if model is not self.model:
            self.compare_rows(model)
        return prediction

    def compare_rows(self, unsharded: Any) -> None:
        """TorchRec compares predictions, which hardly depend on updates of tables of this size."""
        trained = trec.snapshot(self.model)
        self.test_sharding.copy_state_dict(self.model.state_dict(), unsharded.state_dict())
        expected, learned = trec.snapshot(self.model), {n for n, _ in self.model.named_parameters()}
        for name, rows in expected.items():
            found, start = trained[name].float(), self.beginning[name].float()
            if name.split("/")[0] not in learned or not rows.numel():
                continue
            change, off = (rows.float() - start).abs().max().item(), (rows.float() - found).abs().max().item()
            assert change > 0 or "embedding" not in name, name  # (the dense model has an unused parameter)
            rough = self.case.half or self.case.quantized
            assert off <= (0.02 if rough else 1e-4) * change, (name, off, change)


def louder(model_class: Any) -> Any:
    """Scales up the loss, so that rounding is small relative to an update of a table."""

    class Louder(model_class):
        def forward(self, input: Any) -> Any:
            found = super().forward(input)
            return (found[0] * SCALE, found[1]) if self.training else found

    return Louder


def arguments(case: Case, own: Any) -> dict[str, Any]:
    """Arguments of TorchRec's `_test_sharding`."""
    from torchrec.distributed.test_utils.test_model import TestMixedEmbeddingSparseArch, TestSparseNN
    from torchrec.modules.embedding_configs import DataType, PoolingType

    own._build_tables_and_groups()
    given = {
        "world_size": dist.get_world_size(),
        "local_size": case.local_size,
        "model_class": louder(TestMixedEmbeddingSparseArch if "sequence" in case.tables else TestSparseNN),
        "constraints": constraints(case, own.tables + own.weighted_tables),
        "has_weighted_tables": "weighted" in case.tables,
        "pooling": PoolingType.MEAN if case.mean else PoolingType.SUM,
        "data_type": DataType.FP16 if case.half else DataType.FP32,
        **case.given,
    }
    if case.quantized:
        given["qcomms_config"] = quantization()
    if case.optimizer is not None:
        names = ("embedding_bags", "embeddings")  # substrings of parameter names
        given["apply_optimizer_in_backward_config"] = dict.fromkeys(names, optimizer_of(case.optimizer))
    return given


def compare(case: Case, options: dict[str, Any] | None, lookahead: bool = False, device: str = "cpu") -> Outcome:
    """Run on every rank. `options`: of the backend; None for TorchRec alone. Raises if TorchRec's test fails."""
    import freescale

    _, test_sharding = own_modules()
    # If CI is in the environment, torch fails if an op returns its input; FBGEMM's permute_pooled_embs does so for a
    # batch without samples. Older torch releases only warn.
    if hasattr(torch._functorch.config, "error_on_custom_op_aliasing"):
        torch._functorch.config.error_on_custom_op_aliasing = False
    training = Training(case, test_sharding, options, lookahead)
    own = build_own(case, torch.device(device))
    os.environ["LOCAL_WORLD_SIZE"] = str(case.local_size or dist.get_world_size())
    os.environ["LOCAL_RANK"] = str(dist.get_rank() % (case.local_size or dist.get_world_size()))
    torch.use_deterministic_algorithms(device == "cpu")  # as in TorchRec's tests; on CUDA, not all ops support it
    warnings = listen()
    if options is not None and "adam" in (case.optimizer or ""):
        adam_on_cpu.allow()
    with (
        adam_on_cpu.placeholders_step(),
        mock.patch.object(test_sharding, "gen_model_and_input", training.model_and_input),
        mock.patch.object(test_sharding, "gen_full_pred_after_one_step", training.train),
        mock.patch.object(test_sharding, "DistributedModelParallel", training.shard),
    ):
        own._test_sharding(sharders=sharders(case, test_sharding), **arguments(case, own))
    return Outcome(freescale.report(), training.stats, warnings)
