-- One line of the session's history: a lifecycle transition with who and why.
local function record(history, cap, at_ms, trigger, from, to, by, reason)
  redis.call('XADD', history, 'MAXLEN', '=', cap, '*', 'trigger', trigger, 'from', from, 'to', to,
    'by', by, 'reason', reason, 'at_ms', string.format('%.0f', at_ms))
end
