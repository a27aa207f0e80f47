"""Whether an exception leaves a loop: Python closes the loop's generator then, as for `break`, and does not say why.

An exception that leaves a frame has a traceback of it, and the frame is at the instruction that raised, or raises again
what a handler was given. `break`, `return` and `close()` are at neither, whatever exceptions somebody keeps.
"""

from __future__ import annotations

import dis
import gc
import inspect
import sys
import traceback
from types import FrameType, TracebackType

_YIELDS = ("YIELD_VALUE", "RESUME")
_RAISES = ("RERAISE", "RAISE_VARARGS")


def describe_exception(frame: FrameType | None, closed: BaseException | None = None, handled_before: int = 0) -> str:
    """The exception that leaves the frame which has closed a generator; else the one handled when it was `closed`,
    unless that was handled when the loop began (`handled_before`: its id); "" where there is neither."""
    if frame is None:
        return describe_end_of_process()  # nothing runs any more that could have closed it
    while frame is not None:
        at = _opcode(frame, frame.f_lasti)
        tracebacks = [t for t in gc.get_referrers(frame) if type(t) is TracebackType and t.tb_lasti <= frame.f_lasti]
        if at not in _RAISES:
            tracebacks = [t for t in tracebacks if not _is_kept(t)]
        latest = max(tracebacks, key=lambda t: t.tb_lasti, default=None)
        leaves = latest is not None and (latest.tb_lasti == frame.f_lasti or at in _RAISES)
        # A generator around the loop (a progress bar) is closed itself: an exception was thrown in where it yields.
        is_closed = at in _YIELDS or (leaves and latest is not None and _opcode(frame, latest.tb_lasti) in _YIELDS)
        if not (is_closed and frame.f_code.co_flags & inspect.CO_GENERATOR):
            break
        frame = frame.f_back
    else:
        leaves = False
    if leaves and latest is not None:
        return _describe(latest, next((e for e in gc.get_referrers(latest) if isinstance(e, BaseException)), None))
    while isinstance(closed, GeneratorExit):  # also those of generators around the loop
        closed = closed.__context__
    return "" if closed is None or id(closed) == handled_before else _describe(closed.__traceback__, closed)


def _is_kept(tb: TracebackType) -> bool:
    """Whether something keeps the traceback's exception: then the instruction that raised it may run again. Only the
    interpreter refers to an exception that is leaving a frame."""
    referrers = gc.get_referrers(tb)
    errors = [r for r in referrers if isinstance(r, BaseException)]
    if any(type(r) is TracebackType for r in referrers):
        return True
    known = (id(referrers), id(errors))
    return any(type(r) is not FrameType and id(r) not in known for e in errors for r in gc.get_referrers(e))


def describe_end_of_process() -> str:
    error = getattr(sys, "last_value", None)  # that nothing has caught
    return "its process ends" + ("" if error is None else f": {_describe(error.__traceback__, error)}")


def _opcode(frame: FrameType, at: int) -> str:
    return dis.opname[frame.f_code.co_code[at]]


def _describe(tb: TracebackType | None, error: BaseException | None) -> str:
    # Before Python 3.12 nothing may lead from the traceback to its exception while the frame is left.
    words = "an exception" if error is None else traceback.format_exception_only(error)[-1].strip()
    if tb is None:
        return words
    where = traceback.extract_tb(tb)[-1]
    return f'{words} (file "{where.filename}", line {where.lineno}, in {where.name}: {where.line})'
