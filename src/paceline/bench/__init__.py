"""What the real thing costs, measured against something simpler in the same run."""
