-- Writes where a session was placed, at chunk 0, where it has nothing to lose.
-- KEYS: 1 state
-- ARGV: 1 epoch, 2 worker
-- Returns: {PLACED} or a refusal
-- include: owner
local refusal = refuse(KEYS[1], ARGV[1])
if refusal then return refusal end
redis.call('HSET', KEYS[1], 'worker', ARGV[2])
redis.call('HDEL', KEYS[1], 'worker_incarnation')
return { 'PLACED' }
