"""Assign tests to pytest-xdist workers, and order them.

(Groups of `--dist loadgroup` are a suffix of the node ID, which pytest 9.2 drops: every worker then recreates the
group's fixtures. So groups are derived from the node ID itself.)
"""

from __future__ import annotations

# Tests of a file that share an expensive fixture, or that create network interfaces: run serially in one worker.
ONE_WORKER = {
    "test_batch_balancer.py": "balancer",
    "test_bucket_gradients.py": "bucket gradients",
    "test_compress_exchange.py": "compress exchange",
    # these compile in pytest's own process, where the first compilation takes ten seconds
    "test_custom_ops.py": "compiled here",
    "test_driver.py": "compiled here",
    "test_find_exchanges.py": "compiled here",
    "test_gather_parts.py": "compiled here",
    "test_dense_gradients.py": "dense gradients",
    "test_doctor.py": "doctor",
    "test_graphs.py": "graphs",
    "test_left_to_torchrec.py": "left to torchrec",
    "test_loader_state.py": "loader state",
    "test_lookahead.py": "lookahead",
    "test_lookahead_loop.py": "lookahead loop",
    "test_lookahead_random.py": "random",
    "test_malformed_kjt.py": "malformed",
    "test_meter.py": "meter",
    "test_netlab.py": "network",
    "test_overlap_attention.py": "overlap",
    "test_packaging.py": "packaging",
    "test_pooled.py": "pooled",
    "test_real_records.py": "records",
    "test_recording.py": "recording",
    "test_study.py": "study",
    "test_torchrec_collection.py": "torchrec collection",
    "test_torchrec_sizes.py": "torchrec sizes",
    "test_two_hosts.py": "network",
    "test_without_overlap.py": "without overlap",
    "test_written_tables.py": "written tables",
}
# Slow tests first, so that none is left for one worker at the end.
LONG = (
    "test_lookahead.py",
    "test_lookahead_loop.py",
    "test_torchrec_collection.py",
    "test_dense_gradients.py",
    "test_zoo.py",
    "test_neighbours.py",
    "test_attach.py",
    "test_lookahead_random.py",
    "test_written_tables.py",
    "test_malformed_kjt.py",
    "test_pooled.py",
    "test_batch_balancer.py",
    "test_custom_ops.py",
    "test_driver.py",
    "test_find_exchanges.py",
    "test_gather_parts.py",
    "test_overlap_attention.py",
    "test_compress_exchange.py",
    "test_graphs.py",
    "test_sizes_of_features.py",
    "test_split_by_consumer.py",
    "test_sharded_embedding.py",
    "test_table_types.py",
    "test_lookup_twice.py",
    "test_inference_mode.py",
    "test_caches.py",
    "test_unused_table.py",
)
# Tests that wait for Triton's interpreter (interpreted.py) run last.
LAST = (
    "test_compression_kernels.py",
    "test_hstu_attention.py",
    "test_hstu_benchmark.py",
    "test_large_tables.py",
    "test_persrec_attention.py",
    "test_rounding.py",
    "test_row_kernels.py",
    "test_sample_packing.py",
)


def file_of(nodeid: str) -> str:
    return nodeid.split("::")[0].rsplit("/", 1)[-1]


def place_of(nodeid: str) -> int:
    """Sort key of a test; the sort is stable."""
    name = file_of(nodeid)
    return LONG.index(name) if name in LONG else len(LONG) + (name in LAST)


def scheduler(config, log):
    """A pytest-xdist scheduler: groups in the order of their first tests."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return ONE_WORKER.get(file_of(nodeid), nodeid)

    config.option.loadscopereorder = False  # else sorted by number of tests
    return Scheduling(config, log)
