"""Shared by the papers: requests, runs, rows, plots and reports."""
