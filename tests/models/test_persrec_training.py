"""PerSRec trains under the backend as it does without it: the training example as a program, and on two ranks."""

from __future__ import annotations

import argparse
import sys

import numpy as np
import pytest
import torch

import freescale
from ranks import run_ranks
from repo import ROOT

sys.path.insert(0, str(ROOT / "examples"))


def differences(tables: str) -> tuple[float, dict, list[dict]]:
    """Of a balanced run with look-ahead against the eager one, both as the example trains."""
    import train_hstu

    args = argparse.Namespace(
        steps=6, batch_size=6, items=300, dim=16, blocks=2, heads=2, median=12.0, sigma=1.0, cap=60, zipf=1.05,
        balance=True, segments=2, tokens=3, recent=8, tables=tables, device="cpu",
    )  # fmt: skip
    build = train_hstu.build_torchrec if tables == "torchrec" else train_hstu.build_native
    device = torch.device("cpu")
    plain, model = build(args, device), build(args, device)
    model.compile(backend="freescale")  # around DDP; that the model is one graph, the report says
    expected = train_hstu.train(plain, train_hstu.histories(args), device, "eager")
    loader = freescale.LookaheadLoader(train_hstu.histories(args), model, balance=train_hstu.balance(args))
    losses = train_hstu.train(model, loader, device, "freescale")
    return train_hstu.worst_difference(losses, expected, model, plain), freescale.report(), loader.balance_stats()


@pytest.mark.thorough
@pytest.mark.parametrize("tables", ("native", pytest.param("torchrec", marks=pytest.mark.slow)))
def test_two_ranks_train_as_eager(tables):
    if tables == "torchrec":
        pytest.importorskip("torchrec")
    for worst, report, stats in run_ranks(differences, 2, tables, env={"FREESCALE_CODEGEN": "eager"}):
        assert worst < 2e-5
        assert (report["graphs"], report["graph_breaks"], report["recompiles"]) == (1, 0, 0)
        assert sum(s["moved_samples"] for s in stats) > 0
        assert {"weight_0", "weight_1"} <= stats[-1]["fit"].keys()


@pytest.mark.parametrize(
    "flags, sentence",
    (
        (["--segments", "2", "--tokens", "0"], "tokens to be at least 1, found 0"),
        (["--segments", "-1"], "segments to be at least 1, found -1"),
        (["--segments", "1", "--recent", "0"], "recent to be at least 1, found 0"),
        (["--segments", "30", "--recent", "395"], "into 30 segments: the longest has 420 items, and 25 of them"),
        (["--segments", "1", "--recent", "500"], "the longest has 420 items, and 0 of them"),
    ),
)
def test_bad_flags(flags, sentence, monkeypatch, capsys):
    import train_hstu

    monkeypatch.setattr(sys, "argv", ["train_hstu.py", *flags])
    with pytest.raises(SystemExit):
        train_hstu.arguments()
    assert sentence in capsys.readouterr().err


def test_without_segments_the_model_is_that_of_before():
    import persrec
    import train_hstu
    from hstu import HSTU

    args = argparse.Namespace(segments=0, batch_size=4, dim=8, heads=2, blocks=1, balance=True, tokens=4, recent=9)
    assert type(train_hstu.recommender(args, torch.nn.Identity())) is HSTU and train_hstu.balance(args) is True
    args.segments = 2
    assert type(train_hstu.recommender(args, torch.nn.Identity())) is persrec.PerSRec


def test_features_of_a_sample():
    import persrec

    features = persrec.cost_features(2, 3, 8)(np.array([5, 28, 0]), np.array([5, 28, 0]), np.ones(3))
    assert features.shape == (2, 3)
    assert features[0].tolist() == [5, 34, 1]
    assert features[1].tolist() == [15, 2 * 13 * 14 / 2 + 13 * 3 + 8 * 9 / 2 + 8 * 6, 1]
