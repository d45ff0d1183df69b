"""The workloads of simulated runs: data sets by name (`data`) and networks by name (`networks`).

Importing this package does not import torch; importing its modules does.
"""
