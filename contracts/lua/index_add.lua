-- Enters a member into an index, also on a broker that is out of memory, so that sessions can end there.
-- KEYS: 1 index (sorted set)
-- ARGV: 1 member, 2 score
-- Returns: {ADDED}
-- include: types
local wrong = wrong_type({ 'zset' })
if wrong then return wrong end
-- Changes nothing; but once a script has written, the broker lets it write on.
redis.call('ZREM', KEYS[1], '')
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
return { 'ADDED' }
