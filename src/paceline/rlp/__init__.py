"""The learned policy RLP: its state, its rules, the environment, and two learners."""
