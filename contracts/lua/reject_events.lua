-- Takes entries out of the events stream that can't be applied, and reports each with its reason.
-- KEYS: 1 state, 2 events, 3 ids, 4 rejected
-- ARGV: 1 epoch, 2 cap of rejected, 3.. groups of five: entry id, event id as written, reason, message, forget (1|0)
-- Returns: {REJECTED, how many} or a refusal
-- include: time
-- include: types
-- include: memory
-- include: owner
local wrong = wrong_type({ 'hash', 'stream', 'zset', 'stream' })
if wrong then return wrong end
local refusal = refuse(KEYS[1], ARGV[1])
if refusal then return refusal end
despite_full_memory(KEYS[1])
local totals = cjson.decode(redis.call('HGET', KEYS[1], 'rejected_total') or '{}')
local count = 0
for i = 3, #ARGV, 5 do
  -- An entry that is gone was reported before.
  if redis.call('XDEL', KEYS[2], ARGV[i]) == 1 then
    redis.call('XADD', KEYS[4], 'MAXLEN', '=', ARGV[2], '*', 'entry_id', ARGV[i], 'event_id', ARGV[i + 1],
      'reason', ARGV[i + 2], 'message', ARGV[i + 3])
    if ARGV[i + 4] == '1' then redis.call('ZREM', KEYS[3], ARGV[i + 1]) end
    totals[ARGV[i + 2]] = (totals[ARGV[i + 2]] or 0) + 1
    count = count + 1
  end
end
if count > 0 then
  redis.call('HSET', KEYS[1], 'rejected_total', cjson.encode(totals))
  -- What is swept after the close expires with the rest.
  local left_ms = redis.call('PTTL', KEYS[1])
  if left_ms > 0 then redis.call('PEXPIRE', KEYS[4], digits(left_ms)) end
end
return { 'REJECTED', count }
