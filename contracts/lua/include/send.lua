-- Adds a worker request whose field pairs start at ARGV[first]; nothing on a cluster, where the caller sends it.
local function send(requests, first, expires_at_ms)
  if not requests then return end
  local fields = {}
  for i = first, #ARGV do fields[#fields + 1] = ARGV[i] end
  if expires_at_ms then
    fields[#fields + 1] = 'expires_at_ms'
    fields[#fields + 1] = digits(expires_at_ms)
  end
  redis.call('XADD', requests, '*', unpack(fields))
end
