"""Models that run on the runner, one package each."""
