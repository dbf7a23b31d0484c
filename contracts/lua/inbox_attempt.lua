-- Counts that a claim found this entry unfinished.
-- KEYS: 1 lease, 2 attempts
-- ARGV: 1 epoch, 2 entry id
-- Returns: {COUNTED, attempts} or {FENCED, epoch}
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch or tonumber(epoch) ~= tonumber(ARGV[1]) then return { 'FENCED', epoch or '' } end
return { 'COUNTED', redis.call('HINCRBY', KEYS[2], ARGV[2], 1) }
