"""Sizes of TorchRec's features in a planned step are the plan's, which are on the host: nothing is read back for them."""

from __future__ import annotations

import re

import pytest

import trec
from ranks import run_ranks

pytest.importorskip("torchrec")


def _graphs_and_error():
    import freescale
    from freescale.passes.graph_text import graph_text

    texts = {}

    def keep(direction, name, graph):
        if name == "before":
            texts[direction] = graph_text(graph)

    model = trec.build("row_wise", "rowwise_adagrad", small=True)
    batches = [trec.batch(step, 0, samples=4) for step in range(3)]
    model.compile(backend="freescale", options={"codegen": "eager"})
    error = None
    freescale.observe(keep)
    for number, (features, weight) in enumerate(freescale.LookaheadLoader(batches, model)):
        if number == 2:
            features.lengths()[-1] += 1
        try:
            model(features, weight).backward()
        except RuntimeError as e:
            error = str(e)
            break
    return texts, error


def test_no_size_is_read_back():
    ((texts, error),) = run_ranks(_graphs_and_error, 1)
    assert "_local_scalar_dense(" not in texts["forward"] + texts["backward"]
    assert "lengths of a KeyedJaggedTensor miss its values" in error


def test_sizes_of_many_keys_are_no_longer_than_those_of_few():
    """What keys in a row have together is a difference of two sizes, and where all are joined again, one size."""
    ((texts, _),) = run_ranks(_graphs_and_error, 1)
    sizes = re.findall(r"float32\[([^,\]]*), 8\]", texts["forward"] + texts["backward"])
    assert len(sizes) > 10 and max(size.count("s") for size in sizes) <= 2
