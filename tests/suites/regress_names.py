"""PostgreSQL's regression tests, each a file of SQL, by what of theirs cannot last beyond a transaction.

`session_state: pin` keeps a client's session for all of that but the last four: with it the others pass.
"""

from __future__ import annotations

from typing import Final

TEMPORARY: Final = (
    "aggregates", "alter_table", "amutils", "arrays", "box", "btree_index", "char", "cluster", "collate",
    "collate.icu.utf8", "combocid", "copy", "copy2", "create_function_sql", "create_index",
    "create_index_spgist", "create_table", "create_type", "create_view", "domain", "equivclass",
    "event_trigger", "explain", "float8", "foreign_data", "foreign_key", "functional_deps", "gin",
    "groupingsets", "hash_index", "indexing", "inherit", "interval", "join", "json", "jsonb", "limit",
    "maintain_every", "misc", "numerology", "partition_join", "partition_prune", "plancache", "plpgsql",
    "point", "polygon", "polymorphism", "portals", "privileges", "psql", "publication", "rangefuncs",
    "reloptions", "returning", "rowtypes", "rules", "select", "select_distinct", "stats_ext", "strings",
    "subselect", "tablespace", "timestamptz", "transactions", "tsearch", "tuplesort", "txid", "union",
    "vacuum", "varchar", "window", "with", "xid",
)
PREPARE: Final = ("prepare", "rowsecurity", "select_into", "select_views", "updatable_views", "xml")
HELD: Final = ("xmlmap",)
LOCKS: Final = ("advisory_lock",)

USED_BEFORE: Final = ("guc", "stats", "temp")
SEQUENCES: Final = ("constraints", "sequence")
IN_C: Final = ("triggers",)
COUNTS: Final = ("stats",)
