-- Refuses a key that holds another type, before anything is written: a script that stops half-way is not rolled back.
-- `kinds` are the types of KEYS in their order; a key that is missing is right.
local function wrong_type(kinds)
  for i, key in ipairs(KEYS) do
    local found = redis.call('TYPE', key)['ok']
    if found ~= kinds[i] and found ~= 'none' then
      return redis.error_reply('WRONGTYPE ' .. key .. ' holds a ' .. found .. ', not a ' .. kinds[i])
    end
  end
  return nil
end
