"""Train an HSTU sequence recommender, first eager and then with freescale, and compare.

    torchrun --standalone --nproc-per-node 2 examples/train_hstu.py --steps 20

Before and after training, all are evaluated on the same held-out batches: loss and AUC.
The tables are TorchRec's, or freescale's own if TorchRec is missing (`--tables`). The first run is eager TorchRec, or
with freescale's own tables the same model in eager mode, where every exchange blocks. Both runs use the same batches
and initial weights. The last line of output is a JSON object: what was compiled for which device, and the largest
difference of any loss, dense parameter or table row between the two runs.
With --balance the second run moves samples between ranks to equalize their work. The global batch and its averaged
gradients are the same, but sums are taken in a different order.
With --segments the model is PerSRec (persrec.py): all but the last --recent items of a history are split into segments,
each followed by --tokens tokens. The balancer's cost then takes the segments into account.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

import freescale
from hstu import HSTU
from persrec import PerSRec, check_settings, cost_features
from synthetic import SyntheticHistories


def main() -> None:
    args = arguments()
    quiet()
    device = torch.device("cuda", local_rank()) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    torch.set_num_threads(1)

    build, reference = (build_torchrec, "eager TorchRec") if args.tables == "torchrec" else (build_native, "eager")
    plain, model = build(args, device), build(args, device)
    model.compile(backend="freescale")  # first, so that unknown flags fail early
    held_out = {"untrained": evaluate(plain, args, device)}
    expected = train(plain, histories(args), device, reference)
    held_out[reference] = evaluate(plain, args, device)
    loader = freescale.LookaheadLoader(histories(args), model, balance=balance(args))
    bubbles = Bubbles()
    stop = freescale.log_to(bubbles)
    losses = train(model, loader, device, "freescale", bubbles)
    stop()
    held_out["freescale"] = evaluate(model, args, device)
    print_exchanges(loader.stats())
    print_balance(loader.balance_stats())

    difference = worst_difference(losses, expected, model, plain)
    if dist.get_rank() == 0:
        print("\nheld out           loss    AUC", file=sys.stderr)
        for name, (loss, auc) in held_out.items():
            print(f"{name:<14}{loss:>9.4f}{auc:>7.3f}", file=sys.stderr)
        print(json.dumps(report(losses, args, difference) | {"held_out": held_out}))
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--batch-size", type=int, default=16, help="samples per rank")
    p.add_argument("--items", type=int, default=20_000)
    p.add_argument("--dim", type=int, default=32)
    p.add_argument("--blocks", type=int, default=2)
    p.add_argument("--heads", type=int, default=2)
    p.add_argument("--median", type=float, default=20.0, help="median history length (1000 in production)")
    p.add_argument("--sigma", type=float, default=1.0, help="sigma of the lognormal lengths")
    p.add_argument("--cap", type=int, default=420, help="longest history (21,000 in production)")
    p.add_argument("--zipf", type=float, default=1.05, help="exponent of the ids' popularity")
    p.add_argument("--balance", action="store_true", help="move samples between ranks to equalize their work")
    p.add_argument("--segments", type=int, default=0, help="PerSRec: segments before the recent items; 0: HSTU")
    p.add_argument("--tokens", type=int, default=4, help="PerSRec: tokens after each segment")
    p.add_argument("--recent", type=int, default=16, help="PerSRec: recent items")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--tables", choices=("torchrec", "native"), help="default: torchrec if installed")
    args = p.parse_args()
    for name in ("steps", "batch_size", "items", "dim", "blocks", "heads", "cap"):
        if getattr(args, name) < 1:
            p.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.segments:
        try:
            check_settings(args.segments, args.tokens, args.recent, longest=args.cap)
        except ValueError as e:
            p.error(str(e))
    if "RANK" not in os.environ:
        p.error("run this with torchrun: torchrun --standalone --nproc-per-node 2 examples/train_hstu.py")
    if args.device == "cuda" and local_rank() >= torch.cuda.device_count():
        p.error(f"more ranks than the {torch.cuda.device_count()} GPUs: start one rank per GPU")
    args.tables = args.tables or ("torchrec" if has_torchrec() else "native")
    return args


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def has_torchrec() -> bool:
    try:
        import torchrec.distributed.embedding  # noqa: F401
    except (ImportError, OSError):  # missing, or built for another torch
        return False
    return True


def quiet() -> None:
    """Silence irrelevant warnings of TorchRec's planner and torch."""
    warnings.filterwarnings("ignore")
    for name in ("torchrec", "torch._dynamo", "torch.fx"):
        logging.getLogger(name).setLevel(logging.ERROR)


def recommender(args: argparse.Namespace, tables: torch.nn.Module) -> HSTU:
    settings = {"max_distance": 128, "normalizer": args.batch_size}
    if not args.segments:
        return HSTU(tables, args.dim, args.heads, args.blocks, **settings)
    segments = {"segments": args.segments, "tokens": args.tokens, "recent": args.recent}
    return PerSRec(tables, args.dim, args.heads, args.blocks, **segments, **settings)


def balance(args: argparse.Namespace) -> Any:
    """The `balance` argument of the loader. With segments, the cost is fitted to rows and query-key pairs."""
    if not args.balance or not args.segments:
        return args.balance
    features = cost_features(args.segments, args.tokens, args.recent)
    return freescale.BalanceOptions(cost=freescale.FittedCost((1.0, 1 / 1024), features=features))


def build_native(args: argparse.Namespace, device: torch.device) -> Any:
    """The model on freescale's own tables: items row-wise, actions table-wise, row-wise Adagrad, dense part in DDP."""
    from native_tables import NativeTables

    torch.manual_seed(0)
    tables = NativeTables(args.items, 16, args.dim, device)
    model = recommender(args, tables).to(device)
    return torch.nn.parallel.DistributedDataParallel(model)


def build_torchrec(args: argparse.Namespace, device: torch.device) -> Any:
    """The model, sharded by TorchRec: items row-wise, actions table-wise, fused row-wise Adagrad, dense part in DDP."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    torch.manual_seed(0)
    tables = [
        EmbeddingConfig(
            name="item", num_embeddings=args.items, embedding_dim=args.dim, feature_names=["history", "candidate"]
        ),
        EmbeddingConfig(name="action", num_embeddings=16, embedding_dim=args.dim, feature_names=["action"]),
    ]
    model = recommender(args, EmbeddingCollection(tables=tables, device=torch.device("cpu"))).to(device)
    sharder = EmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05, "eps": 1e-8}
    )
    constraints = {
        "item": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"]),
        "action": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"]),
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device=device.type), constraints=constraints
    )
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    return DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])


def histories(args: argparse.Namespace) -> SyntheticHistories:
    return SyntheticHistories(
        args.steps,
        args.batch_size,
        args.items,
        actions=16,
        rank=dist.get_rank(),
        median=args.median,
        sigma=args.sigma,
        cap=args.cap,
        zipf=args.zipf,
        native=args.tables == "native",
    )


class Bubbles(dict[str, str]):
    """The latest values from `freescale.log_to`, for the progress bar."""

    def add_scalar(self, name: str, value: float, step: int) -> None:
        part = name.removeprefix("freescale/").removesuffix("_share")
        if part in ("exposed", "straggler"):
            self[part] = f"{value:.1%}"


def train(
    model: Any,
    loader: Iterable[Any],
    device: torch.device,
    name: str,
    bubbles: Mapping[str, str] = MappingProxyType({}),
) -> list[torch.Tensor]:
    """The user's loop, independent of freescale. Returns the mean loss over ranks of every step."""
    dense = [p for p in model.parameters() if not hasattr(p, "_in_backward_optimizers")]
    optimizer = torch.optim.Adam(dense, lr=1e-3)
    losses = []
    shown = dist.get_rank() == 0 and sys.stderr.isatty()
    bar = tqdm(loader, desc=f"{name:>14}", disable=not shown, file=sys.stderr)
    for batch in bar:
        batch = batch.to(device)
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean)
        if shown:
            bar.set_postfix({"loss": f"{float(mean):.4f}", **bubbles})
    return losses


@torch.no_grad()
def evaluate(model: Any, args: argparse.Namespace, device: torch.device, batches: int = 16) -> tuple[float, float]:
    """Mean loss and area under the ROC curve on batches of all ranks that training does not use. Runs eagerly."""
    data = histories(args)
    scorer = next(m for m in model.modules() if isinstance(m, HSTU))
    scored = []
    for number in range(args.steps, args.steps + batches):
        batch = data.batch(number).to(device)
        scored.append(torch.stack([scorer.logits(batch.features), batch.labels]))
    of_ranks = [torch.zeros_like(torch.cat(scored, dim=1)) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, torch.cat(scored, dim=1))
    logits, labels = torch.cat(of_ranks, dim=1).double().cpu()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    pairs = logits[labels == 1, None] - logits[labels == 0]  # AUC: the share of pairs in the right order
    return round(float(loss), 6), round(float((pairs > 0).double().mean() + (pairs == 0).double().mean() / 2), 4)


def print_exchanges(stats: list[dict[str, Any]]) -> None:
    """Print the exchanges' traffic on this rank, summed over steps."""
    if dist.get_rank() != 0:
        return
    columns = {"rows": 9, "colliding": 11, "urgent kB": 11, "early kB": 10, "late kB": 9, "per value kB": 14}
    print(f"\n{'exchange':<28}" + "".join(f"{name:>{width}}" for name, width in columns.items()), file=sys.stderr)
    for name in dict.fromkeys(s["exchange"] for s in stats):
        mine = [s for s in stats if s["exchange"] == name]
        total = {key: sum(s[key] for s in mine) for key in mine[0] if key not in ("step", "exchange")}
        urgent = total["bytes_urgent"] + total["bytes_back_urgent"]
        print(
            f"{name:<28}{total['unique_rows']:>9}{total['colliding_rows'] / max(total['unique_rows'], 1):>11.0%}"
            f"{urgent / 1e3:>11.0f}{total['bytes_early'] / 1e3:>10.0f}{total['bytes_late'] / 1e3:>9.0f}"
            f"{total['bytes_urgent_per_value'] / 1e3:>14.0f}",
            file=sys.stderr,
        )
    words = "(rank 0; `per value`: urgent bytes in forward without deduplication)"
    print(words, file=sys.stderr)


def print_balance(stats: list[dict[str, Any]]) -> None:
    """Print straggler shares, over the steps whose times are known."""
    known = [s for s in stats if s["measured"] is not None and s["step"] > 0]  # the first step includes compilation
    if dist.get_rank() != 0 or not known:
        return
    before, after, measured = (
        sum(s[key] for s in known) / len(known) for key in ("predicted_before", "predicted_after", "measured")
    )
    moved = sum(s["moved_bytes"] for s in stats)
    print(
        f"\nstraggler share: {before:.1%} without balancing, {after:.1%} with it (predicted), {measured:.1%} measured; "
        f"{moved / 1e3:.0f} kB of samples moved",
        file=sys.stderr,
    )


def worst_difference(losses: list[torch.Tensor], expected: list[torch.Tensor], model: Any, plain: Any) -> float:
    """The largest absolute difference of losses, dense parameters and table rows, over all ranks."""
    pairs = list(zip(losses, expected, strict=True))
    ours, theirs = model.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if hasattr(value, "local_shards"):
            shards = zip(value.local_shards(), theirs[name].local_shards(), strict=True)
            pairs += [(a.tensor, b.tensor) for a, b in shards]
        else:
            pairs.append((value, theirs[name]))
    differences = [(a - b).abs().max().double().cpu() for a, b in pairs if a.numel()]
    worst = torch.stack(differences).max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def report(losses: list[torch.Tensor], args: argparse.Namespace, difference: float) -> dict[str, Any]:
    seen = freescale.report()
    return {
        "ranks": dist.get_world_size(),
        "device": args.device,
        "tables": args.tables,
        "steps": args.steps,
        "loss_first": round(float(losses[0]), 6),
        "loss_last": round(float(losses[-1]), 6),
        "graphs": seen["graphs"],
        "graph_breaks": seen["graph_breaks"],
        "recompiles": seen["recompiles"],
        "exchanges": seen["exchanges"],
        "max_abs_diff": difference,
    }


if __name__ == "__main__":
    main()
