-- Claims a partition that nobody holds, with an epoch higher than any before.
-- KEYS: 1 lease
-- ARGV: 1 owner, 2 lease ms
-- Returns: {CLAIMED, epoch, expires at ms} or {HELD, owner, expires at ms}
-- include: time
-- include: types
-- include: memory
local wrong = wrong_type({ 'hash' })
if wrong then return wrong end
local held = redis.call('HMGET', KEYS[1], 'owner', 'epoch', 'expires_at_ms')
local now = now_ms()
if held[1] and held[1] ~= ARGV[1] and tonumber(held[3]) > now then return { 'HELD', held[1], held[3] } end
local epoch = now_us()
if held[2] then epoch = math.max(epoch, tonumber(held[2]) + 1) end
despite_full_memory(KEYS[1])
local expires = digits(now + tonumber(ARGV[2]))
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'epoch', digits(epoch), 'expires_at_ms', expires)
return { 'CLAIMED', digits(epoch), expires }
