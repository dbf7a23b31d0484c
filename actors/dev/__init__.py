"""A whole worldline on one machine: an embedded broker, a host, a worker and a janitor as child processes."""
