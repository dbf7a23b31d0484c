-- Totals of rejected entries by reason; read before anything is written, because what can't be read raises.
local function read_totals(state)
  return cjson.decode(redis.call('HGET', state, 'rejected_total') or '{}')
end
-- Moves every pending event to `rejected` with one reason; returns the highest event id seen, or nil.
local function drop_events(state, events, ids, rejected, cap, reason, totals)
  local newest, count = nil, 0
  local entries = redis.call('XRANGE', events, '-', '+', 'COUNT', 256)
  while #entries > 0 do
    for _, entry in ipairs(entries) do
      local id = event_id_of(entry[2])
      if id and (not newest or id > newest) then newest = id end
      redis.call('XADD', rejected, 'MAXLEN', '=', cap, '*', 'entry_id', entry[1],
        'event_id', string.sub(raw_event_id(entry[2]) or '', 1, 80), 'reason', reason, 'message', 'dropped by ' .. reason)
      if id then redis.call('ZREM', ids, digits(id)) end
      redis.call('XDEL', events, entry[1])
      count = count + 1
    end
    entries = redis.call('XRANGE', events, '-', '+', 'COUNT', 256)
  end
  if count > 0 then
    totals[reason] = (totals[reason] or 0) + count
    redis.call('HSET', state, 'rejected_total', cjson.encode(totals))
  end
  return newest
end
