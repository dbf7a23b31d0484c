-- Clears what is in flight without a change of state: a tick that expired unrun, or a release that was answered.
-- KEYS: 1 state, 2 answers, 3 answered
-- ARGV: 1 epoch, 2 request id, 3 answer for the waiting command ('' for none), 4 cap of answers
-- Returns: {ENDED}, {STALE} or a refusal
-- include: time
-- include: types
-- include: memory
-- include: owner
-- include: answers
local wrong = wrong_type({ 'hash', 'stream', 'hash' })
if wrong then return wrong end
local refusal = refuse(KEYS[1], ARGV[1])
if refusal then return refusal end
despite_full_memory(KEYS[1])
local inflight = redis.call('HGET', KEYS[1], 'inflight')
local flying = inflight and cjson.decode(inflight)
if not flying or flying['request_id'] ~= ARGV[2] then return { 'STALE' } end
redis.call('HSET', KEYS[1], 'updated_at_ms', digits(now_ms()))
-- A tick that was begun did not end its host.
redis.call('HDEL', KEYS[1], 'inflight', 'free_attempts')
if ARGV[3] ~= '' and flying['command_id'] ~= cjson.null then
  end_command(KEYS[2], KEYS[3], flying['command_id'], ARGV[3], ARGV[4])
end
return { 'ENDED' }
