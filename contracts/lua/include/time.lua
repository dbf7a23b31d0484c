-- The broker's clock in milliseconds and in microseconds; both stay below 2^53.
local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local function now_us()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000000 + tonumber(t[2])
end
-- Lua would print large numbers in scientific notation.
local function digits(number)
  return string.format('%.0f', number)
end
