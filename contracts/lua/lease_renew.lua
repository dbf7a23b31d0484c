-- Renews a lease that has not run out; a late renewal is refused, because somebody may have claimed in between.
-- KEYS: 1 lease
-- ARGV: 1 owner, 2 epoch, 3 lease ms
-- Returns: {RENEWED, expires at ms} or {LOST}
-- include: time
-- include: types
-- include: memory
local wrong = wrong_type({ 'hash' })
if wrong then return wrong end
local held = redis.call('HMGET', KEYS[1], 'owner', 'epoch', 'expires_at_ms')
local now = now_ms()
if held[1] ~= ARGV[1] or tonumber(held[2]) ~= tonumber(ARGV[2]) or tonumber(held[3]) <= now then return { 'LOST' } end
despite_full_memory(KEYS[1])
local expires = digits(now + tonumber(ARGV[3]))
redis.call('HSET', KEYS[1], 'expires_at_ms', expires)
return { 'RENEWED', expires }
