-- Takes a worker's name, or renews it; refuses while another start of that name holds it.
-- KEYS: 1 info
-- ARGV: 1 incarnation, 2 time to live ms, 3 incarnation that is known to be dead ('' for none), 4.. field pairs
-- Returns: {HELD, now ms} or {TAKEN, incarnation of the holder}
-- include: time
-- include: types
-- include: memory
local wrong = wrong_type({ 'hash' })
if wrong then return wrong end
local holder = redis.call('HGET', KEYS[1], 'incarnation')
if holder and holder ~= ARGV[1] then
  if holder ~= ARGV[3] then return { 'TAKEN', holder } end
  redis.call('DEL', KEYS[1])
end
despite_full_memory(KEYS[1])
local now = digits(now_ms())
redis.call('HSET', KEYS[1], 'incarnation', ARGV[1], 'last_seen_ms', now, unpack(ARGV, 4))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return { 'HELD', now }
