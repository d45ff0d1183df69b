"""Hosts with real, shaped links on one machine, and runs that are measured on them."""
