-- Deletes inbox entries whose outcome is durable.
-- KEYS: 1 lease, 2 inbox, 3 attempts
-- ARGV: 1 epoch, 2.. entry ids
-- Returns: {DONE, how many} or {FENCED, epoch}
-- include: types
local wrong = wrong_type({ 'hash', 'stream', 'hash' })
if wrong then return wrong end
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch or tonumber(epoch) ~= tonumber(ARGV[1]) then return { 'FENCED', epoch or '' } end
if #ARGV < 2 then return { 'DONE', 0 } end
local count = redis.call('XDEL', KEYS[2], unpack(ARGV, 2))
redis.call('HDEL', KEYS[3], unpack(ARGV, 2))
return { 'DONE', count }
