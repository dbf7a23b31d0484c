-- Makes a session CLOSING with a release in flight and sends it; in CLOSING it joins the release that is running.
-- KEYS: 1 state, 2 answers, 3 answered, 4 history, 5 requests (none on a cluster)
-- ARGV: 1 epoch, 2 command id, 3 in-flight record, 4 fence, 5 cap of history, 6 who, 7 reason,
--       8.. field pairs of the worker request
-- Returns: {BEGUN, now ms}, {ANSWERED}, {STATUS, status}, {BUSY} or a refusal
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
if answered_before(KEYS[2], KEYS[3], ARGV[2]) then return { 'ANSWERED' } end
local state = redis.call('HMGET', KEYS[1], 'status', 'inflight')
if state[1] == 'CLOSED' or state[1] == 'CLOSING' then return { 'STATUS', state[1] } end
if state[2] and cjson.decode(state[2])['kind'] ~= 'release' then return { 'BUSY' } end
local now = now_ms()
redis.call('HSET', KEYS[1], 'status', 'CLOSING', 'inflight', ARGV[3], 'fence', ARGV[4], 'updated_at_ms', digits(now))
redis.call('HDEL', KEYS[1], 'pace_ms')
record(KEYS[4], ARGV[5], now, 'close_requested', state[1], 'CLOSING', ARGV[6], ARGV[7])
send(KEYS[5], 8)
return { 'BEGUN', digits(now) }
