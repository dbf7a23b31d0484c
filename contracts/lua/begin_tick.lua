-- Phase one of a chunk: records the tick as in flight and sends it to the worker.
-- Writes nothing if entries came that the snapshot has not seen: in mode `strict` any of them, in mode `floor` those
-- whose id lies below the new floor, because committing would make them stale although they were accepted.
-- KEYS: 1 state, 2 events, 3 ids, 4 answers, 5 answered, 6 requests (none on a cluster)
-- ARGV: 1 epoch, 2 command id, 3 in-flight record, 4 fence, 5 last entry id seen, 6 mode, 7 batch, 8 queue limit ms,
--       9.. field pairs of the worker request
-- Returns: {BEGUN, now ms}, {NEWER, entries}, {ANSWERED}, {STATUS, status}, {BUSY},
--          {STALE} (a fence that was used: the call comes late) or a refusal
-- include: time
-- include: types
-- include: owner
-- include: answers
-- include: entries
-- include: send
local wrong = wrong_type({ 'hash', 'stream', 'zset', 'stream', 'hash', 'stream' })
if wrong then return wrong end
local refusal = refuse(KEYS[1], ARGV[1])
if refusal then return refusal end
if answered_before(KEYS[4], KEYS[5], ARGV[2]) then return { 'ANSWERED' } end
local state = redis.call('HMGET', KEYS[1], 'status', 'inflight', 'event_floor', 'fence')
if state[1] ~= 'ACTIVE' then return { 'STATUS', state[1] } end
if state[2] then return { 'BUSY' } end
if tonumber(ARGV[4]) <= tonumber(state[4]) then return { 'STALE' } end
local record = cjson.decode(ARGV[3])
local taken = {}
for _, id in ipairs(record['event_ids']) do taken[#taken + 1] = digits(id) end
local newer = redis.call('XRANGE', KEYS[2], '(' .. ARGV[5], '+', 'COUNT', ARGV[7])
if #newer > 0 then
  -- A full batch may hide more; a tick without events makes nothing stale, so no flood can keep it from beginning.
  local hidden = #newer == tonumber(ARGV[7]) and #taken > 0
  if ARGV[6] == 'strict' or hidden then return { 'NEWER', newer } end
  local floor = tonumber(state[3])
  local new_floor = #taken > 0 and tonumber(taken[#taken]) or floor
  local seen = {}
  for _, id in ipairs(taken) do seen[id] = true end
  for _, entry in ipairs(newer) do
    local id = event_id_of(entry[2])
    if id and id > floor and id <= new_floor and not seen[digits(id)] then return { 'NEWER', newer } end
  end
end
local now = now_ms()
register(KEYS[3], taken)
redis.call('HSET', KEYS[1], 'inflight', ARGV[3], 'fence', ARGV[4], 'updated_at_ms', digits(now))
send(KEYS[6], 9, now + tonumber(ARGV[8]))
return { 'BEGUN', digits(now) }
