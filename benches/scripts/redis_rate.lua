-- The design of go-redis/redis_rate, written anew from its description: GCRA, whose state is one time as a float (the
-- theoretical arrival time, in seconds since 2017), written with a life in whole seconds on a grant only, and four
-- values as reply, the two times as text.
-- KEYS[1]: the key. ARGV: burst, rate, period in seconds, cost.
local burst, rate, period, cost = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local interval = period / rate
local clock = redis.call('TIME')
local now = (clock[1] - 1483228800) + clock[2] / 1000000
local arrival = redis.call('GET', KEYS[1])
arrival = arrival and math.max(tonumber(arrival), now) or now
local next_arrival = arrival + interval * cost
local slack = now - (next_arrival - interval * burst)
local remaining = slack / interval
if remaining < 0 then
    return { 0, 0, tostring(-slack), tostring(arrival - now) }
end
local reset_after = next_arrival - now
if reset_after > 0 then
    redis.call('SET', KEYS[1], next_arrival, 'EX', math.ceil(reset_after))
end
return { cost, remaining, tostring(-1), tostring(reset_after) }
