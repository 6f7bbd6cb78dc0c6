-- The script of many articles about rate limits, written anew from their description: a hash of tokens and a time,
-- floats as text, the client's clock in seconds, HMGET, HSET and EXPIRE on every call, two values as reply.
-- KEYS[1]: the hash. ARGV: capacity, rate per second, now in seconds, tokens asked for.
local capacity, rate = tonumber(ARGV[1]), tonumber(ARGV[2])
local now, requested = tonumber(ARGV[3]), tonumber(ARGV[4])
local state = redis.call('HMGET', KEYS[1], 'tokens', 'time')
local tokens, time = tonumber(state[1]), tonumber(state[2])
if tokens == nil then
    tokens, time = capacity, now
end
tokens = math.min(capacity, tokens + math.max(0, now - time) * rate)
local allowed = 0
if tokens >= requested then
    tokens = tokens - requested
    allowed = 1
end
redis.call('HSET', KEYS[1], 'tokens', tokens, 'time', now)
redis.call('EXPIRE', KEYS[1], math.ceil(capacity / rate) + 1)
return { allowed, tokens }
