"""All private names of torch and other libraries that freescale uses, in one table: a new release can break only this
folder. tests/compile/test_compat.py checks it on every version, `python -m freescale doctor` on the installed one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch

from freescale.compat import dynamo_settings, kernel_launches, nixl, version

# Location -> required names: attributes; for a class also names in its methods; for a function also its parameters and
# names in its code. `a|b`: one of the two.
Names = dict[str, str]
TORCH: Names = {
    "torch:_C": "_AutoDispatchBelowAutograd _ForceDispatchKeyGuard _dispatch_get_all_op_names "
    "_dispatch_has_kernel_for_dispatch_key _dispatch_tls_local_exclude_set _dispatch_tls_local_include_set "
    "_len_torch_dispatch_stack",
    "torch:_C.DispatchKey": "ADInplaceOrView AutogradFunctionality",
    "torch:_C._distributed_c10d": "_register_work",
    "torch:_C._dynamo.eval_frame": "get_eval_frame_callback reset_code",
    "torch:Tensor": "_version",
    "torch:_guards": "detect_fake_mode",
    "torch:_guards.CompileContext": "current_compile_id",
    "torch:_guards.TracingContext": "get try_get",
    "torch._dynamo": "OptimizedModule assume_constant_result disable",
    "torch._dynamo:mark_static": "_dynamo_static_indices",
    "torch._dynamo:OptimizedModule": "_load_from_state_dict _orig_mod dynamo_ctx",
    "torch._dynamo.config": " ".join(("patch", *dynamo_settings.dynamo_settings(True))),
    "torch._dynamo.convert_frame:CatchErrorsWrapper": "__call__",
    "torch._dynamo.exc": "RestartAnalysis",
    "torch._dynamo.output_graph": "graph_break_reasons",
    "torch._dynamo.output_graph:GraphCompileReason": "reason user_stack",
    "torch._dynamo.source": "TensorPropertySource",
    "torch._dynamo.source:TensorProperty": "SIZE",
    "torch._dynamo.symbolic_convert": "tls",
    "torch._dynamo.symbolic_convert:InliningInstructionTranslator.__init__": "parent",
    "torch._dynamo.symbolic_convert:InstructionTranslator": "current_tx",
    "torch._dynamo.types:ConvertFrameReturn": "guarded_code",
    "torch._dynamo.utils": "counters",
    "torch._functorch._aot_autograd.autograd_cache": "BypassAOTAutogradCache",
    "torch._functorch.config": "autograd_cache_allow_custom_autograd_functions bundled_autograd_cache "
    "enable_autograd_cache",
    "torch._inductor.compile_fx": "_recursive_post_grad_passes compile_fx compile_fx_inner",
    "torch._inductor.config": "post_grad_custom_post_pass",
    "torch._inductor.fx_passes.control_dependencies": "preserve_node_ordering",
    "torch._inductor.ir:_CollectiveKernel": "create_out_of_place",
    "torch._inductor.output_code:CompiledFxGraph": "_fx_graph_cache_key compiled_fn_runner current_callable",
    "torch._inductor.runtime.cache_dir_utils": "cache_dir",
    "torch._inductor.runtime.triton_heuristics:Grid2DWithYZOverflow": "generate",
    "torch._inductor.virtualized:V": "fake_mode",
    "torch._library.custom_ops:CustomOpDef.__init__": "_backend_fns _qualname",
    "torch._logging": "trace_structured",
    "torch._logging._internal": "_is_torch_handler",
    "torch._subclasses:FakeTensorMode": "cache_enabled from_tensor",
    "torch.autograd:Variable._execution_engine": "queue_callback",
    "torch.autograd:profiler": "_is_profiler_enabled",
    "torch.distributed": "_broadcast_coalesced default_pg_timeout",
    "torch.distributed:PrefixStore": "underlying_store",
    "torch.distributed:ProcessGroup": "_allgather_base _device_types _get_backend alltoall_base recv",
    "torch.distributed:TCPStore": "host",
    "torch.distributed.distributed_c10d": "_get_default_store _resolve_process_group _world",
    "torch.fx.experimental._config": " ".join(("patch", *dynamo_settings.shape_settings(True))),
    "torch.fx.experimental.proxy_tensor:_extract_tensor_metadata": "include_contiguity",
    "torch.fx.experimental.sym_node:SymNode": "has_hint",
    "torch.fx.experimental.symbolic_shapes": "GuardOnDataDependentSymNode",
    "torch.fx.experimental.symbolic_shapes:DimDynamic": "DUCK DYNAMIC STATIC UNBACKED|SIZE_LIKE_UNBACKED",
    "torch.fx.experimental.symbolic_shapes:ShapeEnv": "backed_var_to_val create_symbol guards replace var_to_sources",
    "torch.fx.experimental.symbolic_shapes:ShapeGuard": "expr",
    "torch.fx.graph": "_BoxedCodeGen",
    "torch.fx.node": "has_side_effect",
    "torch.nn:Module": "_compiled_call_impl",
    "torch.nn.parallel:DistributedDataParallel": "_build_params_for_reducer "
    "_set_params_and_buffers_to_ignore_for_model parameters_to_ignore",
    "torch.utils._ordered_set": "OrderedSet",
    "torch.utils._python_dispatch": "_disable_current_modes",
}
CUDA: Names = {"torch._C": "_cuda_getCurrentRawStream _cuda_getDevice"}
LAUNCHER: Names = {
    "torch._inductor.runtime.static_triton_launcher:StaticallyLaunchedCudaKernel.run": "_launch_kernel arg_tys "
    "function has_global_scratch num_warps shared",
}
TRITON: Names = {
    "triton:knobs.runtime": "launch_enter_hook launch_exit_hook",
    "triton.compiler.compiler:CompiledKernel": "run",
    "triton.runtime.jit:JITFunction.run": "launch_metadata",
    "triton.runtime.jit:KernelParam": "is_constexpr",
}
FBGEMM: Names = {
    "fbgemm_gpu.split_table_batched_embeddings_ops_training:SplitTableBatchedEmbeddingBagsCodegen":
    "_used_rowwise_adagrad_with_counter _used_rowwise_adagrad_with_global_weight_decay embedding_specs "
    "feature_table_map get_learning_rate is_nobag iter iter_cpu momentum1_dev momentum1_host momentum2_dev "
    "momentum2_host momentum2_uvm optimizer optimizer_args output_dtype set_learning_rate weights_dev weights_host "
    "weights_precision weights_uvm",
    "fbgemm_gpu.quantize_comm:QuantizedCommCodec": "_comm_precision _loss_scale",
    "fbgemm_gpu.split_embedding_codegen_lookup_invokers.lookup_args:OptimizerArgs": "beta1 beta2 eps "
    "gradient_clipping max_norm weight_decay",
}  # fmt: skip
TORCHREC: Names = {
    "torchrec.distributed.embedding:ShardedEmbeddingCollection": "_device _embedding_configs _embedding_dim _env "
    "_lookups _module_fqn _need_indices _sharding_type_to_sharding _table_name_to_config",
    "torchrec.distributed.embeddingbag:ShardedEmbeddingBagCollection": "_device _embedding_bag_configs "
    "_embedding_dims _embedding_names _embedding_shardings _env _has_mean_pooling_callback _lookups _module_fqn "
    "_sharding_types _table_name_to_config",
    "torchrec.distributed.types:QuantizedCommCodecs": "forward backward",
    "torchrec.distributed.embedding_lookup:GroupedEmbeddingsLookup": "_emb_modules grouped_configs",
    "torchrec.distributed.embedding_lookup:GroupedPooledEmbeddingsLookup": "_emb_modules grouped_configs",
    "torchrec.distributed.sharding.rw_sharding:BaseRwEmbeddingSharding": "_grouped_embedding_configs_per_rank",
    "torchrec.distributed.sharding.tw_sharding:BaseTwEmbeddingSharding": "_grouped_embedding_configs_per_rank",
    "torchrec.distributed.sharding.twrw_sharding:BaseTwRwEmbeddingSharding": "_grouped_embedding_configs_per_rank",
    "torchrec.distributed.sharding.grid_sharding:BaseGridEmbeddingSharding": "_grouped_embedding_configs_per_rank",
    "torchrec.distributed.batched_embedding_kernel:BatchedDenseEmbedding": "_config",
    "torchrec.distributed.batched_embedding_kernel:EmbeddingFusedOptimizer": "_emb_module",
    "torchrec.optim.keyed:CombinedOptimizer": "optimizers",
    "torchrec.optim.keyed:OptimizerWrapper": "_optimizer",
}
NIXL: Names = {
    "": "nixl_agent_config",
    ":nixl_thread_sync_t": "NIXL_THREAD_SYNC_STRICT",
    ":nixl_agent": "add_remote_agent check_xfer_state deregister_memory get_agent_metadata get_new_notifs "
    "get_xfer_descs initialize_xfer make_connection register_memory remove_remote_agent send_notif transfer",
}


def self_test() -> None:
    """Raise if a name is missing. Cheap; needs no process group and no GPU."""
    if version.torch_version() not in version.SUPPORTED:
        raise RuntimeError(f"freescale supports torch {', '.join(version.SUPPORTED)}; found {torch.__version__}")
    for library, released, names in _installed():
        if gone := missing(names):
            beside = "" if library == "torch" else f" (with torch {torch.__version__})"
            raise RuntimeError(f"{library} {released}{beside} lacks names that freescale uses: {', '.join(gone)}")


def missing(names: Names) -> list[str]:
    gone = []
    for where, wanted in names.items():
        prefix = where.replace(":", ".").strip(".")
        try:
            found = _reach(where)
        except (ImportError, AttributeError):
            gone.append(prefix)
            continue
        mentioned = _mentioned_by(found)
        for name in wanted.split():
            if not any(hasattr(found, either) or either in mentioned for either in name.split("|")):
                gone.append(f"{prefix}.{name}".strip("."))
    return list(dict.fromkeys(gone))


def _reach(where: str) -> Any:
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module) if module else nixl.library()
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    return found


def _mentioned_by(found: Any) -> set[str]:
    """Parameters of a function and names in its code; for a class, names in its methods and its annotations."""
    if isinstance(found, type):
        names = {name for base in found.__mro__ for name in vars(base).get("__annotations__", ())}
        methods = (f for base in found.__mro__ for f in vars(base).values() if isinstance(f, FunctionType))
        return names.union(*(f.__code__.co_names for f in methods))
    if isinstance(function := inspect.unwrap(found) if callable(found) else None, FunctionType):
        return {*function.__code__.co_names, *inspect.signature(function).parameters}
    return set()


def _installed() -> Iterator[tuple[str, str | None, Names]]:
    """Each library that can be imported here, its version and its table."""
    cuda = CUDA if torch.backends.cuda.is_built() else {}
    launcher = LAUNCHER if kernel_launches.needed() else {}
    yield "torch", torch.__version__, TORCH | cuda | launcher
    for library, names in (("triton", TRITON), ("fbgemm_gpu", FBGEMM), ("torchrec", TORCHREC)):
        try:
            importlib.import_module(next(iter(names)).partition(":")[0])  # a package may be there without its library
            package = importlib.import_module(library)
        except (ImportError, OSError):
            continue
        yield library, getattr(package, "__version__", ""), names
    if not nixl.missing_reason():
        yield "nixl", nixl.version(), NIXL
