"""LingBot World v2: a causal diffusion transformer that walks through a world, from key press to latents.

Read `config.py` and `spec.py` (what it is, what it costs), `sampler.py` (the steps of a chunk), `transformer.py` and
`blocks.py` (the model), `actions.py` and `camera.py` (keys and trajectories to camera rays).
"""
