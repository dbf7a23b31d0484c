-- Phase two of a chunk: moves what is in flight into place, publishes the chunk and ends the command.
-- KEYS: 1 state, 2 events, 3 ids, 4 chunks, 5 ticks, 6 answers, 7 answered
-- ARGV: 1 epoch, 2 request id, 3 incarnation, 4 ms at which the oldest applied event was accepted ('' for none),
--       5 answer up to the values that only this script knows, 6 cap of answers, 7 cap of chunks,
--       8 ticks to keep (-1: all), 9 last entry id seen, 10 batch, 11.. field pairs of the chunk
-- Returns: {COMMITTED, now ms, accepted to applied ms ('' for none), newer entries}, {DUP}, {STALE} or a refusal
-- include: time
-- include: types
-- include: memory
-- include: owner
-- include: answers
-- include: entries
local wrong = wrong_type({ 'hash', 'stream', 'zset', 'stream', 'stream', 'stream', 'hash' })
if wrong then return wrong end
local refusal = refuse(KEYS[1], ARGV[1])
if refusal then return refusal end
despite_full_memory(KEYS[1])
local state = redis.call('HMGET', KEYS[1], 'inflight', 'last_request_id', 'chunk_index', 'event_floor', 'max_pending_events')
local record = state[1] and cjson.decode(state[1])
if not record or record['request_id'] ~= ARGV[2] or record['kind'] ~= 'tick' then
  if state[2] == ARGV[2] then return { 'DUP' } end
  return { 'STALE' }
end
local now = now_ms()
local applied = record['event_ids']
local floor = #applied > 0 and applied[#applied] or tonumber(state[4])
local next_index, limit = digits(tonumber(state[3]) + 1), tonumber(state[5])
if not (floor and limit) then return redis.error_reply('ERR the state lacks event_floor or max_pending_events') end
local present = { 'event_floor', digits(floor), 'chunk_index', next_index, 'last_request_id', ARGV[2],
  'worker_incarnation', ARGV[3], 'updated_at_ms', digits(now) }
local absent = { 'inflight' }
for _, field in ipairs({ 'prompt', 'controls', 'reducer_state' }) do
  local value = record[field]
  if value == nil or value == cjson.null then absent[#absent + 1] = field
  else
    present[#present + 1] = field
    present[#present + 1] = value
  end
end
redis.call('HSET', KEYS[1], unpack(present))
redis.call('HDEL', KEYS[1], unpack(absent))
for _, entry in ipairs(record['entries']) do redis.call('XDEL', KEYS[2], entry) end

-- Recent ids at or below the floor are kept, at most as many as events may be pending.
local total = redis.call('ZCARD', KEYS[3])
if total > limit then
  local above = {}
  local excess = total - limit
  for _, entry in ipairs(redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', limit)) do
    local id = event_id_of(entry[2])
    if id and id > floor and not above[id] and redis.call('ZSCORE', KEYS[3], digits(id)) then
      above[id] = true
      excess = excess - 1
    end
  end
  if excess > 0 then
    for _, member in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
      if excess > 0 and tonumber(member) <= floor then
        redis.call('ZREM', KEYS[3], member)
        excess = excess - 1
      end
    end
  end
end

local waited = ARGV[4] ~= '' and digits(math.max(0, now - tonumber(ARGV[4]))) or ''
local chunk = { unpack(ARGV, 11) }
chunk[#chunk + 1] = 'committed_at_ms'
chunk[#chunk + 1] = digits(now)
if ARGV[8] ~= '0' then
  local tick = { 'prompt', record['prompt'], 'controls', record['controls'] }
  if record['prompt'] == cjson.null then tick = { 'controls', record['controls'] } end
  for _, value in ipairs(chunk) do tick[#tick + 1] = value end
  if ARGV[8] == '-1' then redis.call('XADD', KEYS[5], '*', unpack(tick))
  else redis.call('XADD', KEYS[5], 'MAXLEN', '=', ARGV[8], '*', unpack(tick)) end
end
if waited ~= '' then
  chunk[#chunk + 1] = 'accepted_to_applied_ms'
  chunk[#chunk + 1] = waited
end
redis.call('XADD', KEYS[4], 'MAXLEN', '=', ARGV[7], '*', unpack(chunk))
if record['command_id'] ~= cjson.null then
  local tail = '"accepted_to_applied_ms":' .. (waited == '' and 'null' or waited) .. ',"committed_at_ms":' .. digits(now)
  end_command(KEYS[6], KEYS[7], record['command_id'], ARGV[5] .. tail .. '}}', ARGV[6])
end
return { 'COMMITTED', digits(now), waited, redis.call('XRANGE', KEYS[2], '(' .. ARGV[9], '+', 'COUNT', ARGV[10]) }
