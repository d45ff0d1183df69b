"""Profile a script and its links, evaluate candidate policies, and explain the choice."""
