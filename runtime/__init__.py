"""Everything outside the graph: sharded tables, exchanges, agreement between ranks."""
