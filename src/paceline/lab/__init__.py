"""Hosts with real, shaped links on one machine, and the runs that are measured on them."""
