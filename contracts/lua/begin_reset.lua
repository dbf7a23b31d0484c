-- Records a reset as in flight and sends it; it takes the place of a release that a failure left in flight.
-- KEYS: 1 state, 2 answers, 3 answered, 4 requests (none on a cluster)
-- ARGV: 1 epoch, 2 command id, 3 in-flight record, 4 fence, 5 worker, 6.. field pairs of the worker request
-- Returns: {BEGUN, now ms}, {ANSWERED}, {STATUS, status}, {BUSY},
--          {STALE} (a fence that was used: the call comes late) or a refusal
-- include: time
-- include: types
-- include: memory
-- include: owner
-- include: answers
-- include: send
local wrong = wrong_type({ 'hash', 'stream', 'hash', 'stream' })
if wrong then return wrong end
local refusal = refuse(KEYS[1], ARGV[1])
if refusal then return refusal end
despite_full_memory(KEYS[1])
if answered_before(KEYS[2], KEYS[3], ARGV[2]) then return { 'ANSWERED' } end
local state = redis.call('HMGET', KEYS[1], 'status', 'inflight', 'fence')
if state[1] ~= 'ACTIVE' and state[1] ~= 'FAILED' then return { 'STATUS', state[1] } end
if state[2] and cjson.decode(state[2])['kind'] ~= 'release' then return { 'BUSY' } end
if tonumber(ARGV[4]) <= tonumber(state[3]) then return { 'STALE' } end
local now = now_ms()
redis.call('HSET', KEYS[1], 'inflight', ARGV[3], 'fence', ARGV[4], 'worker', ARGV[5], 'updated_at_ms', digits(now))
send(KEYS[4], 6)
return { 'BEGUN', digits(now) }
