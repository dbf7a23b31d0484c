-- The event id of a stream entry's fields as written, or nil. Of a field that comes twice the last one counts, as it
-- does for every reader that makes a mapping of the fields.
local function raw_event_id(fields)
  for i = #fields - 1, 1, -2 do
    if fields[i] == 'event_id' then return fields[i + 1] end
  end
  return nil
end
-- The event id as a number, or nil where it is no canonical whole number below 2^53.
local function event_id_of(fields)
  local text = raw_event_id(fields)
  if not text or #text > 16 or not (text == '0' or string.match(text, '^[1-9]%d*$')) then return nil end
  local id = tonumber(text)
  if id >= 9007199254740992 then return nil end
  return id
end
-- Registers accepted event ids: score = order of acceptance.
local function register(ids, members)
  if #members == 0 then return end
  local last = redis.call('ZREVRANGE', ids, 0, 0, 'WITHSCORES')
  local score = last[2] and tonumber(last[2]) or 0
  for _, member in ipairs(members) do
    score = score + 1
    redis.call('ZADD', ids, 'NX', digits(score), member)
  end
end
