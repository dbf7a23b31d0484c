-- Makes a session FAILED, ends the waiting command with the error, and puts a release in flight where one is due.
-- KEYS: 1 state, 2 answers, 3 answered, 4 history, 5 requests (none on a cluster, or where nothing is sent)
-- ARGV: 1 epoch, 2 request id in flight ('' for none), 3 life, 4 trigger, 5 allowed statuses (comma separated),
--       6 failure code, 7 message, 8 release in-flight record ('' for none), 9 fence, 10 command id, 11 answer,
--       12 cap of answers, 13 cap of history, 14 who, 15.. field pairs of the release request
-- Returns: {FAILED, now ms}, {STATUS, status}, {STALE} or a refusal
-- include: time
-- include: types
-- include: memory
-- include: owner
-- include: answers
-- include: history
-- include: send
local wrong = wrong_type({ 'hash', 'stream', 'hash', 'stream', 'stream' })
if wrong then return wrong end
local refusal = refuse(KEYS[1], ARGV[1])
if refusal then return refusal end
despite_full_memory(KEYS[1])
local state = redis.call('HMGET', KEYS[1], 'status', 'inflight', 'life', 'fence')
if not string.find(',' .. ARGV[5] .. ',', ',' .. state[1] .. ',', 1, true) then return { 'STATUS', state[1] } end
local flying = state[2] and cjson.decode(state[2])['request_id'] or ''
if flying ~= ARGV[2] or state[3] ~= ARGV[3] then return { 'STALE' } end
if ARGV[8] ~= '' and tonumber(ARGV[9]) <= tonumber(state[4]) then return { 'STALE' } end
local now = now_ms()
redis.call('HSET', KEYS[1], 'status', 'FAILED', 'failure_code', ARGV[6], 'failure_message', ARGV[7],
  'updated_at_ms', digits(now))
redis.call('HDEL', KEYS[1], 'pace_ms')
if ARGV[8] ~= '' then
  redis.call('HSET', KEYS[1], 'inflight', ARGV[8], 'fence', ARGV[9])
  send(KEYS[5], 15)
else
  redis.call('HDEL', KEYS[1], 'inflight')
end
record(KEYS[4], ARGV[13], now, ARGV[4], state[1], 'FAILED', ARGV[14], ARGV[6] .. ': ' .. ARGV[7])
if not answered_before(KEYS[2], KEYS[3], ARGV[10]) then
  end_command(KEYS[2], KEYS[3], ARGV[10], ARGV[11], ARGV[12])
end
return { 'FAILED', digits(now) }
