"""Measurements beside PgBouncer: both in one run on one machine, because only their ratio means anything."""
