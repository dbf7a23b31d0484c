"""DreamZero: a world-action model. It imagines the next frames of a robot's cameras and the actions that lead there.

Read `config.py` (what it is), `unipc.py` (the steps of an observation), `transformer.py` and `blocks.py` (the model),
`registers.py` (actions and states as tokens), `passes.py` (one forward over a session's pages).
"""
