-- A close that was sent on suspicion looks again: is the client still absent, is the session still idle?
-- The keys that a condition looks at stand behind the first four of the script; these are their types.
local condition_kinds = { [''] = {}, absent = { 'string' }, idle = { 'stream', 'stream' } }
-- When the newest entry was added to a stream, whether it is still there or not; 0 without a stream.
local function newest_ms(stream)
  if redis.call('EXISTS', stream) == 0 then return 0 end
  local info = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return tonumber(string.match(info[i + 1], '^%d+')) end
  end
  return 0
end
local function holds(condition, now)
  if condition == 'absent' then return redis.call('EXISTS', KEYS[5]) == 0 end
  if condition == 'idle' then
    local known = redis.call('HMGET', KEYS[1], 'idle_ms', 'updated_at_ms')
    local newest = math.max(tonumber(known[2]), newest_ms(KEYS[2]), newest_ms(KEYS[5]), newest_ms(KEYS[6]))
    return known[1] and now - newest >= tonumber(known[1])
  end
  return true
end
