-- Starts or stops free running: `pace_ms` is set while a session runs free.
-- KEYS: 1 state, 2 answers, 3 answered
-- ARGV: 1 epoch, 2 command id, 3 pace ms ('' to stop), 4 answer, 5 cap of answers
-- Returns: {DONE}, {ANSWERED}, {STATUS, status} or a refusal
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
if answered_before(KEYS[2], KEYS[3], ARGV[2]) then return { 'ANSWERED' } end
local status = redis.call('HGET', KEYS[1], 'status')
if status ~= 'ACTIVE' then return { 'STATUS', status } end
redis.call('HSET', KEYS[1], 'updated_at_ms', digits(now_ms()))
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], 'pace_ms') else redis.call('HSET', KEYS[1], 'pace_ms', ARGV[3]) end
end_command(KEYS[2], KEYS[3], ARGV[2], ARGV[4], ARGV[5])
return { 'DONE' }
