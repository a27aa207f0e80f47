"""ShardedEmbeddingCollection: the same training as with a table for each feature, with one exchange."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks

TABLES = {"item": 40, "user": 9, "shop": 17}
FEATURES = {"item": "item", "user": "user", "shop": "shop", "shop seen": "shop"}
SHARDING = {"item": "row_wise", "user": "table_wise", "shop": "table_wise"}


class Apart(torch.nn.Module):
    """A table by itself for each."""

    def __init__(self, optimizer, dtype):
        super().__init__()
        import freescale

        self.tables = torch.nn.ModuleDict()
        owners = {"item": 0, "user": 0, "shop": 1 % dist.get_world_size()}
        for name, rows in TABLES.items():
            self.tables[name] = freescale.ShardedEmbedding(
                rows, 4, name=name, optimizer=optimizer, lr=0.5, sharding=SHARDING[name], owner=owners[name], dtype=dtype
            )
        self.out = torch.nn.Linear(4, 1, dtype=dtype)

    def look_up(self, batch):
        # Both features of a table in one look-up: it is updated once in a step, by the sum.
        both = self.tables["shop"](torch.cat([batch["shop"], batch["shop seen"]]))
        return [self.tables["item"](batch["item"]), self.tables["user"](batch["user"]), both]

    def forward(self, batch):
        return self.out(torch.cat(self.look_up(batch))).square().sum()


class Together(Apart):
    def __init__(self, optimizer, dtype):
        torch.nn.Module.__init__(self)
        import freescale

        self.tables = freescale.ShardedEmbeddingCollection(
            TABLES, 4, features=FEATURES, optimizer=optimizer, lr=0.5, sharding=SHARDING, dtype=dtype
        )
        self.out = torch.nn.Linear(4, 1, dtype=dtype)

    def look_up(self, batch):
        return list(self.tables(batch).values())


def _batch(step, rank, least=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {
        feature: torch.randint(0, TABLES[table], (int(torch.randint(least, 12, (), generator=generator)),), generator=generator)
        for feature, table in FEATURES.items()
    }


def _train(model_class, optimizer, look_ahead, compiled=True, least=0):
    import freescale

    torch.manual_seed(1)
    model = model_class(optimizer, torch.float64)
    if compiled:
        model.compile(backend="freescale", options={"codegen": "eager"}, fullgraph=True)
    batches = [_batch(step, dist.get_rank(), least) for step in range(5)]
    losses = []
    if look_ahead:
        loader = freescale.LookaheadLoader(batches, model)
        for batch in loader:
            loss = model(batch)
            loss.backward()
            losses.append(loss.item())
    else:
        for batch in batches:
            loss = model(batch)
            loss.backward()
            losses.append(loss.item())
    torch.distributed.barrier()
    return losses, model


def _same_training(optimizer, ways=(True, False), compiled=True, least=0):
    """`ways`: with look-ahead, without. `compiled`: the tables apart, too. `least`: ids of a feature; each that has none
    or one is a graph of its own."""
    from freescale.runtime.lookahead.hooks import exchanges_of

    expected, apart = _train(Apart, optimizer, False, compiled, least)
    for look_ahead in ways:
        losses, together = _train(Together, optimizer, look_ahead, least=least)
        assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-12), (losses, expected)
        assert (len(exchanges_of(apart)), len(exchanges_of(together))) == (3, 1)
        together.state_dict()  # pending gradients are applied
        for name in TABLES:
            assert torch.allclose(together.tables.local_rows(name), apart.tables[name].weight, rtol=0, atol=1e-12)
        if look_ahead:
            with_look_ahead = losses
    return losses == with_look_ahead


def test_the_same_training_as_with_tables_apart_that_are_not_compiled():
    assert run_ranks(_same_training, 2, "rowwise_adagrad", (True,), False, 2) == [True, True]


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ("sgd", "rowwise_adagrad"))
def test_the_same_training_as_with_tables_apart(optimizer):
    assert run_ranks(_same_training, 2, optimizer) == [True, True]


def _sentences():
    import freescale

    sentences = []

    def refused(*args, **kwargs):
        with pytest.raises((ValueError, KeyError)) as error:
            freescale.ShardedEmbeddingCollection(*args, **kwargs)
        sentences.append(str(error.value))

    refused({}, 4)
    refused({"a": 3}, 4, features={"x": "b"})
    refused({"a": 3, "b": 2}, 4, features={"x": "b"})
    refused({"a": 3, "b": 2}, 4, sharding={"a": "row_wise"})
    refused({"a": 3, "b": 0}, 4)
    refused({"a": 3}, 4, sharding="column_wise")
    collection = freescale.ShardedEmbeddingCollection({"a": 3}, 4)
    with pytest.raises(KeyError) as error:
        collection({"b": torch.tensor([0])})
    sentences.append(str(error.value))
    with pytest.raises((IndexError, RuntimeError, ValueError)) as error:
        collection({"a": torch.tensor([3])})
    sentences.append(str(error.value))
    return sentences


def test_what_is_wrong_is_named():
    (sentences,) = run_ranks(_sentences, 1)
    expected = (
        "has no tables", "no table 'b'", "no feature .* table 'a'", "no entry for table 'b'", "'b' is empty",
        "row_wise or table_wise, found 'column_wise'", "feature 'a', which is missing", "table 'a', which has 3 rows",
    )  # fmt: skip
    for sentence, pattern in zip(sentences, expected, strict=True):
        assert re.search(pattern, sentence), (pattern, sentence)
