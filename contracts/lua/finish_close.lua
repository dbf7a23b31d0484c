-- The worker has released: the session is CLOSED, its queue is reported as dropped, and its keys begin to expire.
-- KEYS: 1 state, 2 events, 3 ids, 4 rejected, 5 answers, 6 answered, 7 history, 8 chunks, 9 ticks
-- ARGV: 1 epoch, 2 request id, 3 answer, 4 cap of answers, 5 cap of history, 6 cap of rejected, 7 who, 8 retention ms
-- Returns: {CLOSED, now ms}, {STALE} or a refusal
-- include: time
-- include: types
-- include: memory
-- include: owner
-- include: answers
-- include: history
-- include: entries
-- include: drop_events
local wrong = wrong_type({ 'hash', 'stream', 'zset', 'stream', 'stream', 'hash', 'stream', 'stream', 'stream' })
if wrong then return wrong end
local refusal = refuse(KEYS[1], ARGV[1])
if refusal then return refusal end
despite_full_memory(KEYS[1])
local state = redis.call('HMGET', KEYS[1], 'status', 'inflight')
local flying = state[2] and cjson.decode(state[2])
if state[1] ~= 'CLOSING' or not flying or flying['request_id'] ~= ARGV[2] then return { 'STALE' } end
local now = now_ms()
drop_events(KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[6], 'closed', read_totals(KEYS[1]))
redis.call('HSET', KEYS[1], 'status', 'CLOSED', 'updated_at_ms', digits(now))
redis.call('HDEL', KEYS[1], 'inflight', 'cleanup_error', 'pace_ms')
record(KEYS[7], ARGV[5], now, 'cleanup_succeeded', 'CLOSING', 'CLOSED', ARGV[7], '')
if flying['command_id'] ~= cjson.null then
  end_command(KEYS[5], KEYS[6], flying['command_id'], ARGV[3], ARGV[4])
end
for i = 1, 9 do redis.call('PEXPIRE', KEYS[i], ARGV[8]) end
return { 'CLOSED', digits(now) }
