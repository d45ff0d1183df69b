"""RLP: ICLR 2020."""
