"""What must hold on the broker at any moment, check by check; `actors/fsck.py` runs them over live keys."""
