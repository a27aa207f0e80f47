"""Analyze a torch profiler trace: how busy the compute stream is (that with the most kernel time), and what it waits
for. Copies on other streams and NCCL kernels count as communication. Idle time of the compute stream is

    host      until the next kernel was launched
    exposed   after that, while a copy or an NCCL kernel is running
    gap       the rest: the device's own time between two kernels, and waiting for other ranks to send
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

from freescale.views.records import RecordError

_KERNEL, _COPIES = "kernel", ("gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_GAP = 2e-6  # seconds; shorter gaps between two kernels are not attributed


class Span(NamedTuple):
    begin: float  # seconds
    end: float
    correlation: int | None = None


def analyse(path: Path) -> dict[str, Any]:
    """Seconds, and shares of the time from the compute stream's first kernel to its last."""
    events = _events(path)
    kernels = [e for e in events if e.get("cat") == _KERNEL]
    if not kernels:
        raise RecordError(f"{path} has no GPU kernels (field 'cat'); profile with ProfilerActivity.CUDA")
    communication = [e for e in kernels if "nccl" in e["name"].lower()]
    others = [e for e in kernels if "nccl" not in e["name"].lower()]
    by_stream: dict[Any, float] = {}
    for e in others:
        by_stream[_stream(e)] = by_stream.get(_stream(e), 0.0) + e["dur"]
    stream = max(by_stream, key=by_stream.__getitem__)
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and _stream(e) != stream]
    compute = [e for e in others + [e for e in events if e.get("cat") in _COPIES] if _stream(e) == stream]
    launches = [e for e in events if e.get("cat") in _LAUNCHES and "correlation" in e.get("args", {})]
    launched = {e["args"]["correlation"]: e["ts"] / 1e6 for e in launches}
    travelling = _union([_span(e) for e in communication + copies])
    busy = _union([_span(e) for e in compute])
    begin, end = busy[0].begin, busy[-1].end
    idle = _idle(sorted((_span(e) for e in compute), key=lambda s: s.begin), launched, travelling)
    whole, total = end - begin, sum(s.end - s.begin for s in busy)
    parts = {"busy": total, **idle}
    return {
        "file": str(path),
        "seconds": whole,
        "stream": str(stream),
        "kernels": len(compute),
        "shares": {name: seconds / whole if whole else 0.0 for name, seconds in parts.items()},
        "communication_seconds": sum(s.end - s.begin for s in travelling),
        "communication_hidden": _overlap(travelling, busy) / max(sum(s.end - s.begin for s in travelling), 1e-12),
    }


def text_profile(found: dict[str, Any]) -> str:
    shares = found["shares"]
    rows = {"busy": "compute stream busy", "exposed": "exposed communication", "host": "waiting for the host"}
    rows["gap"] = "gaps"
    on = f"{found['kernels']} kernels on stream {found['stream']}"
    lines = [f"{found['file']}: {found['seconds'] * 1e3:.1f} ms, {on}"]
    lines += [f"  {label:24}{shares[name]:7.1%}" for name, label in rows.items()]
    hidden = f"{found['communication_hidden']:.1%} overlapped with compute"
    lines.append(f"  communication takes {found['communication_seconds'] * 1e3:.1f} ms, {hidden}")
    return "\n".join(lines)


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = data["traceEvents"] if isinstance(data, dict) else data
        return [e for e in events if e.get("ph") == "X" and "dur" in e]
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RecordError(f"{path} is not a torch profiler trace (JSON with the field 'traceEvents')") from None


def _stream(event: dict[str, Any]) -> Any:
    args = event.get("args", {})
    return args.get("device", 0), args.get("stream", event.get("tid"))


def _span(event: dict[str, Any]) -> Span:
    begin = event["ts"] / 1e6
    return Span(begin, begin + event["dur"] / 1e6, event.get("args", {}).get("correlation"))


def _union(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for s in sorted(spans):
        if merged and s.begin <= merged[-1].end:
            merged[-1] = Span(merged[-1].begin, max(merged[-1].end, s.end))
        else:
            merged.append(Span(s.begin, s.end))
    return merged


def _overlap(a: list[Span], b: list[Span]) -> float:
    """Seconds in which both are active. Spans within each list are sorted and do not overlap."""
    total, j = 0.0, 0
    for s in a:
        while j < len(b) and b[j].end <= s.begin:
            j += 1
        for t in b[j:]:
            if t.begin >= s.end:
                break
            total += min(s.end, t.end) - max(s.begin, t.begin)
    return total


def _idle(compute: list[Span], launched: dict[int, float], travelling: list[Span]) -> dict[str, float]:
    """Idle seconds of the compute stream, by cause."""
    found = {"exposed": 0.0, "host": 0.0, "gap": 0.0}
    until = compute[0].end
    for s in compute[1:]:
        if s.begin > until:
            at = launched.get(s.correlation, until) if s.correlation is not None else until
            host = min(max(at - until, 0.0), s.begin - until)
            rest = Span(until + host, s.begin)
            found["host"] += host
            waited = 0.0 if rest.end - rest.begin < _GAP else _overlap([rest], travelling)
            found["exposed"] += waited
            found["gap"] += rest.end - rest.begin - waited
        until = max(until, s.end)
    return found
