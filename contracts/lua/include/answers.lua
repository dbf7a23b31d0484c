-- A command that was answered already gets the same answer again, and nothing else happens. The old entry gives way to
-- the new one, so that the stream holds one entry a command.
local function answered_before(answers, answered, command_id)
  if command_id == '' then return false end
  local known = redis.call('HGET', answered, command_id)
  if not known then return false end
  for _, entry in ipairs(redis.call('XRANGE', answers, '-', '+')) do
    if entry[2][2] == known then redis.call('XDEL', answers, entry[1]) end
  end
  redis.call('XADD', answers, '*', 'answer', known)
  return true
end
-- Ends a command, unless it has its answer; `answered` is trimmed together with `answers`.
local function end_command(answers, answered, command_id, answer, cap)
  if command_id == '' or redis.call('HSETNX', answered, command_id, answer) == 0 then return end
  redis.call('XADD', answers, '*', 'answer', answer)
  local excess = redis.call('XLEN', answers) - tonumber(cap)
  if excess <= 0 then return end
  for _, entry in ipairs(redis.call('XRANGE', answers, '-', '+', 'COUNT', excess)) do
    local readable, old = pcall(cjson.decode, entry[2][2])
    if readable and type(old) == 'table' and type(old['command_id']) == 'string' then
      redis.call('HDEL', answered, old['command_id'])
    end
    redis.call('XDEL', answers, entry[1])
  end
end
