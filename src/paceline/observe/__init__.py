"""Observing a run: trace events, observers, summaries, live views, exporters and plots."""
