"""Reports what is installed, what works on this machine and what is missing, as text or JSON. Never raises."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import freescale
from freescale import config

# The TorchRec and FBGEMM releases for each supported torch, and TorchRec's requirements, as in the Makefile. (TorchRec
# itself requires fbgemm-gpu, whose wheels are only for x86-64 with CUDA.)
TORCHREC_FOR = {
    "2.11": ("1.6.1", "1.6.0"),
    "2.12": ("1.7.0", "1.7.0"),
    "2.13": ("1.8.0", "1.8.0"),
    "2.14": ("1.9.2", "1.9.0"),
}
WITHOUT_TORCHREC = ("2.15",)  # FBGEMM 1.9 does not load with it
NEWEST = "2.14"  # with all components

TORCHREC_NEEDS = "tensordict pyre-extensions torchmetrics tqdm iopath psutil typing-extensions"


@dataclass(frozen=True)
class Missing:
    what: str
    remedy: str
    fatal: bool = False  # freescale is unusable without it


@dataclass
class Facts:
    versions: dict[str, str | None] = field(default_factory=dict)  # None: missing or broken
    torch_supported: bool = False
    cpu_cores: int = 0
    cuda_devices: list[str] = field(default_factory=list)
    process_groups: dict[str, bool] = field(default_factory=dict)
    transports: dict[str, str] = field(default_factory=dict)  # "yes", or "no: " and the reason
    transport_rule: list[str] = field(default_factory=list)  # how `auto` chooses
    tables: dict[str, str] = field(default_factory=dict)  # as for transports
    c_library: str = "no"  # as for transports
    settings: dict[str, Any] | None = None  # None: a flag is invalid
    missing: list[Missing] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        return not any(m.fatal for m in self.missing)


def main(as_json: bool = False) -> int:
    facts = examine()
    print(json.dumps({**asdict(facts), "usable": facts.usable}, indent=2) if as_json else in_words(facts))
    return 0 if facts.usable else 1


def examine() -> Facts:
    facts = Facts()
    facts.versions = {"freescale": freescale.__version__, "python": platform.python_version()}
    facts.cpu_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        facts.cpu_cores = len(os.sched_getaffinity(0))
    torch, why = _import("torch")
    facts.versions["torch"] = torch and torch.__version__
    if torch is None:
        facts.missing.append(Missing(f"torch: {why}", f"Install torch {NEWEST}.", fatal=True))
    else:
        _examine_torch(facts, torch)
        _examine_triton(facts)
        _examine_c_library(facts)
    _examine_tables(facts)
    _examine_install(facts)
    try:
        settings = asdict(config.load())
        facts.settings = {config.PREFIX + name.upper(): value for name, value in settings.items()}
    except config.ConfigError as error:
        facts.missing.append(Missing(str(error), "Correct or unset this variable.", fatal=True))
    return facts


def _examine_torch(facts: Facts, torch: Any) -> None:
    facts.torch_supported = _minor(torch.__version__) in (*TORCHREC_FOR, *WITHOUT_TORCHREC)
    why = _self_test()
    remedy = f"Install torch {' or '.join(TORCHREC_FOR)}."
    if not facts.torch_supported:
        facts.missing.append(Missing(f"a supported torch: this is {torch.__version__}", remedy, fatal=True))
    elif why is not None:
        what = f"internals of torch that freescale uses: the self test of freescale.compat failed ({why})"
        facts.missing.append(Missing(what, remedy, fatal=True))
    dist = torch.distributed
    for name in ("gloo", "nccl", "ucc", "mpi", "xccl"):
        available = getattr(dist, f"is_{name}_available", lambda: False)
        facts.process_groups[name] = dist.is_available() and bool(available())
    c10d = any(facts.process_groups.values())
    facts.cuda_devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    facts.transports = {"c10d": "yes" if c10d else "no: torch has no process-group backend"}
    facts.transports |= _copying_transports(len(facts.cuda_devices))
    selection, _ = _import("freescale.kernels.transports.selection")
    facts.transport_rule = list(selection.RULE) if selection is not None else []
    from freescale.compat import nixl

    facts.versions["nixl"] = nixl.version()
    if not c10d:
        facts.missing.append(Missing("a process-group backend", "Install another build of torch."))
    elif facts.cuda_devices and not facts.process_groups["nccl"]:
        facts.missing.append(Missing("nccl: CUDA tensors go through gloo", "Install a CUDA build of torch."))


def _copying_transports(gpus: int) -> dict[str, str]:
    from freescale.compat import nixl

    if not gpus:
        return dict.fromkeys(("staged", "nixl"), "no: it copies between GPUs, and no GPU was found")
    staged = "yes"
    try:
        from freescale.kernels.transports import cuda_driver

        cuda_driver.load()
    except Exception as error:
        staged = f"no: {_reason(error)}"
    without_nixl = nixl.missing_reason()
    return {"staged": staged, "nixl": f"no: {without_nixl}" if without_nixl else staged}


def _self_test() -> str | None:
    """Why freescale.compat does not work with this torch, or None."""
    probes, why = _import("freescale.compat.probes")
    if probes is not None:
        try:
            probes.self_test()
        except Exception as error:
            return _reason(error)
    return why


def _examine_triton(facts: Facts) -> None:
    triton, why = _import("triton")
    facts.versions["triton"] = triton and triton.__version__
    if triton is None and (facts.cuda_devices or sys.platform == "linux"):
        facts.missing.append(Missing(f"triton: {why}", "Install triton; without it there is no GPU code."))
    if not any(shutil.which(c) for c in ("g++", "clang++", "c++")):
        facts.missing.append(
            Missing("a C++ compiler: Inductor needs one", "Install g++, or set FREESCALE_CODEGEN=eager.")
        )


def _examine_c_library(facts: Facts) -> None:
    from freescale.kernels.native import c_library

    why = c_library.problem()
    facts.c_library = "yes" if why is None else f"no: {why}"
    if why is not None:
        remedy = "Sharded tables need it to plan batches."
        facts.missing.append(Missing(f"freescale's C library: {why}", remedy, fatal=True))


def _examine_tables(facts: Facts) -> None:
    torch_minor = _minor(facts.versions["torch"] or "")
    without = torch_minor in WITHOUT_TORCHREC
    if torch_minor not in TORCHREC_FOR:
        torch_minor = NEWEST
    wanted, wanted_fbgemm = TORCHREC_FOR[torch_minor]
    _, why = _import("torchrec.distributed.embedding")
    facts.versions["torchrec"] = _installed_version("torchrec")
    facts.versions["fbgemm"] = _installed_version("fbgemm-gpu") or _installed_version("fbgemm-gpu-cpu")
    native = next((f"no: {m.what}" for m in facts.missing if m.fatal), "yes")
    facts.tables = {"native": native, "TorchRec": "yes" if why is None else f"no: {why}"}
    fbgemm = "fbgemm-gpu" if facts.cuda_devices and platform.machine() == "x86_64" else "fbgemm-gpu-cpu"
    in_checkout = (Path(freescale.__path__[0]).parent / "Makefile").exists()
    remedy = (
        f"torchrec {wanted} and fbgemm {wanted_fbgemm} are the releases for torch {torch_minor}: "
        f"{'run `make setup`, or ' if in_checkout else ''}pip install {TORCHREC_NEEDS} && "
        f"pip install --no-deps torchrec=={wanted} {fbgemm}=={wanted_fbgemm}"
    )
    installed = facts.versions["torchrec"]
    if why is not None and why.startswith("OSError") and not facts.cuda_devices and _installed_version("fbgemm-gpu"):
        remedy = (
            "fbgemm-gpu is built for CUDA, and no GPU was found. Without it, native tables work. For TorchRec's:\n"
            f"    pip uninstall -y fbgemm-gpu\n    pip install --no-deps fbgemm-gpu-cpu=={wanted_fbgemm}"
        )
    if without and why is not None:
        newest = f"FBGEMM {wanted_fbgemm}, the newest, does not load under torch {facts.versions['torch']}"
        remedy = f"{newest}. For TorchRec: torch {torch_minor}."
    if why is not None:
        facts.missing.append(Missing(f"TorchRec: {why}", remedy))
    elif installed is not None and _minor(installed) != _minor(wanted):
        facts.missing.append(Missing(f"a TorchRec for torch {torch_minor}: this is {installed}", remedy))


def _examine_install(facts: Facts) -> None:
    backends = importlib.metadata.entry_points(group="torch_dynamo_backends")
    if "freescale" not in backends.names:
        what = 'the entry point: torch.compile(backend="freescale") does not find this freescale'
        facts.missing.append(Missing(what, "Install it, for example with `pip install -e .`.", fatal=True))


def _import(name: str) -> tuple[Any, str | None]:
    """The module, or None and the error. Output and warnings of the import are suppressed."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            return importlib.import_module(name), None
    except Exception as error:
        return None, _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return f"{error.name.split('.')[0]} is not installed"
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _installed_version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def in_words(facts: Facts) -> str:
    versions = {name: version or "not installed" for name, version in facts.versions.items()}
    if facts.versions["torch"]:
        versions["torch"] += " (supported)" if facts.torch_supported else " (not supported)"
    yes_no = {True: "yes", False: "no"}
    settings = facts.settings if facts.settings is not None else {"invalid flag": "see below"}
    sections: dict[str, list[str]] = {
        "Versions": _aligned(versions),
        "Devices": [f"CPU: {facts.cpu_cores} cores", *(f"CUDA: {d}" for d in facts.cuda_devices or ["none"])],
        "Process-group backends": [f"{k}: {yes_no[v]}" for k, v in facts.process_groups.items()] or ["none"],
        "Transports": [*(f"{k}: {v}" for k, v in facts.transports.items()), *facts.transport_rule] or ["none"],
        "Tables": [f"{k}: {v}" for k, v in facts.tables.items()],
        "C code": [f"library: {facts.c_library}"],
        "Settings": _aligned({k: int(v) if isinstance(v, bool) else v for k, v in settings.items()}),
        "Missing": [f"{m.what.rstrip('.')}. {m.remedy}" for m in facts.missing] or ["Nothing is missing."],
    }
    if not facts.usable:
        sections["Missing"].append("freescale cannot be used until this is fixed.")
    return "\n".join("\n  ".join([title, *lines]) for title, lines in sections.items())


def _aligned(values: dict[str, Any]) -> list[str]:
    width = max(map(len, values))
    return [f"{name:{width}}  {value}" for name, value in values.items()]
