"""A graph that torch runs without code generation (codegen `eager`), as OutputCode that AOTAutograd's cache can store.
If its code or objects cannot be serialized, each process compiles it again."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import linecache
import operator
import pickle
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import fx
from torch._inductor.output_code import OutputCode

_numbers = itertools.count()
_loaded: list[Any] = []  # records of graphs loaded from the cache since the last take_loaded


class InterpretedGraph(OutputCode):
    """`record`: any picklable object; it is stored with the graph."""

    def __init__(self, gm: fx.GraphModule, record: Any) -> None:
        super().__init__()
        self._boxed_call = True  # on the instance: torch copies its attributes to wrappers
        self._run: Callable[[list[Any]], Any] | None = gm.forward
        self._gm: fx.GraphModule | None = gm
        self._written = b""
        self.record = record

    def __call__(self, inputs: Any) -> Any:
        assert self._run is not None, "not loaded"
        return self._run(inputs)

    def prepare_for_serialization(self) -> None:
        """Called on a copy, which is then pickled."""
        if self._gm is not None:
            self._written = _write(self._gm, self.record)
        self._run = self._gm = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Called after loading from the cache."""
        if self._run is None:
            self._run, self.record = _read(self._written)
            _loaded.append(self.record)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        pass


def _write(gm: fx.GraphModule, record: Any) -> bytes:
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

    code = gm.graph.python_code("self")
    modules = {k: v.__name__ for k, v in code.globals.items() if isinstance(v, ModuleType)}
    objects = {k: v for k, v in code.globals.items() if not isinstance(v, ModuleType)}
    constants = {str(n.target) for n in gm.graph.nodes if n.op in ("get_attr", "call_module")}
    if any("." in name for name in constants):
        raise BypassAOTAutogradCache("freescale: constants inside modules of a graph cannot be serialized")
    values = {name: operator.attrgetter(name)(gm) for name in sorted(constants)}
    try:
        return pickle.dumps((code.src, modules, objects, values, record))
    except Exception as error:  # noqa: BLE001  (whatever an object raises that does not want to be pickled)
        raise BypassAOTAutogradCache(f"freescale: the graph cannot be serialized: {error}") from error


def _read(written: bytes) -> tuple[Callable[[list[Any]], Any], Any]:
    source, modules, objects, values, record = pickle.loads(written)
    names = {k: importlib.import_module(name) for k, name in modules.items()} | objects
    file = f"<freescale graph {next(_numbers)}>"  # for tracebacks
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), names)
    owner = torch.nn.Module()
    for name, value in values.items():
        setattr(owner, name, value)
    return names["forward"].__get__(owner), record


def take_loaded() -> list[Any]:
    taken = _loaded.copy()
    _loaded.clear()
    return taken


@contextlib.contextmanager
def keeping_graphs(kept: bool) -> Iterator[None]:
    """Let AOTAutograd's cache, if it is on, store such graphs, including those with an autograd.Function; else turn it
    off."""
    settings = {"bundled_autograd_cache": True, "autograd_cache_allow_custom_autograd_functions": True}
    with functorch.patch(settings if kept else {"enable_autograd_cache": False}):
        yield


def graphs_are_kept() -> bool:
    """False while a backward graph is compiled lazily: then it is local to this process."""
    return bool(functorch.bundled_autograd_cache and functorch.enable_autograd_cache)


def complete_values(gm: fx.GraphModule) -> None:
    """Add the missing example values of `tolist` inputs, which the cache needs."""
    for node in gm.graph.find_nodes(op="call_function", target=operator.getitem):
        whole = node.args[0].meta.get("example_value") if isinstance(node.args[0], fx.Node) else None
        if "example_value" not in node.meta and isinstance(whole, torch.Tensor) and isinstance(node.args[1], int):
            node.meta["example_value"] = whole.new_empty(whole.shape[1:])
