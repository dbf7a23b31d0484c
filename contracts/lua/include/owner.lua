-- nil if `state` exists and `epoch` owns it, else the refusal to return: NONE or FENCED.
local function refuse(state, epoch)
  local stored = redis.call('HGET', state, 'epoch')
  if not stored then return { 'NONE' } end
  if tonumber(stored) ~= tonumber(epoch) then return { 'FENCED', stored } end
  return nil
end
