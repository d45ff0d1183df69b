"""Reproductions of the papers' tables and figures: one folder per paper, and `shared` for what they have in common.

Each table or figure is a function that returns rows with the paper's value beside ours.
"""
