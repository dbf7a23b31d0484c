-- Sends what is in flight again under a higher fence, which is written first, so that late answers are void.
-- KEYS: 1 state, 2 requests (none on a cluster)
-- ARGV: 1 epoch, 2 request id, 3 in-flight record with the new fence, 4 fence, 5 worker, 6 queue limit ms ('' for
--       requests that never expire), 7.. field pairs of the worker request
-- Returns: {SENT, now ms}, {STALE} (not in flight, or a fence that was used) or a refusal
-- include: time
-- include: types
-- include: memory
-- include: owner
-- include: send
local wrong = wrong_type({ 'hash', 'stream' })
if wrong then return wrong end
local refusal = refuse(KEYS[1], ARGV[1])
if refusal then return refusal end
despite_full_memory(KEYS[1])
local state = redis.call('HMGET', KEYS[1], 'inflight', 'fence')
if not state[1] or cjson.decode(state[1])['request_id'] ~= ARGV[2] then return { 'STALE' } end
local now = now_ms()
if tonumber(ARGV[4]) <= tonumber(state[2]) then return { 'STALE' } end
redis.call('HSET', KEYS[1], 'inflight', ARGV[3], 'fence', ARGV[4], 'worker', ARGV[5])
send(KEYS[2], 7, ARGV[6] ~= '' and now + tonumber(ARGV[6]) or nil)
return { 'SENT', digits(now) }
