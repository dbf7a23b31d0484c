-- Moves every pending event to `rejected` with one reason; returns the highest event id seen, or nil.
-- The host has swept a long stream before, so this is bounded by the queue limit and what came since.
local function drop_events(state, events, ids, rejected, cap, reason)
  local newest, count = nil, 0
  for _, entry in ipairs(redis.call('XRANGE', events, '-', '+')) do
    local id = event_id_of(entry[2])
    if id and (not newest or id > newest) then newest = id end
    redis.call('XADD', rejected, 'MAXLEN', '=', cap, '*', 'entry_id', entry[1],
      'event_id', string.sub(raw_event_id(entry[2]) or '', 1, 80), 'reason', reason, 'message', 'dropped by ' .. reason)
    if id then redis.call('ZREM', ids, digits(id)) end
    redis.call('XDEL', events, entry[1])
    count = count + 1
  end
  if count > 0 then
    local totals = cjson.decode(redis.call('HGET', state, 'rejected_total') or '{}')
    totals[reason] = (totals[reason] or 0) + count
    redis.call('HSET', state, 'rejected_total', cjson.encode(totals))
  end
  return newest
end
