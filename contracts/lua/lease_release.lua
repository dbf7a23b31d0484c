-- Hands a partition over: the lease runs out now, its epoch stays.
-- KEYS: 1 lease
-- ARGV: 1 owner, 2 epoch
-- Returns: {RELEASED} or {LOST}
-- include: types
-- include: memory
local wrong = wrong_type({ 'hash' })
if wrong then return wrong end
local held = redis.call('HMGET', KEYS[1], 'owner', 'epoch')
if held[1] ~= ARGV[1] or tonumber(held[2]) ~= tonumber(ARGV[2]) then return { 'LOST' } end
despite_full_memory(KEYS[1])
redis.call('HSET', KEYS[1], 'expires_at_ms', '0')
return { 'RELEASED' }
