-- Counts that a claim found this entry unfinished: once a claim, however often it is called.
-- KEYS: 1 lease, 2 attempts
-- ARGV: 1 epoch, 2 entry id
-- Returns: {COUNTED, attempts} or {FENCED, epoch}
-- include: types
-- include: memory
local wrong = wrong_type({ 'hash', 'hash' })
if wrong then return wrong end
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch or tonumber(epoch) ~= tonumber(ARGV[1]) then return { 'FENCED', epoch or '' } end
local count, counted = string.match(redis.call('HGET', KEYS[2], ARGV[2]) or '', '^(%d+)@(%d+)$')
if counted == epoch then return { 'COUNTED', tonumber(count) } end
count = (tonumber(count) or 0) + 1
despite_full_memory(KEYS[1])
redis.call('HSET', KEYS[2], ARGV[2], count .. '@' .. epoch)
return { 'COUNTED', count }
