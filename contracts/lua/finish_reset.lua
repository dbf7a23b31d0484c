-- The worker has reset: chunk 0, a new life, an empty queue, and the floor above every id that was dropped.
-- KEYS: 1 state, 2 events, 3 ids, 4 rejected, 5 answers, 6 answered, 7 history
-- ARGV: 1 epoch, 2 request id, 3 incarnation, 4 answer up to the floor, 5 cap of answers, 6 cap of history,
--       7 cap of rejected, 8 who
-- Returns: {RESET, floor, now ms}, {DUP}, {STALE} or a refusal
-- include: time
-- include: types
-- include: memory
-- include: owner
-- include: answers
-- include: history
-- include: entries
-- include: drop_events
local wrong = wrong_type({ 'hash', 'stream', 'zset', 'stream', 'stream', 'hash', 'stream' })
if wrong then return wrong end
local refusal = refuse(KEYS[1], ARGV[1])
if refusal then return refusal end
despite_full_memory(KEYS[1])
local state = redis.call('HMGET', KEYS[1], 'inflight', 'life', 'event_floor', 'status')
local flying = state[1] and cjson.decode(state[1])
if not flying or flying['request_id'] ~= ARGV[2] or flying['kind'] ~= 'reset' then
  if state[2] == ARGV[2] then return { 'DUP' } end
  return { 'STALE' }
end
local now, floor, totals = now_ms(), tonumber(state[3]), read_totals(KEYS[1])
if not floor then return redis.error_reply('ERR the state lacks event_floor') end
local newest = drop_events(KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[7], 'reset', totals)
if newest then floor = math.max(floor, newest) end
redis.call('HSET', KEYS[1], 'status', 'ACTIVE', 'life', ARGV[2], 'chunk_index', '0', 'event_floor', digits(floor),
  'controls', '[]', 'updated_at_ms', digits(now))
redis.call('HDEL', KEYS[1], 'inflight', 'prompt', 'reducer_state', 'last_request_id', 'failure_code',
  'failure_message', 'cleanup_error', 'worker_incarnation')
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'worker_incarnation', ARGV[3]) end
record(KEYS[7], ARGV[6], now, 'reset_succeeded', state[4], 'ACTIVE', ARGV[8], '')
if flying['command_id'] ~= cjson.null then
  end_command(KEYS[5], KEYS[6], flying['command_id'], ARGV[4] .. digits(floor) .. '}}', ARGV[5])
end
return { 'RESET', digits(floor), digits(now) }
