"""Whether a deployment can keep its promises: what `worldline doctor` looks at."""
