"""What a simulated run trains: data sets by name (`data`) and networks by name (`networks`).

Importing this package loads no torch; its modules do.
"""
