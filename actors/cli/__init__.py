"""The command line: `worldline`. One module a group of commands."""
