-- Says that a worker begins a request, and since when; refuses one that does not hold its name any more.
-- KEYS: 1 info, 2 requests (optional: then only if the worker has a request in hand)
-- ARGV: 1 incarnation, 2 group, 3 consumer
-- Returns: {BUSY, now ms}, {IDLE} or {TAKEN}
-- include: time
-- include: types
-- include: memory
local wrong = wrong_type({ 'hash', 'stream' })
if wrong then return wrong end
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then return { 'TAKEN' } end
if KEYS[2] and #redis.call('XPENDING', KEYS[2], ARGV[2], '-', '+', 1, ARGV[3]) == 0 then return { 'IDLE' } end
despite_full_memory(KEYS[1])
local now = digits(now_ms())
redis.call('HSET', KEYS[1], 'busy_since', now)
return { 'BUSY', now }
