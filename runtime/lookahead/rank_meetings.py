"""Whether all ranks are at the same place when a step begins, or when what is pending is applied.

`Tables` sees every use of a model through hooks that live as long as a loop does; it lets the innermost loop (a `Run`,
loop_state.py) go on, applies what is pending first, or refuses.

Before a step, before pending gradients are applied and at the end of a loop the ranks meet: each says what it is about
to do, in one small gather over a CPU group of its own. So nobody starts an exchange that others will not join, and a
rank that leaves its loop, or brings a wrong batch, is an error on every rank instead of a hang.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from freescale.compat import compiled_modules, distributed
from freescale.kernels.transports import choose, launch_record, link_speed
from freescale.runtime.lookahead.loop_state import UNKNOWN, Run
from freescale.runtime.tables import torchrec_collection, torchrec_patch, torchrec_support
from freescale.runtime.tables.sharded_embedding import ShardedEmbedding
from freescale.runtime.tables.table_exchange import Exchange

log = logging.getLogger(__name__)

# What a rank is about to do.
STEP, EVALUATE, FLUSH, CLOSE = range(4)
_DOES = ("trains", "evaluates", "reads the tables", "leaves its loop")


class Said(NamedTuple):
    """What a rank says when the ranks meet."""

    kind: int
    loop: int  # how manieth of the model
    number: int  # of the batch that was handed out last, -1 before the first
    used: int  # has it been through the model?
    pending: int  # the step whose gradients are pending, -1 if none are
    torn: int  # the step whose backward pass has lost gradients, -1 if none has
    came: int  # what reached the model
    unplanned: int  # has planning failed on this rank, and its group with it?


class Tables:
    """The loops over a model's tables, the innermost last, and the hooks that see its uses."""

    def __init__(self, exchanges: list[Exchange], link_gbps: float) -> None:
        self.runs: list[Run] = []
        self.loops = 0
        # Groups of their own: nothing here comes between the collectives of the training. The first is for meetings;
        # the others are for the planning threads of loops inside each other. A rank may be as slow as in training.
        self.timeout = distributed.timeout_of(distributed.group_by_name(exchanges[0].group_name))
        self._meeting = self.cpu_group()
        self._planning: list[dist.ProcessGroup | None] = [self.cpu_group()]
        # Early rows and late gradients: a group of the same kind as the training's, so that urgent ones overtake them.
        self._background = dist.new_group(timeout=self.timeout)
        device = exchanges[0].anchor.device
        speed = link_speed.measure(self._background, device, link_gbps)
        log.info("the link carries %.3g Gbit/s per rank", speed * 8 / 1e9)
        self._hooks: dict[tuple[str, torch.nn.Module], list[Any]] = {}
        self._call: torch.nn.Module | None = None  # whose call is under way, of those that begin a step
        self._unsaid: RuntimeError | None = None  # what Python did not raise where it happened
        self._apart: str | None = None  # why the ranks cannot meet any more

    def __deepcopy__(self, memo: Any) -> Tables:
        return self  # a copy of the model in the middle of a loop brings its hooks along

    def cpu_group(self) -> dist.ProcessGroup:
        """A new one of all ranks, that waits for a slow one as long as the training does. Collective."""
        made = dist.new_group(backend="gloo", timeout=self.timeout)
        assert isinstance(made, dist.ProcessGroup)
        return made

    def carry_behind(self, exchange: Exchange) -> None:
        """What nobody waits for travels on the background group."""
        exchange.background = self._background.group_name
        exchange.look_first = self._before_lookup
        link_speed.speed[exchange.group_name] = link_speed.speed[self._background.group_name]

    # -- loops ---------------------------------------------------------------------------------------------------

    def enter(self, model: torch.nn.Module, parts: list[torch.nn.Module], exchanges: list[Exchange]) -> Run:
        """`parts`: the compiled modules in `model` that look up the tables."""
        self._say()
        if self._apart is not None:
            raise RuntimeError(f"freescale: {self._apart}")
        if self.runs:
            self.flush()
        self.loops += 1
        run = Run(exchanges, self.loops)
        self.runs.append(run)
        # A step is a call of what is compiled, wherever it comes from; of several, the call of the model around them.
        call = parts[0] if len(parts) == 1 else model
        if ("call", call) not in self._hooks:
            self._hooks["call", call] = self._hook_call(call)
        if ("tables", model) not in self._hooks:
            self._hooks["tables", model] = self._hook_tables(model, parts)
        self._mark(None)
        return run

    def planning_group(self) -> dist.ProcessGroup:
        """For the loop on top: a thread of its own needs a group of its own."""
        at = len(self.runs) - 1
        self._planning += [None] * (at + 1 - len(self._planning))
        group = self._planning[at]
        if group is None:
            group = self._planning[at] = self.cpu_group()
        return group

    def must_be_on_top(self, run: Run) -> None:
        if not self.runs or self.runs[-1] is not run:
            raise RuntimeError(
                "freescale: a model is used under two LookaheadLoaders at once: one asks for its next batch while the "
                "other is still running; finish or close the inner one first"
            )

    def close(self, run: Run, unsaid: bool) -> None:
        """End a loop, and those inside it. `unsaid`: Python will not raise what is raised here; the next use will."""
        while run in self.runs:
            top, failure = self.runs[-1], None
            try:
                self._finish(top)
            except RuntimeError as error:
                failure = error
            top.over()
            top.stop_planning(top.behind, top.broken is None or top.all_know)
            self.runs.pop()
            for x in top.exchanges:
                x.unseen = False
            self._mark(self._call)
            if failure is not None and (unsaid or top is not run):
                self._unsaid = failure
            if not self.runs and self._unsaid is None:
                self._unhook()
            if failure is not None and top is run:
                raise failure

    def _finish(self, run: Run) -> None:
        """All ranks agree on the end of the loop on top, and apply what is pending."""
        run.end()
        cause = None
        try:
            if run.broken is None and not run.closed:
                self._meet(CLOSE)
        except RuntimeError as error:
            cause = error
        if run.broken is None:
            run.drop_arriving()
        elif lost := run.lost():
            raise RuntimeError(lost) from cause
        elif self._apart is not None:
            log.warning("freescale: a loop has ended and no gradients are lost, but it was the last: %s", self._apart)

    def _say(self) -> None:
        if self._unsaid is not None:
            error, self._unsaid = self._unsaid, None
            if not self.runs:
                self._unhook()
            raise error

    # -- meetings ------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Apply what is pending before the tables are used outside the planned order."""
        if max(self.runs[-1].pending, self.runs[-1].torn) >= 0:
            self._meet(FLUSH)

    def _meet(self, kind: int, came: int = UNKNOWN) -> list[Said]:
        """What every rank is about to do. Returns where this rank may do it; raises where it may not."""
        run = self.runs[-1]
        while True:
            said = self._hear(run, kind, came)
            kinds = {s.kind for s in said}
            same = len({(s.loop, s.pending) for s in said}) == 1
            run.behind = max(s.number for s in said) - run.number
            if CLOSE in kinds:
                run.closed = True
                if not same:
                    run.broken, run.all_know = _differ(said), True
            if any(s.unplanned for s in said):
                self._planning[len(self.runs) - 1] = None  # all ranks know: the next loop makes a new one
            if torn := [rank for rank, s in enumerate(said) if s.torn >= 0]:
                run.broken, run.all_know = _torn_on(torn, said[torn[0]].torn), True
                raise RuntimeError(f"freescale: {run.broken}")
            if same and kinds & {FLUSH, CLOSE}:
                run.apply()
            if not same or (len(kinds) > 1 and FLUSH not in kinds):
                if kind == CLOSE and same:
                    log.warning("freescale: %s", _differ(said))
                    return said
                if same and any(s.unplanned for s in said):
                    raise RuntimeError(f"freescale: {run.why_planning_failed()}")
                raise RuntimeError(f"freescale: {_differ(said)}")
            if kind == FLUSH or FLUSH not in kinds:
                return said
            # Another rank wanted the flush alone (state_dict on one rank); it is done, now this rank's own.

    def _hear(self, run: Run, kind: int, came: int) -> list[Said]:
        used = run.current is not None and run.current.used
        mine = Said(kind, run.loop, run.number, used, run.pending, run.torn, came, run.planning_failed())
        if run.closed:
            raise RuntimeError("freescale: this LookaheadLoader's loop has ended: the ranks were not at the same place")
        if run.broken is None and not dist.is_initialized():
            run.broken = "the process group is gone"
        if run.broken is not None:
            raise RuntimeError(f"freescale: {run.broken}")
        try:
            with launch_record.blocked("meeting of the ranks"):
                return [Said(*s) for s in distributed.gather_ints(mine, self._meeting)]
        except Exception as error:
            limit = self.timeout.total_seconds()
            run.broken = f"the other ranks did not come to the same place within {limit:g} s, or are gone: {error}"
            self._apart = run.broken
            raise RuntimeError(f"freescale: {run.broken}") from error

    # -- hooks ---------------------------------------------------------------------------------------------------

    def _hook_call(self, call: torch.nn.Module) -> list[Any]:
        if compiled_modules.compiled_in_place(call):
            return [compiled_modules.AroundCompiledCall(call, self._before_forward, self._after_forward)]
        return [
            call.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            call.register_forward_hook(self._after_forward, always_call=True),
        ]

    def _hook_tables(self, model: torch.nn.Module, parts: list[torch.nn.Module]) -> list[Any]:
        handles: list[Any] = []
        found = list(dict.fromkeys(m for part in parts for m in table_modules(part)))
        inside = {m for table in found for m in table.modules()}
        for module in model.modules():
            # Whoever reads a dense part alone may be a single rank: only what holds rows needs the others.
            holds_rows = any(m in inside for m in module.modules())
            before = self._before_state_dict if holds_rows else choose.settle
            handles.append(module.register_state_dict_pre_hook(before))
        for module in found:
            handles.append(module.register_forward_pre_hook(self._before_lookup))
            handles.append(module.register_load_state_dict_pre_hook(self._before_load))
        handles.append(torchrec_patch.watch_optimizers(found, self._before_state_dict, self._before_load))
        return handles

    def _unhook(self) -> None:
        for handle in (h for handles in self._hooks.values() for h in handles):
            handle.remove()
        self._hooks.clear()

    def _before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Every call of the compiled model, outside the graph."""
        # Nothing can be done in the graph of a caller that is compiled itself; its lookups tell (`Exchange.unseen`).
        if torch.compiler.is_compiling() or self._call not in (None, module):
            return
        self._say()
        if not self.runs:
            return
        run = self.runs[-1]
        run.end()  # of a step that something worse than an Exception has left
        if torch.is_grad_enabled():
            if len(self.runs) > 1:
                raise RuntimeError(
                    "freescale: a training step under a second LookaheadLoader while the first has not ended: a model "
                    "is trained under one loader at a time (evaluation under torch.no_grad() is fine)"
                )
            came = run.what_came((args, kwargs))
            _all_brought_it(self._meet(STEP, came))
            run.begin()
        else:
            fresh = run.current is not None and not run.current.used
            if fresh and all(s.came == s.number for s in self._meet(EVALUATE, run.what_came((args, kwargs)))):
                run.begin()
            else:
                self.flush()
        self._mark(module)

    def _after_forward(self, module: torch.nn.Module, *args: Any) -> None:
        if torch.compiler.is_compiling() or self._call not in (None, module):
            return
        self._mark(None)
        if self.runs:
            self.runs[-1].end()

    def _mark(self, call: torch.nn.Module | None) -> None:
        """A call that begins a step is under way, or none is: then a lookup is one that no hook of ours has seen."""
        self._call = call
        for x in (x for run in self.runs for x in run.exchanges):
            x.unseen = call is None

    def _before_lookup(self, *args: Any) -> None:
        """A table is used without the compiled model."""
        if torch.compiler.is_compiling() or self._call is not None:
            return
        self._say()
        if self.runs:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "freescale: a table is used in training without its compiled model while a LookaheadLoader's loop "
                    "is on; call what torch.compile returned, or leave the loop first. (Activation checkpointing does "
                    "so if the lookup is inside: it looks up again in the backward pass. Leave the lookup outside. So "
                    "does a compiled function that calls the model: make it the forward of a torch.nn.Module `step`, "
                    'and write step.compile(backend="freescale") and LookaheadLoader(loader, step))'
                )
            self.flush()

    def _before_state_dict(self, *args: Any) -> None:
        self._say()
        if self.runs:
            self.flush()
        choose.settle()

    def _before_load(self, *args: Any) -> None:
        self._say()
        if self.runs:
            raise RuntimeError(
                "freescale: load_state_dict while a LookaheadLoader's loop is on: rows for the next batch were fetched "
                "already; leave the loop first"
            )


def _differ(said: list[Said]) -> str:
    differ = len({s.pending for s in said}) > 1

    def words(s: Said) -> str:
        at = "before its first batch" if s.number < 0 else f"{'after' if s.used else 'at'} batch {s.number}"
        left = "no gradients" if s.pending < 0 else f"gradients of step {s.pending}"
        return f"{_DOES[s.kind]} {at}" + (f", {left} pending" if differ else "")

    groups: dict[str, list[int]] = {}
    for rank, s in enumerate(said):
        groups.setdefault(words(s), []).append(rank)
    return "the ranks are not at the same place: " + "; ".join(f"{_some(r)}: {w}" for w, r in groups.items())


def _some(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, ranks[:8]))}{' and others' if len(ranks) > 8 else ''}"


def _torn_on(ranks: list[int], step: int) -> str:
    return (
        f"{_some(ranks)}: the backward pass of step {step} has applied some of its gradients to the tables and lost "
        "the others: something in it raised (a gradient hook?), or it was asked for the gradients of some tensors only "
        "(torch.autograd.grad, backward(inputs=...)), or a backward pass of another step came in between. Under a "
        "LookaheadLoader, call loss.backward(); this loop is over"
    )


def _all_brought_it(said: list[Said]) -> None:
    """Every rank is about to train on the batch that its loader handed out last, which is the same for all."""
    for rank, s in enumerate(said):
        if s.number >= 0 and not s.used and s.came in (s.number, UNKNOWN):
            continue
        if s.number < 0 or s.used:
            expected = f"batch {s.number + 1}, which has not been taken from the loader yet"
        else:
            expected = f"batch {s.number}, which the loader handed out last"
        if s.came < 0:
            came = "a batch that did not come from the loader"
        else:
            came = f"batch {s.came} again" if s.came == s.number else f"batch {s.came}, out of order"
        raise RuntimeError(
            f"freescale: rank {rank}: the model expected {expected}; what came is {came}. Pass each batch of a "
            "LookaheadLoader to the model once, in order; evaluate other batches under torch.no_grad()"
        )
    if len({s.number for s in said}) > 1:
        raise RuntimeError(f"freescale: {_differ(said)}")


# ---- the tables of a model --------------------------------------------------------------------------------------


def table_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules whose tables an exchange serves, in the model's order, the same on every rank."""
    return [m for m in model.modules() if _exchanges(m)]


def exchanges_of(model: torch.nn.Module) -> list[Exchange]:
    """The exchanges of a model, in the order of its modules, the same on every rank."""
    return list(dict.fromkeys(x for m in model.modules() for x in _exchanges(m)))


def _exchanges(module: torch.nn.Module) -> list[Exchange]:
    if isinstance(module, ShardedEmbedding):
        return [module._exchange]
    if is_collection(module) and torchrec_support.unsupported_reason(module) is None:
        return torchrec_collection.tables_of(module).exchanges
    return []


def is_collection(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "ShardedEmbeddingCollection"


_of: weakref.WeakKeyDictionary[Exchange, Tables] = weakref.WeakKeyDictionary()


def tables_of(exchanges: list[Exchange], link_gbps: float) -> Tables:
    """One for all models that share a table."""
    found = next((_of[x] for x in exchanges if x in _of), None) or Tables(exchanges, link_gbps)
    for x in exchanges:
        if _of.setdefault(x, found) is found:
            found.carry_behind(x)
    return found
