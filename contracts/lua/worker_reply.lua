-- Adds a reply, a notice or a close to an inbox, also on a broker that is out of memory, so that sessions can end.
-- KEYS: 1 inbox
-- ARGV: 1 field ('reply', 'notice' or 'command'), 2 JSON
-- Returns: {ADDED, entry id}
-- include: types
local wrong = wrong_type({ 'stream' })
if wrong then return wrong end
-- Changes nothing; but once a script has written, the broker lets it write on.
redis.call('XDEL', KEYS[1], '0-1')
return { 'ADDED', redis.call('XADD', KEYS[1], '*', ARGV[1], ARGV[2]) }
