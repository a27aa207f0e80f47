"""Evaluation under torch.inference_mode(), in the middle of training: as under torch.no_grad()."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist

import loops
import trec
from loops import batch_of, compare, data, threads
from ranks import HAS_TORCHREC, run_ranks


class Training(loops.Training):
    mode: Any = torch.inference_mode

    def look(self, batch: Any) -> None:
        with type(self).mode():
            self.losses.append(self.run(batch).item())


class WithoutGradients(Training):
    mode = torch.no_grad


def between_steps(t: Training) -> None:
    t.look(batch_of(60))
    for i, batch in enumerate(t.loader(data(9))):
        if i in (2, 3):
            t.look(batch_of(70 + i))
        t.step(batch)
        if i in (3, 6):
            t.look(batch_of(80 + i))
            t.look(batch)
        if i == 7:
            with type(t).mode():
                t.losses.append(t.model(batch_of(90)).item())  # not through torch.compile
    t.look(batch_of(61))
    t.step(batch_of(62))


def other_loops(t: Training) -> None:
    evaluated = t.loader(data(4, 40))
    for i, batch in enumerate(t.loader(data(7))):
        if i in (0, 3):
            with type(t).mode():
                for other in evaluated:
                    t.losses.append(t.run(other).item())
        t.step(batch)
        if i == 5:
            for other in evaluated:
                t.look(other)
                break
    for i, batch in enumerate(t.loader(data(6))):
        t.step(batch) if i % 2 else t.look(batch)


def tables_are_read(t: Training) -> None:
    for i, batch in enumerate(t.loader(data(7))):
        t.step(batch)
        if i in (2, 4):
            with type(t).mode():
                t.losses += [v.sum().item() for v in t.model.state_dict().values()]
        if i == 5:
            with type(t).mode():
                break


def _cases() -> dict[str, str]:
    import freescale.backend as backend

    said = {}
    for loop in (between_steps, other_loops, tables_are_read):
        try:
            assert compare(loop, Training).losses == compare(loop, WithoutGradients).losses
            said[loop.__name__] = "good"
        except BaseException:  # noqa: BLE001
            said[loop.__name__] = traceback.format_exc()
            break  # the ranks may be at different places
    # The plain model trains, evaluates in either mode; the other one does so with and without a plan; and each again for
    # a rank without ids.
    said["graphs"] = "good" if max(backend.COMPILED.values()) <= 18 else str(backend.COMPILED)
    return said


def _one_loop() -> None:
    compare(between_steps, Training)


def test_between_steps():
    run_ranks(_one_loop, 2)


@pytest.mark.thorough
def test_loops():
    for rank, said in enumerate(run_ranks(_cases, 2)):
        wrong = {name: words for name, words in said.items() if words != "good"}
        assert not wrong, f"rank {rank}:\n" + "\n".join(f"{name}: {words}" for name, words in wrong.items())


def _torchrec() -> bool:
    """The first thing that a model does is evaluation; then both, in turns."""
    import freescale

    def loop(wrapped: bool, mode: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch._dynamo.reset()
        model = trec.build("mixed", "rowwise_adagrad", small=True)
        run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "eager"})
        batches: Any = [trec.batch(step, dist.get_rank(), none=False) for step in range(7)]
        seen = []

        def look(number: int) -> None:
            with mode():
                seen.append(run(*trec.batch(number, dist.get_rank(), none=False)).item())

        look(50)
        for i, batch in enumerate(freescale.LookaheadLoader(batches, run) if wrapped else batches):
            if i in (1, 4):  # in place of a step
                with mode():
                    seen.append(run(*batch).item())
                continue
            run(*batch).backward()
            if i == 2:
                look(51)
            if i == 5:
                with mode():
                    seen.extend(v.sum().item() for v in trec.optimizer_state(model).values())
        look(52)
        return seen, {**trec.snapshot(model), **trec.optimizer_state(model)}

    expected = loop(False, torch.no_grad)
    for wrapped in (False, True):
        seen, end = loop(wrapped, torch.inference_mode)
        assert seen == expected[0], (wrapped, seen, expected[0])
        assert all(torch.equal(v, end[k]) for k, v in expected[1].items())
        assert threads() == []
    return True


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TORCHREC, reason="no TorchRec")
def test_torchrec():
    assert run_ranks(_torchrec, 2) == [True, True]
