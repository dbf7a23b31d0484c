-- Gives back the room of a session, if the reservation is of that life.
-- KEYS: 1 sessions
-- ARGV: 1 session id, 2 life ('' for any)
-- Returns: {REMOVED} or {KEPT}
-- include: types
local wrong = wrong_type({ 'hash' })
if wrong then return wrong end
local entry = redis.call('HGET', KEYS[1], ARGV[1])
if not entry then return { 'KEPT' } end
if ARGV[2] ~= '' then
  local readable, reservation = pcall(cjson.decode, entry)
  if readable and type(reservation) == 'table' and reservation['life'] ~= ARGV[2] then return { 'KEPT' } end
end
redis.call('HDEL', KEYS[1], ARGV[1])
return { 'REMOVED' }
