"""A deep copy of a model has rows of its own, with what is pending in the loop that the model is in."""

from __future__ import annotations

import copy
import io

import torch
import torch.distributed as dist

from loops import Training, batch_of, data
from ranks import run_ranks


def _copied() -> bool:
    t, plain = Training(True), Training(False)
    for i, batch in enumerate(t.loader(data(8))):
        if i == 4 or (i == 6 and dist.get_rank() == 0):  # one rank alone, too
            copied, now = copy.deepcopy(t.model), t.model.state_dict()
            assert all(torch.equal(v, now[k]) for k, v in copied.state_dict().items())
        t.step(batch)
    for batch in data(8):
        plain.step(batch)
    assert t.losses == plain.losses and torch.equal(t.model.table.weight, plain.model.table.weight)

    before, rows = t.model.table.weight.clone(), torch.tensor([1, 20])
    t.model(batch_of(3)).backward()  # of the original: its own rows alone
    copied = copy.deepcopy(t.model)
    now = copied.table.weight.clone()
    assert torch.equal(now, t.model.table.weight) and not torch.equal(now, before)
    copied(batch_of(4)).backward()
    assert torch.equal(now, t.model.table.weight) and not torch.equal(now, copied.table.weight)
    file = io.BytesIO()
    torch.save(t.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        loaded.table.weight.zero_()
        assert not loaded.table(rows).any() and t.model.table(rows).all()
    return True


def test_copies_have_rows_of_their_own():
    assert run_ranks(_copied, 2) == [True, True]
