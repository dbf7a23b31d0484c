"""Paged attention KV of resident sessions: pool, tables, cache, cross-attention, attention, state."""
