"""Checkpoints of compiled models: those of the eager model, saved and loaded by any of them."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trec
from loops import Model, batch_of
from ranks import HAS_TORCHREC, run_ranks

OPTIONS = {"codegen": "eager", "strict": True}
needs_torchrec = pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")


def _eager(model: nn.Module) -> Any:
    return model


def _wrapped(model: nn.Module) -> Any:
    return torch.compile(model, backend="freescale", options=OPTIONS)


def _in_place(model: nn.Module) -> Any:
    model.compile(backend="freescale", options=OPTIONS)
    return model


WAYS = (_eager, _wrapped, _in_place)


def _build(seed: int, ddp: bool) -> Any:
    torch.manual_seed(seed)
    return trec.shard(trec.Model(small=True), trec.LAYOUTS["mixed"], "rowwise_adagrad", ddp)


def _values(model: Any) -> dict[str, torch.Tensor]:
    return {**trec.snapshot(model), **trec.optimizer_state(model)}


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def _through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _round_trips(folder: str) -> list[str]:
    """Every way to compile saves what every other loads: by torch.save, and by torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp

    wrong = []
    for ddp in (False, True):
        targets = [(way, _build(1, ddp)) for way in WAYS]
        for save in WAYS:
            inner = _build(0, ddp)
            source = save(inner)
            if save is not _eager and not ddp:
                import freescale

                batches = [trec.batch(s, dist.get_rank(), none=False) for s in range(4)]
                for i, batch in enumerate(freescale.LookaheadLoader(batches, source)):
                    source(*batch).backward()
                    if i == 2:
                        state = {"model": source.state_dict(), "fused": source.fused_optimizer.state_dict()}
                        break
            else:
                state = {"model": source.state_dict(), "fused": source.fused_optimizer.state_dict()}
            expected = _values(inner)
            if list(state["model"]) != list(inner.state_dict()):
                wrong.append(f"keys of {save.__name__}: {list(state['model'])}")
            kept = _through_a_file(state)
            dcp.save({"model": state["model"]}, checkpoint_id=f"{folder}/{save.__name__}{ddp}")
            for load, target in targets:
                name = f"{save.__name__} -> {load.__name__}, ddp {ddp}"
                compiled = load(target)
                clean = _build(2, ddp)
                target.load_state_dict(clean.state_dict())
                compiled.load_state_dict(dict(kept["model"]))
                compiled.fused_optimizer.load_state_dict(kept["fused"])
                if not _equal(_values(target), expected):
                    wrong.append(name)
                target.load_state_dict(clean.state_dict())
                read = {"model": compiled.state_dict()}
                dcp.load(read, checkpoint_id=f"{folder}/{save.__name__}{ddp}")
                compiled.load_state_dict(read["model"])
                if not _equal(_values(target), expected):
                    wrong.append(f"{name}, DCP")
    return wrong


@pytest.mark.thorough
@needs_torchrec
def test_every_way_saves_what_every_way_loads(tmp_path):
    assert run_ranks(_round_trips, 2, str(tmp_path)) == [[], []]


def _native() -> bool:
    """Around a module without a state_dict of its own, torch's keys stay (DCP relies on them); both kinds are loaded."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model = Model()
    run = _wrapped(model)
    eager = {k: v.clone() for k, v in model.state_dict().items()}
    prefixed = {k: v.clone() for k, v in run.state_dict().items()}
    assert list(prefixed) == [f"_orig_mod.{k}" for k in eager]
    run(batch_of(0)).backward()
    assert not torch.equal(model.table.weight, eager["table.weight"])
    for state in (eager, prefixed):
        with torch.no_grad():
            model.table.weight.zero_()
        assert str(run.load_state_dict(state)) == "<All keys matched successfully>"
        assert torch.equal(model.table.weight, eager["table.weight"])
    with pytest.raises(RuntimeError, match='Missing key.*"_orig_mod.out.bias"'):
        run.load_state_dict({k: v for k, v in eager.items() if k != "out.bias"})
    outer = nn.Sequential(run)  # as a part of another model
    outer.load_state_dict({f"0.{k}": v for k, v in eager.items()})
    outer.load_state_dict(outer.state_dict())
    found = get_model_state_dict(run)
    assert found.keys() == eager.keys()
    set_model_state_dict(run, {k: v.clone() for k, v in found.items()})
    # a model that another backend compiled is none of ours
    other = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(other._orig_mod.state_dict())
    return True


def test_native_tables():
    assert run_ranks(_native, 2) == [True, True]


def _of_rank_0(sharding: str) -> str:
    """Every rank loads what rank 0 saved, as from a trainer that saves on one rank. What it says, if anything."""
    import freescale

    model = nn.Sequential(freescale.ShardedEmbeddingCollection({"item": 32, "user": 32}, 4, sharding=sharding))
    own, file = model.state_dict(), io.BytesIO()
    torch.save(own, file)
    files = [file.getvalue()]
    dist.broadcast_object_list(files)
    of_rank_0 = torch.load(io.BytesIO(files[0]), weights_only=True)
    assert all(v.shape == own[k].shape for k, v in of_rank_0.items())  # torch has nothing to say
    model.load_state_dict(own)
    copy.deepcopy(model).load_state_dict(own)
    model.load_state_dict(dict(of_rank_0))
    try:
        model.load_state_dict(of_rank_0)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "sharding, words",
    (
        ("row_wise", "rank holds rows 16 to 31 of table 'item', the checkpoint holds rows 0 to 15"),
        ("table_wise", "rank holds rows 0 to 31 of table 'user', the checkpoint holds no rows"),
    ),
)
def test_rows_of_another_rank_are_refused(sharding, words):
    first, second = run_ranks(_of_rank_0, 2, sharding)
    assert first == "" and words in second
