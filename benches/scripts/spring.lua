-- The design of Spring Cloud Gateway's RedisRateLimiter, written anew from its description: tokens and the time in whole
-- seconds in two keys, floats, both written with a life on every call, two values as reply.
-- KEYS: the tokens, the time. ARGV: rate per second, capacity, tokens asked for.
local rate, capacity, requested = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local now = tonumber(redis.call('TIME')[1])
local life = math.floor(capacity / rate * 2)
local tokens = tonumber(redis.call('GET', KEYS[1]))
if tokens == nil then tokens = capacity end
local last = tonumber(redis.call('GET', KEYS[2]))
if last == nil then last = 0 end
local filled = math.min(capacity, tokens + math.max(0, now - last) * rate)
local allowed = filled >= requested
local left, answer = filled, 0
if allowed then
    left, answer = filled - requested, 1
end
if life > 0 then
    redis.call('SETEX', KEYS[1], life, left)
    redis.call('SETEX', KEYS[2], life, now)
end
return { answer, left }
