-- Makes a session CLOSING with a release in flight and sends it; in CLOSING it joins the release that is running.
-- KEYS: 1 state, 2 answers, 3 answered, 4 history, then what the condition looks at (absent: presence; idle: events,
--       chunks), last requests (none on a cluster)
-- ARGV: 1 epoch, 2 command id, 3 in-flight record, 4 fence, 5 cap of history, 6 who, 7 reason,
--       8 condition ('', absent or idle), 9.. field pairs of the worker request
-- Returns: {BEGUN, now ms}, {ANSWERED}, {STATUS, status}, {BUSY}, {KEPT} where the condition does not hold,
--          {STALE} (a fence that was used: the call comes late) or a refusal
-- include: time
-- include: types
-- include: memory
-- include: owner
-- include: answers
-- include: history
-- include: send
-- include: only_if
local kinds = { 'hash', 'stream', 'hash', 'stream' }
for _, kind in ipairs(condition_kinds[ARGV[8]]) do kinds[#kinds + 1] = kind end
local requests = #kinds + 1
kinds[requests] = 'stream'
local wrong = wrong_type(kinds)
if wrong then return wrong end
local refusal = refuse(KEYS[1], ARGV[1])
if refusal then return refusal end
despite_full_memory(KEYS[1])
if answered_before(KEYS[2], KEYS[3], ARGV[2]) then return { 'ANSWERED' } end
local state = redis.call('HMGET', KEYS[1], 'status', 'inflight', 'fence')
-- CLOSING with nothing in flight is none of our states; from there a close begins anew, so that it can end.
local again = state[1] == 'CLOSING' and not state[2]
if state[1] == 'CLOSED' or state[1] == 'CLOSING' and not again then return { 'STATUS', state[1] } end
if state[2] and cjson.decode(state[2])['kind'] ~= 'release' then return { 'BUSY' } end
if tonumber(ARGV[4]) <= tonumber(state[3]) then return { 'STALE' } end
local now = now_ms()
if not holds(ARGV[8], now) then return { 'KEPT' } end
redis.call('HSET', KEYS[1], 'status', 'CLOSING', 'inflight', ARGV[3], 'fence', ARGV[4], 'updated_at_ms', digits(now))
redis.call('HDEL', KEYS[1], 'pace_ms')
if not again then record(KEYS[4], ARGV[5], now, 'close_requested', state[1], 'CLOSING', ARGV[6], ARGV[7]) end
send(KEYS[requests], 9)
return { 'BEGUN', digits(now) }
