-- Removes a worker's info at its orderly end, unless another start has taken the name.
-- KEYS: 1 info
-- ARGV: 1 incarnation
-- Returns: {LEFT} or {KEPT}
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then return { 'KEPT' } end
redis.call('DEL', KEYS[1])
return { 'LEFT' }
