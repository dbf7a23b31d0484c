"""What crosses a process: identities, events, ticks, messages, keys, scripts. Never imports torch."""
