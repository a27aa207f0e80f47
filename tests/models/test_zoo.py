"""What people do with a model, with models of other people's shapes: the same numbers as eager TorchRec throughout.

Train, evaluate, train, save, start again from the checkpoint, last batches of one sample and of none.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trec
import zoo
from ranks import HAS_TORCHREC, run_ranks
from repo import ROOT

pytestmark = [
    pytest.mark.thorough,  # (one of the models is trained by the snippets of test_docs.py)
    pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed"),
]

FULL = 4
# (what happens, samples per rank). Rank 1 has none in one step, which eager TorchRec can only take as empty samples.
LIFE = (
    ("train", (FULL, FULL)),
    ("train", (FULL, FULL)),
    ("evaluate", (FULL, FULL)),
    ("train", (1, 1)),
    ("evaluate", (1, 1)),
    ("save and start again", ()),
    ("train", (FULL, FULL)),
    ("train", (FULL, 0)),
    ("train", (1, 1)),
    ("evaluate", (FULL, 0)),
    ("train", (FULL, FULL)),
)
# The same in short: what costs is compiling.
SHORT = (
    ("train", (FULL, FULL)),
    ("evaluate", (FULL, FULL)),
    ("train", (FULL, 0)),
    ("train", (1, 1)),
    ("save and start again", ()),
)
SHORTEST = tuple(event for event in SHORT if 0 not in event[1])
EQUAL_COUNTS = {"BERT4Rec"}  # nn.MultiheadAttention wants at least one sample


class Owner:
    """A sharded model, what the loop calls, and the optimizer of its dense part."""

    def __init__(self, name: str, options: dict[str, Any] | None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = trec.shard(zoo.MODELS[name](), zoo.LAYOUT, "rowwise_adagrad", ddp=True)
        self.call, self.options = self.model, options
        if options is not None:
            torch._dynamo.reset()
            self.call = torch.compile(self.model, backend="freescale", options=options)
        dense = [p for p in self.model.parameters() if not hasattr(p, "_in_backward_optimizers")]
        # (Adam would blow up rounding where a gradient is zero, as that of the bias of keys)
        self.dense = torch.optim.SGD(dense, lr=0.05, momentum=0.9)

    def save(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "tables": self.model.fused_optimizer.state_dict(),
            "dense": self.dense.state_dict(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.model.fused_optimizer.load_state_dict(saved["tables"])
        self.dense.load_state_dict(saved["dense"])

    def train(self, batch: Any) -> float:
        self.model.train()
        self.dense.zero_grad()
        loss = self.call(batch)
        loss.backward()
        self.dense.step()
        return float(loss.detach())

    def evaluate(self, batch: Any) -> float:
        self.model.eval()
        with torch.no_grad():
            return float(self.call(batch))


def _batches(name: str, life: Any, eager: bool) -> list[Any]:
    rank, found = dist.get_rank(), []
    for step, (_, samples) in enumerate(life):
        if samples:
            padded = max(samples) if eager or name in EQUAL_COUNTS else 0
            found.append(zoo.batch(step, rank, samples[rank], padded))
    return found


def _live(name: str, life: Any, options: dict[str, Any] | None, ahead: bool) -> tuple[list[float], Any]:
    """The losses, and the state at the end."""
    import freescale

    owner, numbers = Owner(name, options), []
    batches = _batches(name, life, options is None)

    def part(events: Any, batches: list[Any]) -> None:
        """One loop: its batches are trained on or evaluated as they come."""
        loader = freescale.LookaheadLoader(batches, owner.call) if ahead else batches
        for (what, _), b in zip(events, loader, strict=True):
            torch.manual_seed(len(numbers))  # of dropout
            numbers.append(owner.train(b) if what == "train" else owner.evaluate(b))

    at = [what for what, _ in life].index("save and start again")
    part(life[:at], batches[:at])
    saved = owner.save()
    owner = Owner(name, options, seed=1)
    owner.load(saved)
    part(life[at + 1 :], batches[at:])
    return numbers, trec.snapshot(owner.model)


# Relative to the largest number of a tensor. In bfloat16, where a sum is rounded depends on what is computed at once.
TOLERANCE = {"Autocast": 2e-3}


def prepare() -> None:
    """In a rank, before its first model."""
    sys.path.insert(0, str(ROOT / "examples"))
    import torch._inductor.config

    torch._inductor.config.fallback_random = True  # dropout as eager torch draws it


def _lives(names: list[str], life: Any, codegen: str, ahead: bool) -> dict[str, float]:
    """Largest difference to eager TorchRec of each model."""
    prepare()
    found = {}
    for name in names:
        eager = _live(name, life, None, False)
        assert len(set(eager[0])) > 1 and all(x == x for x in eager[0]), (name, eager[0])
        found[name] = difference(_live(name, life, {"codegen": codegen}, ahead), eager)
    return found


def difference(life: tuple[list[float], Any], reference: tuple[list[float], Any]) -> float:
    """Largest difference of a loss or of a tensor of the state, each relative to the largest number of its kind."""
    (numbers, state), (expected, end) = life, reference
    worst = max(abs(a - b) for a, b in zip(numbers, expected, strict=True)) / max(map(abs, expected))
    for key in (key for key in end if end[key].numel()):
        worst = max(worst, float((state[key] - end[key]).abs().max() / end[key].abs().max()))
    return worst


def _check(names: list[str], life: Any, codegen: str, ahead: bool) -> None:
    for found in run_ranks(_lives, 2, names, life, codegen, ahead, timeout=850):
        assert not {n: worst for n, worst in found.items() if not worst <= TOLERANCE.get(n, 2e-6)}, found


ALL = sorted(zoo.MODELS)
# A LookaheadLoader plans one lookup of a table in a step; test_lookup_twice.py has what it says of two.
PLANNED = [name for name in ALL if name != "LooksUpTwice"]
slow = pytest.mark.slow


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names, life", (
    (["SASRec", "DLRM", "LooksUpTwice"], SHORT), pytest.param(ALL, LIFE, marks=slow),
), ids=("some", "all"))  # fmt: skip
def test_without_look_ahead(names, life):
    _check(names, life, "eager", False)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names, life", (
    (["HSTU", "ManyTasks"], SHORT), pytest.param(PLANNED, LIFE, marks=slow),
), ids=("some", "all"))  # fmt: skip
def test_with_look_ahead(names, life):
    _check(names, life, "eager", True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", (
    ["ManyTasks"],
    *(pytest.param(some, marks=slow) for some in (PLANNED[:3], PLANNED[3:6], PLANNED[6:])),
))  # fmt: skip
def test_generated_code(names):
    _check(names, SHORTEST, "inductor", True)


@slow  # it doubles what is compiled
@pytest.mark.timeout(900)
def test_generated_code_where_a_rank_has_no_samples():
    _check(["ManyTasks", "SASRec"], SHORT, "inductor", True)
