"""Collections with TorchRec's quantized communication (QCommsConfig): its values, in the graph."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trec
from freescale.kernels import compression
from ranks import HAS_TORCHREC, run_ranks

pytestmark = pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")

STEPS, DIM, ROWS = 6, 8, 60
FEATURES = ("item", "user")


def _config(**names: Any) -> Any:
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig

    return QCommsConfig(**{k: CommType[v] if isinstance(v, str) else v for k, v in names.items()})


CASES: dict[str, dict[str, Any]] = {
    "fp16": {"forward_precision": "FP16", "backward_precision": "FP16"},
    "scaled": {"forward_precision": "FP16", "backward_precision": "FP16", "forward_loss_scale": 3.0, "backward_loss_scale": 7.0},
    "backward": {"backward_precision": "FP16"},
    "bf16": {"forward_precision": "FP16", "backward_precision": "BF16"},  # TorchRec takes FP16 on the CPU
}


@pytest.mark.parametrize("scale", (None, 3.0, 1e5))
@pytest.mark.parametrize("kind", ("fp16", "bf16"))
def test_codecs_are_those_of_fbgemm(kind, scale):
    from fbgemm_gpu.quantize_comm import QuantizedCommCodec
    from fbgemm_gpu.split_embedding_configs import SparseType

    theirs = QuantizedCommCodec(SparseType(kind), loss_scale=scale)
    packing = compression.parse(f"{kind}:codec" + ("" if scale is None else f":{scale!r}"))
    assert str(packing) == f"{kind}:codec" + ("" if scale is None else f":{scale!r}")
    x = torch.cat([torch.randn(999), torch.tensor([0.0, -0.0, 1e6, -1e6, 3e38, 1e-8, float("inf"), float("-inf"), float("nan")])])
    encoded = compression.encode(x, packing)
    assert torch.equal(encoded.view(torch.int16), theirs.encode(x).view(torch.int16))
    assert torch.equal(compression.decode(encoded, packing).view(torch.int32), theirs.decode(encoded).view(torch.int32))


class Model(nn.Module):
    def __init__(self, pooled: bool) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

        make, config = (EmbeddingBagCollection, EmbeddingBagConfig) if pooled else (EmbeddingCollection, EmbeddingConfig)
        tables = [config(num_embeddings=ROWS, embedding_dim=DIM, name=n, feature_names=[n]) for n in FEATURES]
        self.ec, self.pooled = make(tables=tables), pooled
        self.out = nn.Linear(DIM, 1)

    def forward(self, features: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.ec(features)
        values = torch.cat([found[n] if self.pooled else found[n].values() for n in FEATURES])
        return torch.tanh(self.out(values)).sum() / 16.0, values


def _batches() -> list[Any]:
    from torchrec import KeyedJaggedTensor

    found = []
    for step in range(STEPS):
        g = torch.Generator().manual_seed(10 * step + dist.get_rank())
        lengths = torch.randint(0, 5, (8,), generator=g)
        found.append(KeyedJaggedTensor(list(FEATURES), torch.randint(0, ROWS, (int(lengths.sum()),), generator=g), lengths=lengths))
    return found


def _train(pooled: bool, config: Any, kinds: dict[str, str], compiled: bool, ahead: bool = False, **options: Any) -> Any:
    """The first values, and losses and rows at the end."""
    import freescale

    torch.manual_seed(0)
    torch._dynamo.reset()
    model = trec.shard(Model(pooled), kinds, "sgd", quantized=config)
    optimizer = torch.optim.SGD(model.module.out.parameters(), lr=0.05)
    data: Any = _batches()
    if compiled:
        model.compile(backend="freescale", fullgraph=True, options={"codegen": "eager", "strict": True, **options})
        data = freescale.LookaheadLoader(data, model) if ahead else data
    losses, first = [], None
    for features in data:
        optimizer.zero_grad()
        loss, values = model(features)
        first = values.detach().clone() if first is None else first
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return first, losses, trec.snapshot(model)


def _difference(a: Any, b: Any) -> float:
    losses = max(abs(x - y) for x, y in zip(a[1], b[1], strict=True))
    return max(losses, *(float((a[2][n] - t).abs().max()) for n, t in b[2].items() if t.numel()))


def _same(a: Any, b: Any) -> bool:
    return a[1] == b[1] and torch.equal(a[0], b[0]) and all(torch.equal(a[2][n], t) for n, t in b[2].items())


def _compare(pooled: bool, case: str, kind: str) -> dict[str, Any]:
    kinds, config = dict.fromkeys(FEATURES, kind), _config(**CASES[case])
    expected, exact = _train(pooled, config, kinds, False), _train(pooled, None, kinds, False)
    plain = _train(pooled, config, kinds, True)
    found = {
        "first values": torch.equal(plain[0], expected[0]),
        "difference": _difference(plain, expected),
        "rounding": _difference(expected, exact),
        "ahead": _same(_train(pooled, config, kinds, True, ahead=True), plain),
        "passes": _same(_train(pooled, config, kinds, True, passes="none"), plain),
    }
    return found


OTHERS = (("fp16", "row_wise"), ("scaled", "table_wise"), ("backward", "column_wise"))


@pytest.mark.parametrize("case, kind", (("bf16", "row_wise"), *(pytest.param(*c, marks=pytest.mark.thorough) for c in OTHERS)))
def test_sequences(case, kind):
    """The forward pass to the bit. Gradients of a row are summed before they are rounded, TorchRec rounds each."""
    for found in run_ranks(_compare, 2, False, case, kind):
        assert found["first values"] and found["ahead"] and found["passes"], found
        assert 0 < found["rounding"] < 1e-3 and found["difference"] < 1e-3, found


@pytest.mark.thorough
@pytest.mark.parametrize("case, kind", OTHERS)
def test_bags(case, kind):
    """Rows are rounded before they are pooled, TorchRec rounds sums."""
    for found in run_ranks(_compare, 2, True, case, kind):
        assert found["ahead"] and found["passes"], found
        assert 0 < found["rounding"] < 1e-3 and found["difference"] < 1e-3, found


def _refused() -> dict[str, Any]:
    """An error of one model leaves the next one alone."""
    kinds, said = dict.fromkeys(FEATURES, "row_wise"), {}
    fp16 = _config(**CASES["fp16"])
    for name, config, options in (
        ("int8", _config(forward_precision="INT8", backward_precision="INT8"), {}),
        ("fine", fp16, {}),
        ("both", fp16, {"wire": "bf16", "compress": "which=all", "passes": "all,compress_exchange"}),
    ):
        try:
            said[name] = f"loss {_train(False, config, kinds, True, **options)[1][0]}"
        except Exception as error:  # noqa: BLE001
            said[name] = str(error)
        gc.collect()
    return said


@pytest.mark.thorough
def test_what_is_refused():
    for said in run_ranks(_refused, 2):
        assert "tables 'item', 'user' use quantized communication in int8; fp16 and bf16 are supported" in said["int8"]
        assert "are sent as fp16 already, by the collection's QCommsConfig: use one of the two" in said["both"]
        assert said["fine"].startswith("loss ")


def _bytes() -> list[int]:
    import freescale

    received = []
    for config in (None, _config(**CASES["fp16"])):
        freescale.meter.clear()
        _train(False, config, dict.fromkeys(FEATURES, "row_wise"), True, ahead=True)
        received.append(sum(sum(step["bytes"].values()) for step in freescale.meter.steps()))
    return received


@pytest.mark.thorough
def test_half_the_bytes():
    for exact, rounded in run_ranks(_bytes, 2):
        assert 0 < rounded <= exact / 2  # a rank's own rows are not sent
