"""Advice: profile a script and its links, evaluate candidates, and explain the choice."""
