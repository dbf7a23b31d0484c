"""The reference world: a small causal transformer with seeded, untrained weights.

It is the example for bringing a model of your own, and it needs no download. Read `spec.py` (what it costs), then
`pipeline.py` (the seam to the runner), `sampler.py` (the steps of a chunk), `transformer.py`, and the small ones.
"""
