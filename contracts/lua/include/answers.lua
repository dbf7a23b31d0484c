-- A command that was answered already gets the same answer again, and nothing else happens.
local function answered_before(answers, answered, command_id)
  if command_id == '' then return false end
  local known = redis.call('HGET', answered, command_id)
  if not known then return false end
  redis.call('XADD', answers, '*', 'answer', known)
  return true
end
-- Ends a command; `answered` is trimmed together with `answers`.
local function end_command(answers, answered, command_id, answer, cap)
  if command_id == '' then return end
  redis.call('XADD', answers, '*', 'answer', answer)
  redis.call('HSET', answered, command_id, answer)
  local excess = redis.call('XLEN', answers) - tonumber(cap)
  if excess <= 0 then return end
  for _, entry in ipairs(redis.call('XRANGE', answers, '-', '+', 'COUNT', excess)) do
    redis.call('HDEL', answered, cjson.decode(entry[2][2])['command_id'])
    redis.call('XDEL', answers, entry[1])
  end
end
