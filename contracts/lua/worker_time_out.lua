-- Answers a request in the stead of a worker that will never finish it, and takes it out of the stream. Does nothing
-- once the request is not in that start's hand any more.
-- KEYS: 1 info, 2 requests, 3 inbox (none where nothing is to be answered, and on a cluster, where the caller answers)
-- ARGV: 1 incarnation, 2 group, 3 consumer, 4 entry id, 5 reply ('' to leave the request to the worker's next start)
-- Returns: {TIMED_OUT}, {ANSWERED} (nothing of that id is in hand) or {TAKEN, incarnation that holds the name}
-- include: types
local wrong = wrong_type({ 'hash', 'stream', 'stream' })
if wrong then return wrong end
local holder = redis.call('HGET', KEYS[1], 'incarnation')
if holder and holder ~= ARGV[1] then return { 'TAKEN', holder } end
local pending = redis.pcall('XPENDING', KEYS[2], ARGV[2], ARGV[4], ARGV[4], 1, ARGV[3])
if pending.err or #pending == 0 then return { 'ANSWERED' } end
if ARGV[5] == '' then return { 'TIMED_OUT' } end
-- First what frees memory: once a script has written, a broker that is out of memory lets it write on.
redis.call('XACK', KEYS[2], ARGV[2], ARGV[4])
redis.call('XDEL', KEYS[2], ARGV[4])
redis.call('HDEL', KEYS[1], 'busy_since')
if KEYS[3] then redis.call('XADD', KEYS[3], '*', 'reply', ARGV[5]) end
return { 'TIMED_OUT' }
