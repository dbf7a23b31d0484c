"""One worker on several devices of one machine: a process a device, which share every sequence (Ulysses).

Read `ulysses.py` (what crosses ranks inside a forward), `ranks.py` (how ranks agree) and `engine.py` (rank 0 leads, the
others follow). `modes.py` refuses every other kind of parallelism.
"""
