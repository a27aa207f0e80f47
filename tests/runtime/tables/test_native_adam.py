"""Adam on native tables: FBGEMM's formulas, written down once more for a whole table in one process."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks

ROWS, DIM, STEPS, LR, EPS, BETAS = 30, 4, 8, 0.05, 1e-6, (0.8, 0.95)


def _batch(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    n = 0 if (step + rank) % 5 == 4 else int(torch.randint(3, 14, (), generator=generator))
    return {"item": torch.randint(0, ROWS, (n,), generator=generator)}


class Model(torch.nn.Module):
    def __init__(self, optimizer, weight_decay, dtype=torch.float64):
        super().__init__()
        import freescale

        self.item = freescale.ShardedEmbedding(
            ROWS, DIM, name="item", optimizer=optimizer, lr=LR, eps=EPS, betas=BETAS, weight_decay=weight_decay, dtype=dtype
        )
        self.register_buffer("scale", torch.linspace(0.5, 2.0, DIM, dtype=dtype))

    def forward(self, batch):
        return (self.item(batch["item"]) * self.scale).square().sum()


def _plain(optimizer, weight_decay, world):
    """The same training with the whole table in one process: each row with its own averages, one count of steps."""
    from plain_table import whole_table

    torch.manual_seed(5)
    table = whole_table(ROWS, DIM, torch.float64)
    scale = torch.linspace(0.5, 2.0, DIM, dtype=torch.float64)
    m, v = torch.zeros_like(table), torch.zeros_like(table)
    for step in range(1, STEPS + 1):
        grad, seen = torch.zeros_like(table), torch.zeros(ROWS, dtype=torch.bool)
        for rank in range(world):
            ids = _batch(step - 1, rank)["item"]
            grad.index_add_(0, ids, 2 * table[ids] * scale.square() / world)
            seen[ids] = True
        lr = LR / step  # a schedule
        square = grad.square()
        if optimizer == "partial_rowwise_adam":
            square = square.mean(1, keepdim=True).expand_as(grad)
        new_m = BETAS[0] * m + (1 - BETAS[0]) * grad
        new_v = BETAS[1] * v + (1 - BETAS[1]) * square
        direction = new_m / (1 - BETAS[0] ** step) / ((new_v / (1 - BETAS[1] ** step)).sqrt() + EPS)
        new = table - lr * (direction + weight_decay * table)
        m, v, table = (torch.where(seen[:, None], a, b) for a, b in ((new_m, m), (new_v, v), (new, table)))
    return table


@lru_cache(maxsize=2)
def _compiled(optimizer, weight_decay, seed):
    """Of this rank: a model that is compiled once for all its trainings, and its beginning."""
    torch.manual_seed(seed)
    model = Model(optimizer, weight_decay)
    model.compile(backend="freescale", options={"codegen": "eager"})
    return model, {name: t.clone() for name, t in model.state_dict().items()}


def _train(optimizer, weight_decay, look_ahead, interrupted=False):
    import freescale

    model, state = _compiled(optimizer, weight_decay, 5)
    model.load_state_dict(state)
    step, rank = 0, dist.get_rank()
    for part in ((0, 3), (3, STEPS)) if interrupted else ((0, STEPS),):
        if step > 0:
            state = {name: t.clone() for name, t in model.state_dict().items()}
            model, _ = _compiled(optimizer, weight_decay, 99)
            model.load_state_dict(state)
        data = [_batch(s, rank) for s in range(*part)]
        for batch in freescale.LookaheadLoader(data, model) if look_ahead else data:
            step += 1
            model.item.lr = LR / step
            model(batch).backward()
    return {name: t.clone() for name, t in model.state_dict().items()}


WAYS = ((True, False), (False, False), (True, True), (False, True))  # look-ahead, interrupted


def _check(cases, ways=WAYS):
    world, rank = dist.get_world_size(), dist.get_rank()
    for optimizer, weight_decay in cases:
        table = _plain(optimizer, weight_decay, world)
        mine = table[rank * (ROWS // world) : (rank + 1) * (ROWS // world)]
        trained = [
            _train(optimizer, weight_decay, look_ahead, interrupted)
            for look_ahead, interrupted in ways
        ]
        assert float((trained[0]["item.weight"] - mine).abs().max()) <= 1e-12, (optimizer, weight_decay)
        assert int(trained[0]["item.steps"]) == STEPS
        for other in trained[1:]:
            assert other.keys() == trained[0].keys()
            for name, t in other.items():
                assert torch.equal(t, trained[0][name]), (optimizer, weight_decay, name)
    return True


def test_as_one_plain_process_with_look_ahead():
    assert run_ranks(_check, 2, [("adam", 0.1)], WAYS[:1]) == [True, True]


@pytest.mark.thorough
def test_as_one_plain_process_with_look_ahead_without_and_after_a_restart():
    assert run_ranks(_check, 2, [("adam", 0.0), ("adam", 0.1), ("partial_rowwise_adam", 0.0)]) == [True, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu():
    """The count of steps stays on the CPU: no update waits for the device."""
    (steps, same) = run_ranks(_on_a_gpu, 1)[0]
    assert steps == "cpu" and same


def _on_a_gpu():
    states = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(5)
        model = Model("adam", 0.1).to(device)
        for step in range(STEPS):
            model({"item": _batch(step, 0)["item"].to(device)}).backward()
        states.append(model.item)
    on_cpu, on_gpu = states
    return on_gpu.steps.device.type, torch.allclose(on_cpu.weight, on_gpu.weight.cpu(), rtol=0, atol=1e-12)
