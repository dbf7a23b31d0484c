-- Begins a world: writes the state of a new session, after dropping what an earlier life of that id left.
-- KEYS: 1 state, 2 events, 3 ids, 4 chunks, 5 ticks, 6 rejected, 7 answers, 8 answered, 9 history
-- ARGV: 1 epoch, 2 command id, 3 answer, 4 cap of answers, 5 cap of history, 6 who, 7.. field pairs of the state
-- Returns: {CREATED, fence}, {ANSWERED}, {EXISTS, status} or {FENCED, epoch}
-- include: time
-- include: types
-- include: answers
-- include: history
local wrong = wrong_type({ 'hash', 'stream', 'zset', 'stream', 'stream', 'stream', 'stream', 'hash', 'stream' })
if wrong then return wrong end
local old = redis.call('HMGET', KEYS[1], 'status', 'epoch', 'fence')
if old[2] and tonumber(old[2]) > tonumber(ARGV[1]) then return { 'FENCED', old[2] } end
if answered_before(KEYS[7], KEYS[8], ARGV[2]) then return { 'ANSWERED' } end
if old[1] and old[1] ~= 'CLOSED' then return { 'EXISTS', old[1] } end
local now, fence = now_ms(), now_us()
if old[3] then fence = math.max(fence, tonumber(old[3]) + 1) end
-- A broker that is out of memory refuses this write, before anything is dropped.
redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
redis.call('HSET', KEYS[1], 'status', 'ACTIVE', 'epoch', ARGV[1], 'fence', digits(fence),
  'created_at_ms', digits(now), 'updated_at_ms', digits(now), unpack(ARGV, 7))
-- An empty stream: producers add with NOMKSTREAM, so that without a session nothing is made.
local seed = redis.call('XADD', KEYS[2], '*', 'x', 'x')
redis.call('XDEL', KEYS[2], seed)
for i = 7, 9 do redis.call('PERSIST', KEYS[i]) end
record(KEYS[9], ARGV[5], now, 'created', old[1] or '', 'ACTIVE', ARGV[6], '')
end_command(KEYS[7], KEYS[8], ARGV[2], ARGV[3], ARGV[4])
return { 'CREATED', digits(fence) }
