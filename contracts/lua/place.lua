-- Writes where a session was placed, at chunk 0, where it has nothing to lose.
-- KEYS: 1 state
-- ARGV: 1 epoch, 2 worker
-- Returns: {PLACED} or a refusal
-- include: types
-- include: memory
-- include: owner
local wrong = wrong_type({ 'hash' })
if wrong then return wrong end
local refusal = refuse(KEYS[1], ARGV[1])
if refusal then return refusal end
despite_full_memory(KEYS[1])
redis.call('HSET', KEYS[1], 'worker', ARGV[2])
redis.call('HDEL', KEYS[1], 'worker_incarnation')
return { 'PLACED' }
