"""Watching a run: trace events, the ledger that writes them, summaries and plots."""
