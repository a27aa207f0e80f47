"""A second start of the same script: every graph comes out of torch's cache, whatever the link, and says what it holds."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trec
from freescale import config
from ranks import HAS_TORCHREC, run_ranks


class Small(nn.Module):
    """A row-wise table and a data-parallel one, whose ids are checked in a collective of their own."""

    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingCollection

        tables = [t for t in trec.tables(8) if t.name in ("user", "tiny")]
        self.ec = EmbeddingCollection(tables=tables, device=torch.device("cpu"))
        self.out = nn.Linear(8, 1)

    def forward(self, features, weight: torch.Tensor) -> torch.Tensor:
        found = self.ec(features)
        return sum(torch.tanh(self.out(found[name].values())).sum() for name in ("user", "tiny")) + weight.sum()


def _start(gbps: float) -> dict:
    """Training on a link of that speed; what the caches, the report, the log and the artifacts say afterwards."""
    from torch._dynamo.utils import counters

    import freescale
    from freescale import driver, graph_report
    from freescale.compat import logs
    from freescale.kernels.transports import link_speed

    torch.manual_seed(0)
    model = trec.shard(Small(), {"user": "row_wise", "tiny": "data_parallel"}, "sgd")
    compiled = torch.compile(model, backend="freescale", fullgraph=True)
    artifacts: dict[str, str] = {}
    # ranks with batches of different size: no rank's code may start its collectives in another order
    data = [trec.batch(3 * s + 7 * dist.get_rank(), dist.get_rank(), none=False) for s in range(3)]
    with (
        mock.patch.object(link_speed, "_probe", lambda group, device: gbps * 1e9 / 8),
        mock.patch.object(logs, "trace_artifact", lambda name, text: artifacts.update({name: text()})),
        mock.patch.object(graph_report, "say") as say,
    ):
        losses = []
        for batch in freescale.LookaheadLoader(data, compiled):
            loss = compiled(*batch)
            loss.backward()
            losses.append(float(loss.detach()))
    report = freescale.report()
    return {
        "speed": max(link_speed.bytes_per_second.values()),
        "losses": losses,
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
        "passed": driver.REPORT.graphs,
        "from cache": report["graphs_from_cache"],
        "exchanges": report["exchanges"],
        "artifacts": artifacts,
        "said": [line.split(" in ")[0] for (line, *_), _ in say.call_args_list if not line.startswith("still ")],
    }


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TORCHREC, reason="needs TorchRec and FBGEMM")
def test_a_second_start(tmp_path):
    none, one = {"forward": 0, "backward": 0}, {"forward": 1, "backward": 1}
    env_of = {rank: {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / str(rank))} for rank in range(2)}
    first = run_ranks(_start, 2, 10.0, env_of=env_of)
    for rank in first:
        assert (rank["hits"], rank["misses"], rank["passed"], rank["from cache"]) == (0, 2, one, none)
        assert rank["exchanges"] == {"forward": 3, "backward": 1}  # urgent, late and early; urgent
        assert rank["said"] == [
            "compiling the forward graph (3 exchanges); this can take a minute",
            "compiled the forward graph",
            "compiling the backward graph (1 exchange); this can take a minute",
            "compiled the backward graph",
        ]
    for record in (tmp_path / "1" / "freescale").iterdir():
        record.unlink()  # as if the code had come from a remote cache
    # a link that is the same but for noise, and one that is another
    for gbps in (11.0, 1000.0):
        second = run_ranks(_start, 2, gbps, env_of=env_of)
        for rank, before in zip(second, first, strict=True):
            assert rank["speed"] == (before["speed"] if gbps == 11.0 else 2**37)
            assert (rank["hits"], rank["misses"], rank["passed"], rank["from cache"]) == (2, 0, none, one)
            assert rank["losses"] == before["losses"]
            said = [f"loaded the {way} graph from torch's cache" for way in ("forward", "backward")]
            assert rank["said"][1::2] == said
    known, unknown = second
    assert known["exchanges"] == first[0]["exchanges"] and known["artifacts"] == first[0]["artifacts"]
    assert len(known["artifacts"]) == 2 * (1 + len(config.PASS_NAMES))
    assert "all_to_all_rows_launch" in known["artifacts"]["freescale_forward_lower_copies"]
    assert unknown["exchanges"] == none and unknown["artifacts"] == {}
