-- The release failed: the session is a tombstone, CLEANUP_FAILED, until a close of it succeeds.
-- KEYS: 1 state, 2 answers, 3 answered, 4 history
-- ARGV: 1 epoch, 2 request id, 3 error text, 4 answer, 5 cap of answers, 6 cap of history, 7 who
-- Returns: {CLEANUP_FAILED, attempts so far, now ms}, {STALE} or a refusal
-- include: time
-- include: types
-- include: memory
-- include: owner
-- include: answers
-- include: history
local wrong = wrong_type({ 'hash', 'stream', 'hash', 'stream' })
if wrong then return wrong end
local refusal = refuse(KEYS[1], ARGV[1])
if refusal then return refusal end
despite_full_memory(KEYS[1])
local state = redis.call('HMGET', KEYS[1], 'status', 'inflight')
local flying = state[2] and cjson.decode(state[2])
if state[1] ~= 'CLOSING' or not flying or flying['request_id'] ~= ARGV[2] then return { 'STALE' } end
local now = now_ms()
local attempts = redis.call('HINCRBY', KEYS[1], 'close_attempts', 1)
redis.call('HSET', KEYS[1], 'status', 'CLEANUP_FAILED', 'cleanup_error', ARGV[3], 'updated_at_ms', digits(now))
redis.call('HDEL', KEYS[1], 'inflight')
record(KEYS[4], ARGV[6], now, 'cleanup_failed', 'CLOSING', 'CLEANUP_FAILED', ARGV[7], ARGV[3])
if flying['command_id'] ~= cjson.null then
  end_command(KEYS[2], KEYS[3], flying['command_id'], ARGV[4], ARGV[5])
end
return { 'CLEANUP_FAILED', attempts, digits(now) }
