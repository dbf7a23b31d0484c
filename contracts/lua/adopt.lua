-- Takes a session over: the caller's epoch becomes its owner and older deliveries to the worker become void.
-- KEYS: 1 state
-- ARGV: 1 epoch
-- Returns: {ADOPTED, state as a flat list}, {NONE} or {FENCED, epoch}
-- include: time
-- include: types
-- include: memory
local wrong = wrong_type({ 'hash' })
if wrong then return wrong end
local stored = redis.call('HMGET', KEYS[1], 'epoch', 'fence')
if not stored[1] then return { 'NONE' } end
if tonumber(stored[1]) > tonumber(ARGV[1]) then return { 'FENCED', stored[1] } end
despite_full_memory(KEYS[1])
local fence = math.max(tonumber(stored[2]) + 1, now_us())
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'fence', digits(fence))
return { 'ADOPTED', redis.call('HGETALL', KEYS[1]) }
