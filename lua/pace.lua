-- A bucket whose rate adapts to what a peer says: takes tokens, or records a refusal, in one step.
--
-- State   The key holds `at:level:rate:until:cut:since:used:strikes:floored:capacity`, ten decimal integers: times in
--         microseconds since 1970, the level in units of 10^-9 token, the rate in thousandths of a token per second. `at` is
--         when the level was that, in the future during a cooldown, which ends at `until`; `cut` is when the rate was last
--         lowered; `used` are the tokens taken since `since`; `strikes` are refusals without a hint; `floored` is since when
--         the rate has been the lowest, or 0; `capacity` is the largest that has used the bucket: the key lives until that
--         one would be full. No key is a full bucket at the ceiling.
--
-- KEYS    The bucket.
-- ARGV    kind      take, look, refused or pause
--         amount    take: tokens; refused: the time to wait in microseconds, or -1; pause: that time
--         random    refused without a time to wait: how far the back-off is from the least to the most, in millionths
--         capacity, ceiling, floor, decrease, increase: tokens, thousandths of a token per second, millionths
--
-- Reply   allowed (1 or 0), level, microseconds until it refills, rate, and for how many microseconds that has been the
--         lowest, or -1. Only what changes is written, in one command with its life. src/pace.rs computes the same with integers, and tests/it/pace.rs holds the two together.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local floor, max, min = math.floor, math.max, math.min

local UNITS, CAPACITY_MAX, WHOLE, INTERVAL = 1000000000, 2251799, 1000000, 1000000
local COOLDOWN_MAX, MEMORY = 3600000000, 86400000000
local BACKOFF_MIN, BACKOFF, BACKOFF_MAX, UNANSWERED = 500000, 1000000, 60000000, 2

local kind, amount, random = ARGV[1], ARGV[2] + 0, ARGV[3] + 0
local capacity, ceiling, lowest, decrease, increase = ARGV[4] + 0, ARGV[5] + 0, ARGV[6] + 0, ARGV[7] + 0, ARGV[8] + 0
local full = capacity * UNITS

local function whole(rate)
    if rate >= WHOLE then return rate - rate % 1000 end
    return rate
end

local stored = redis.pcall('GET', KEYS[1])
if stored and stored.err then return stored end
local at, level, rate, till, cut, since, used, strikes, floored, largest =
    now, full, ceiling, 0, 0, now, 0, 0, 0, capacity
-- Remembers since when the rate has been the lowest: never, where there is only one.
local function mark_the_floor()
    if rate > lowest or lowest == ceiling then
        floored = 0
    else
        floored = floored == 0 and now or min(floored, now)
    end
end

if stored then
    at, level, rate, till, cut, since, used, strikes, floored, largest =
        string.match(stored, '^(%d+):(%-?%d+):(%d+):(%d+):(%d+):(%d+):(%d+):(%d+):(%d+):(%d+)$')
    if not at then return { err = 'TOKENBUCKET the key holds something else than a bucket' } end
    at, level, rate, till, cut, since, used, strikes, floored, largest =
        at + 0, level + 0, rate + 0, till + 0, cut + 0, since + 0, used + 0, strikes + 0, floored + 0, largest + 0
    largest = min(max(largest, capacity), CAPACITY_MAX)
    -- A cooldown that was over when this was written does not begin again, whatever the clock says now.
    if at > till then till = 0 end
    rate = min(max(rate, lowest), ceiling)
    level = min(max(level, -full), full)
    till = min(till, now + COOLDOWN_MAX)
    cut = min(cut, now)
    since = min(since, max(now, till))
    if at > max(now + 1000000, till) then at = now end
    if now > at then
        -- A product that is inexact is larger than any level.
        local earned = (now - at) * rate
        if earned >= full - level then level = full else level = level + earned end
        at = now
    end
    if now >= since + INTERVAL then
        local ms = min(floor((now - since) / 1000), 4000000)
        if used * 2000000 >= rate * ms then
            local least = rate + (rate < WHOLE and 1 or 1000)
            rate = min(max(whole(floor(rate * increase / 1000000)), least), ceiling)
        end
        if used > 0 then strikes = 0 end
        since, used = now, 0
    end
    mark_the_floor()
end

-- Nothing is sent for so long: the bucket is empty, and refills from the end only.
local function cool_down(time)
    till = max(till, now + time)
    level, at = min(level, 0), max(at, till)
    since, used = till, 0
end

local allowed, changed = 1, true
if kind == 'take' then
    local units = min(amount, 2 * capacity) * UNITS
    if now < till or level < units then
        allowed, changed = 0, false
    else
        level, used = level - units, min(used + amount, 2147483648)
    end
elseif kind == 'refused' then
    if amount >= 0 or used > UNANSWERED then strikes = 0 end
    -- What was sent before the peer first refused says nothing new.
    local cooldown = 0
    if amount >= 0 then
        cooldown = min(amount, COOLDOWN_MAX)
    elseif now >= till then
        local most = min(BACKOFF * 2 ^ min(strikes, 6), BACKOFF_MAX)
        cooldown = BACKOFF_MIN + floor((most - BACKOFF_MIN) * random / 1000000)
        strikes = min(strikes + 1, 6)
    end
    cool_down(cooldown)
    if now >= cut + INTERVAL then
        rate, cut = max(whole(floor(rate * decrease / 1000000)), lowest), now
        mark_the_floor()
    end
elseif kind == 'pause' then
    cool_down(min(amount, COOLDOWN_MAX))
else
    changed = false
end

if changed then
    local missing = (largest * UNITS - level) / rate
    local life = at + missing + -missing % 1 - now + now % 1000
    if rate < ceiling or strikes > 0 then life = life + MEMORY end
    life = max(life / 1000, 1)
    local value = string.format('%d:%d:%d:%d:%d:%d:%d:%d:%d:%d',
        at, level, rate, till, cut, since, used, strikes, floored, largest)
    local done = redis.pcall('SET', KEYS[1], value, 'PX', string.format('%d', life + -life % 1))
    if done.err then return done end
end
return { allowed, level, max(at - now, 0), rate, floored > 0 and now - floored or -1 }
