-- Takes an entry out of an index, unless somebody has entered it anew since the caller looked.
-- KEYS: 1 index (sorted set)
-- ARGV: 1 member, 2 score that the caller saw
-- Returns: {DROPPED} or {KEPT}
-- include: types
local wrong = wrong_type({ 'zset' })
if wrong then return wrong end
local score = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not score or tonumber(score) ~= tonumber(ARGV[2]) then return { 'KEPT' } end
redis.call('ZREM', KEYS[1], ARGV[1])
return { 'DROPPED' }
