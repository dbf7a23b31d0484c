"""DreamZero: a world-action model. It imagines the next frames of a robot's cameras and the actions that lead there.

Read `config.py` (what it is), `unipc.py` (the steps of an observation), `transformer.py` and `blocks.py` (the model),
`registers.py` (actions and states as tokens), `passes.py` (one forward over a session's pages); then `rollout.py` (the
steps of an answer), `policy.py` and `pipeline.py` (from a tick to actions), `deployment.py` (which robot it is), `spec.py` (what
a session costs), `world.py` and `stream.py` (what is kept of it).
"""
