-- What a worker has in hand: the oldest request that was delivered to it and not acknowledged, and since when it is busy.
-- KEYS: 1 info, 2 requests
-- ARGV: 1 group, 2 consumer
-- Returns: {IDLE, now ms, incarnation that holds the name ('' for none)}, or {BUSY, the same two, entry id, busy since ms
--          ('' where that is not marked)}
-- include: time
-- include: types
local wrong = wrong_type({ 'hash', 'stream' })
if wrong then return wrong end
local info = redis.call('HMGET', KEYS[1], 'incarnation', 'busy_since')
local now, holder = digits(now_ms()), info[1] or ''
-- Without stream or group nothing was delivered.
local pending = redis.pcall('XPENDING', KEYS[2], ARGV[1], '-', '+', 1, ARGV[2])
if pending.err or #pending == 0 then return { 'IDLE', now, holder } end
return { 'BUSY', now, holder, pending[1][1], info[2] or '' }
