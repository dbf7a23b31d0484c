"""Control plane: sessions, hosts, clients and tools, on asyncio. Never imports torch."""
