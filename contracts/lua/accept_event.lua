-- Receives one event: checks it and adds it to the session's queue.
-- KEYS: 1 state, 2 events, 3 ids
-- ARGV: 1 event id, 2.. field pairs of the entry
-- Returns: {ACCEPTED|DUPLICATE, pending}, {STALE, floor}, {QUEUE_FULL, limit}, {NOT_ACTIVE, status} or {NONE}
-- include: time
-- include: types
-- include: entries
local wrong = wrong_type({ 'hash', 'stream', 'zset' })
if wrong then return wrong end
local state = redis.call('HMGET', KEYS[1], 'status', 'event_floor', 'inflight', 'max_pending_events')
if not state[1] then return { 'NONE' } end
if state[1] ~= 'ACTIVE' then return { 'NOT_ACTIVE', state[1] } end
local id, limit = tonumber(ARGV[1]), tonumber(state[4])
local pending = redis.call('XLEN', KEYS[2])
if redis.call('ZSCORE', KEYS[3], ARGV[1]) then return { 'DUPLICATE', pending } end
local floor = tonumber(state[2])
if state[3] then
  local flying = cjson.decode(state[3])['event_ids']
  if #flying > 0 then floor = math.max(floor, flying[#flying]) end
end
if id <= floor then return { 'STALE', digits(floor) } end
-- Bare entries that no host has read yet are pending as well.
for _, entry in ipairs(redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', limit)) do
  if raw_event_id(entry[2]) == ARGV[1] then return { 'DUPLICATE', pending } end
end
if pending >= limit then return { 'QUEUE_FULL', state[4] } end
redis.call('XADD', KEYS[2], '*', unpack(ARGV, 2))
register(KEYS[3], { ARGV[1] })
return { 'ACCEPTED', pending + 1 }
