-- Says that a worker begins a request, and since when; refuses one that does not hold its name any more.
-- KEYS: 1 info
-- ARGV: 1 incarnation
-- Returns: {BUSY, now ms} or {TAKEN}
-- include: time
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then return { 'TAKEN' } end
local now = digits(now_ms())
redis.call('HSET', KEYS[1], 'busy_since', now)
return { 'BUSY', now }
