"""A whole worldline on one machine: an embedded broker, a host and a worker as child processes."""
