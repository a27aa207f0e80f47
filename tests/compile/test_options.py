"""Options of torch.compile reach whatever needs them, each model's its own: loader, meetings, link, agreement, tables."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import loops
import trec
from ranks import HAS_TORCHREC, run_ranks


def _compiled(model, **options):
    return torch.compile(model, backend="freescale", options={"codegen": "eager", **options})


def _one_model_after_the_other():
    """(strict of the loader, Gbit/s of the link, seconds that every agreement may take) of two."""
    import freescale
    from freescale.kernels.transports import link_speed
    from freescale.runtime import agreement

    found = []
    for options in ({"strict": True, "link_gbps": 8, "timeout": 77}, {"strict": False, "link_gbps": 16, "timeout": 88}):
        model = _compiled(loops.Model(), **options)
        loader = freescale.LookaheadLoader(loops.data(2), model)
        with mock.patch.object(agreement, "agree", wraps=agreement.agree) as agree:
            for batch in loader:
                model(batch).backward()
        timeouts = [call.args[1] for call in agree.call_args_list]
        assert len(timeouts) == 3  # settings, what the forward graph launches, what the backward graph launches
        found.append((loader.strict, link_speed.estimate(loader.exchanges[0].background_group_name) * 8 / 1e9, set(timeouts)))
    return found


@pytest.mark.thorough
def test_each_model_has_its_own():
    for found in run_ranks(_one_model_after_the_other, 2):
        assert found == [(True, 8.0, {77.0}), (False, 16.0, {88.0})]


def _wrong_option():
    import freescale

    model = _compiled(loops.Model(), **({"stict": True} if dist.get_rank() == 1 else {}))
    for batch in freescale.LookaheadLoader(loops.data(2), model):
        model(batch)


def test_a_wrong_option_is_an_error_on_every_rank():
    first, second = run_ranks(_wrong_option, 2, expect_errors=True)
    assert "rank 1 failed before the first step" in first and "stict" in first
    assert "stict is not an option of freescale" in second


def _one_is_strict() -> tuple[str, str]:
    from freescale.runtime.tables import torchrec_support

    lax = trec.build("row_wise", "ema")
    trec.train(lax, _compiled(lax), 1, none=False)
    served = trec.build("row_wise", "sgd")
    trec.train(served, _compiled(served, strict=True), 1, none=False)  # what the other was refused is not its business
    module = next(m for m in lax.modules() if type(m).__name__ == "ShardedEmbeddingCollection")
    torchrec_support.report_unsupported(module, "outside of any compilation")
    strict = trec.build("row_wise", "ema")
    try:
        trec.train(strict, _compiled(strict, strict=True), 1, none=False)
    except Exception as error:
        return str(error)
    return "no error"


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TORCHREC, reason="needs TorchRec and FBGEMM")
def test_a_refusal_is_an_error_for_the_model_that_is_strict():
    for error in run_ranks(_one_is_strict, 2):
        assert "TorchRec's own path" in error and "optimizer is ema" in error
