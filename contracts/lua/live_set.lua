-- Adds a session to, or takes it from, the set that a new owner of the partition adopts at once.
-- KEYS: 1 lease, 2 live
-- ARGV: 1 epoch, 2 session id, 3 live (1|0)
-- Returns: {DONE} or {FENCED, epoch}
-- include: types
-- include: memory
local wrong = wrong_type({ 'hash', 'set' })
if wrong then return wrong end
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch or tonumber(epoch) ~= tonumber(ARGV[1]) then return { 'FENCED', epoch or '' } end
despite_full_memory(KEYS[1])
redis.call(ARGV[3] == '1' and 'SADD' or 'SREM', KEYS[2], ARGV[2])
return { 'DONE' }
