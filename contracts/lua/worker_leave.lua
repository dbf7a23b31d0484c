-- Removes a worker's info at its orderly end, unless another start has taken the name.
-- KEYS: 1 info
-- ARGV: 1 incarnation
-- Returns: {LEFT} or {KEPT}
-- include: types
local wrong = wrong_type({ 'hash' })
if wrong then return wrong end
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then return { 'KEPT' } end
redis.call('DEL', KEYS[1])
return { 'LEFT' }
