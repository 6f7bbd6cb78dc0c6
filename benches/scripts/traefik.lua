-- The design of Traefik's rate limiter on Redis, written anew from its description: a hash of two fields, floats, the
-- client's clock, HSET and EXPIRE on every call, three values as reply, all text.
-- KEYS[1]: the hash. ARGV: rate per microsecond, burst, life in seconds, now in microseconds, longest wait in microseconds.
local rate, burst, life = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local now, longest = tonumber(ARGV[4]), tonumber(ARGV[5])
local tokens, last = burst, now
local stored_last, stored_tokens = redis.call('HGET', KEYS[1], 'last'), redis.call('HGET', KEYS[1], 'tokens')
if stored_last then
    last, tokens = tonumber(stored_last), tonumber(stored_tokens)
end
if now < last then last = now end
tokens = math.min(burst, tokens + (now - last) * rate) - 1
local wait = 0
if tokens < 0 then wait = -tokens / rate end
local ok = wait <= longest
if not ok then tokens = tokens + math.min(burst, -tokens) end
redis.call('HSET', KEYS[1], 'last', now, 'tokens', tokens)
redis.call('EXPIRE', KEYS[1], life)
return { tostring(ok), tostring(wait), tostring(tokens) }
