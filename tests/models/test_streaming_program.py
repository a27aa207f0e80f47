"""A program with the traits of large public recommenders (streaming.py): the same numbers as eager TorchRec, whether
freescale compiles the whole model or the collection alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import on_gpu
import streaming
from ranks import HAS_TORCHREC, run_ranks

pytestmark = pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")

EAGER = {"codegen": "eager", "strict": True}
INDUCTOR = {"strict": True}


def _run(how: str, ahead: dict[str, Any] | None = None, options: dict[str, Any] = EAGER, **more: Any) -> Any:
    torch._dynamo.reset()
    return streaming.run(how=how, ahead=ahead, options=options, **more)


def _difference(a: Any, b: Any) -> float:
    assert a[1].keys() == b[1].keys()
    figures = max(abs(x - y) for x, y in zip(a[0], b[0], strict=True))
    return max(figures, *(float((a[1][n] - t).abs().max()) for n, t in b[1].items() if t.numel()))


def _same(a: Any, b: Any) -> bool:
    return a[0] == b[0] and all(torch.equal(a[1][n], t) for n, t in b[1].items())


def _compare(how: str, options: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Without a LookaheadLoader the whole model has a graph break: the size of the labels is that of an unknown number of
    candidates. So its graphs differ, and with them its bits."""
    import freescale

    run = partial(_run, device=device)
    expected = run("eager")
    ahead = run(how, {}, options)
    breaks = freescale.report()["graph_breaks"]
    plain = run(how, None, options) if how == "collection" else run(how, {"overlap": False}, options)
    return {
        "ahead": _difference(ahead, expected),
        "plain": _difference(run(how, None, options), expected),
        "trained": expected[0][0] != expected[0][2],
        "same bits": _same(ahead, plain),
        "resumed": _difference(run(how, {}, options, stop=(1, 1)), run("eager", stop=(1, 1))),
        "graph_breaks": breaks,
    }


def check(found: dict[str, Any]) -> None:
    assert max(found["ahead"], found["plain"], found["resumed"]) <= 1e-6 and found["trained"], found
    assert found["same bits"] and found["graph_breaks"] == 0, found


@pytest.mark.parametrize("how", (
    pytest.param("whole", marks=pytest.mark.slow), pytest.param("collection", marks=pytest.mark.thorough),
))  # fmt: skip
def test_equals_eager_torchrec(how):
    for found in run_ranks(_compare, 2, how, EAGER):
        check(found)


@pytest.mark.parametrize("how", [pytest.param(how, marks=on_gpu.MARKS) for how in ("whole", "collection")])
def test_equals_eager_torchrec_on_a_gpu(how):
    for found in run_ranks(_compare, 2, how, EAGER, on_gpu.DEVICE, timeout=240, group_timeout=60, **on_gpu.RANKS):
        check(found)


@pytest.mark.slow
@pytest.mark.parametrize("how", ("whole", "collection"))
def test_with_generated_code(how):
    for found in run_ranks(_compare, 2, how, INDUCTOR, timeout=600):
        check(found)


def _quantized(how: str) -> dict[str, float]:
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig

    fp16 = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
    expected, exact = _run("eager", quantized=fp16), _run("eager")
    return {"difference": _difference(_run(how, {}, quantized=fp16), expected), "rounding": _difference(expected, exact)}


@pytest.mark.slow
@pytest.mark.parametrize("how", ("whole", "collection"))
def test_with_quantized_communication(how):
    for found in run_ranks(_quantized, 2, how):
        assert 0 < found["rounding"] and found["difference"] < max(found["rounding"], 1e-3), found
