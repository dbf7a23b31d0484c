-- Reserves room for a session on a worker; a reservation that is there already gets the new life.
-- KEYS: 1 sessions, 2 info
-- ARGV: 1 session id, 2 life, 3 '1' to go over the capacity
-- Returns: {RESERVED}, {FULL} or {GONE} (the worker is not alive, or still loads its model)
-- include: time
-- include: types
local wrong = wrong_type({ 'hash', 'hash' })
if wrong then return wrong end
local capacity = redis.call('HGET', KEYS[2], 'capacity')
if not capacity then return { 'GONE' } end
local present = redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1
if not present and ARGV[3] ~= '1' and redis.call('HLEN', KEYS[1]) >= tonumber(capacity) then return { 'FULL' } end
redis.call('HSET', KEYS[1], ARGV[1],
  '{"life":' .. cjson.encode(ARGV[2]) .. ',"reserved_at_ms":' .. digits(now_ms()) .. '}')
return { 'RESERVED' }
