-- Ends a command that changes nothing, errors included. Without a session the answers expire.
-- KEYS: 1 state, 2 answers, 3 answered
-- ARGV: 1 epoch, 2 command id, 3 answer, 4 cap of answers, 5 ms that answers outlive a missing session
-- Returns: {DONE}, {ANSWERED} or {FENCED, epoch}
-- include: types
-- include: memory
-- include: answers
local wrong = wrong_type({ 'hash', 'stream', 'hash' })
if wrong then return wrong end
local stored = redis.call('HGET', KEYS[1], 'epoch')
if stored and tonumber(stored) > tonumber(ARGV[1]) then return { 'FENCED', stored } end
if answered_before(KEYS[2], KEYS[3], ARGV[2]) then return { 'ANSWERED' } end
despite_full_memory(KEYS[1])
end_command(KEYS[2], KEYS[3], ARGV[2], ARGV[3], ARGV[4])
if not stored then
  redis.call('PEXPIRE', KEYS[2], ARGV[5])
  redis.call('PEXPIRE', KEYS[3], ARGV[5])
end
return { 'DONE' }
