"""`LookaheadLoader.restore`: send per-sample outputs back to where a balanced batch's samples came from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.runtime.balance.integer_problem import BalanceError
from freescale.runtime.samples import sample_columns, split_batch
from freescale.runtime.samples.sample_columns import Column
from freescale.runtime.samples.split_batch import SplitBatch


def restore_outputs(outputs: Any, origin: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Per-sample outputs, a batch of any structure, at the rank and in the order that the samples came from."""
    split, error = _try_split(outputs, len(origin))
    home, position = origin.numpy().T if len(origin) else np.zeros((2, 0), np.int64)
    leaving = np.bincount(home, minlength=group.size())
    text = str(error) if split is None else split.schema()
    headers = distributed.gather_ints([int(split is not None), sample_columns.digest(text), *leaving.tolist()], group)
    if split is None or len({(splits, digest) for splits, digest, *_ in headers}) > 1:
        _raise_on_every_rank(headers, text, error, group)
    assert split is not None
    arriving = np.array([header[2 + group.rank()] for header in headers])
    positions = Column("position", ("position",), None, (torch.from_numpy(position.copy()),), split.samples)
    *arrived, positions = sample_columns.exchange([*split.columns, positions], home, arriving, group)
    return split.rebuild(sample_columns.select(arrived, np.argsort(positions.rows[0].numpy(), kind="stable")))


def _try_split(outputs: Any, samples: int) -> tuple[SplitBatch | None, Exception | None]:
    try:
        split = split_batch.split(outputs)
        if split.samples != samples:
            raise BalanceError(
                f"freescale: restore expects one output for each of the {samples} samples of the last batch; "
                f"found {split.samples}"
            )
    except Exception as error:  # noqa: BLE001  (reported to the other ranks)
        return None, error
    return split, None


def _raise_on_every_rank(
    headers: list[list[int]], text: str, error: Exception | None, group: dist.ProcessGroup
) -> None:
    """Raise this rank's own error, or that of another rank."""
    texts: list[Any] = [None] * len(headers)
    dist.all_gather_object(texts, text, group)
    if error is not None:
        raise error
    failed = next((rank for rank, (splits, *_) in enumerate(headers) if not splits), None)
    if failed is not None:
        raise RuntimeError(f"freescale: restore failed on rank {failed}: {texts[failed]}")
    other = next(rank for rank, t in enumerate(texts) if t != texts[0])
    raise BalanceError(
        "freescale: restore expects outputs of the same structure on all ranks; "
        f"rank 0 has {texts[0]!r}, rank {other} has {texts[other]!r}"
    )
