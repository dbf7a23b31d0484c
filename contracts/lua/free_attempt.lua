-- Counts that a claim begins the free running of a session anew: once a claim, and from nothing for another chunk.
-- A broker that is out of memory refuses it, as it would the tick: what can not begin is not counted.
-- KEYS: 1 state
-- ARGV: 1 epoch
-- Returns: {COUNTED, attempts} or a refusal
-- include: types
-- include: owner
local wrong = wrong_type({ 'hash' })
if wrong then return wrong end
local refusal = refuse(KEYS[1], ARGV[1])
if refusal then return refusal end
local state = redis.call('HMGET', KEYS[1], 'chunk_index', 'life', 'free_attempts')
local chunk = (state[1] or '') .. '@' .. (state[2] or '')
local count, epoch, counted = string.match(state[3] or '', '^(%d+)@(%d+)@(.*)$')
if counted ~= chunk then count, epoch = 0, '' end
if epoch == ARGV[1] then return { 'COUNTED', tonumber(count) } end
count = tonumber(count) + 1
redis.call('HSET', KEYS[1], 'free_attempts', count .. '@' .. ARGV[1] .. '@' .. chunk)
return { 'COUNTED', count }
