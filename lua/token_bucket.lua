-- Token buckets: makes the charges of one or more requests, in order, in one step.
--
-- Bucket  A key holds `at:capacity:n:p:level`, five decimal integers:
--           at        when the level was that, in microseconds since 1970
--           capacity  the largest that has used the bucket, in tokens: the key lives until that one would be full
--           n, p      the refill rate of the last writer: n tokens per p microseconds
--           level     in units of 1/p token; negative while a debt is worked off
--         In e microseconds a bucket earns e * n units, so nothing is ever rounded. No key is a full bucket.
--
-- KEYS    The bucket of each charge, request after request; a bucket may be named many times.
-- ARGV    One key: a charge. Several keys: runs, until each key has its charge. A run is
--           requests  how many requests, one after the other, make the charges that follow
--           charges   how many charges each of them makes, and then these
--         A charge is five values:
--           kind      take   takes the units if they are there, else refuses
--                     spend  takes them whether they are there or not, down to -full
--                     give   gives them, up to full
--                     peek   changes nothing
--                     after `shadow ` (as in `shadow take`): never refuses, is made when all others of its request pass
--           units     tokens * p, at most 2 * full: what is more cannot be taken, spent or given either
--           quota     `:capacity:n:p:`, n/p in lowest terms
--           full      capacity * p, at most 2^51
--           n         again, as a number of its own
--
-- Reply   For each charge 2 * level + (1 if the tokens were there), in units of its own quota. One charge is answered
--         with the integer, several with an array. Where the clock has stepped back and a bucket's time lies ahead of
--         it, an array holds twice as many integers: all of those, then by how many microseconds each bucket is ahead.
--         A value that is not a bucket is an error for each charge of the requests that name it, and only for those;
--         where one charge was asked, the error is the reply.
--
-- A request makes all of its charges or none. A denial takes nothing and writes nothing, with two exceptions: it brings
-- back a time that lies more than 1 s ahead of the clock, and it extends a life that its own, slower quota needs longer.
-- A bucket is read once and written at most once, together with its life. Every number stays below 2^53 in magnitude,
-- where a double is an exact integer, and so does every product that is not only compared with something smaller;
-- src/bucket.rs computes the same with integers, and a test holds the two together.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local sub, format, ceil = string.sub, string.format, math.ceil
local single

-- The common case, without a table or a function of its own: one request takes from one bucket, which was last written
-- under the same quota and not ahead of the clock. All else goes the long way round, to the same result.
if #KEYS == 1 then
    single = redis.pcall('GET', KEYS[1])
    if ARGV[1] == 'take' and not (single and single.err) then
        local quota, full, n = ARGV[3], ARGV[4] + 0, ARGV[5] + 0
        local at, level = now, full
        if single then
            -- From 2001 to 2286 the time has 16 digits.
            at, level = nil, nil
            local rest = 17 + #quota
            if sub(single, 17, rest - 1) == quota then
                at, level = tonumber(sub(single, 1, 16)), tonumber(sub(single, rest))
            end
        end
        if at and level and at <= now and level <= full and level >= -full then
            local earned = (now - at) * n
            if earned < full - level then level = level + earned else level = full end
            local left = level - ARGV[2]
            if left < 0 then return 2 * level end
            local life = ceil(ceil((full - left) / n) / 1000)
            if life < 1 then life = 1 end
            local done = redis.pcall('SET', KEYS[1], format('%.0f%s%.0f', now, quota, left), 'PX', life)
            if done.err then return done end
            return 2 * left + 1
        end
    end
end

local floor, max, min, match = math.floor, math.max, math.min, string.match
local AHEAD_MAX = 1000000
local UNITS_MAX = 2251799813685248
local BUCKET = '^(%d+):(%d+):(%d+):(%d+):(%-?%d+)$'

-- The charges of the current run: column by column, the place is the charge's in its request.
local kinds, shadows, units, quotas, fulls, ns = {}, {}, {}, {}, {}, {}
-- By key: the bucket as this call has left it (false: no key, a table: an error), and its life where it has to be written.
local buckets, lives = {}, {}
-- The error of the current request, from the first bucket of it that cannot be read.
local failure

-- floor(part * p / p0) for part < p0, both periods up to 2^45: long division, by digits of p in base 128.
local function scale(part, p, p0)
    local quotient, rest, weight = 0, 0, 4398046511104
    while weight >= 1 do
        rest = rest * 128 + part * (floor(p / weight) % 128)
        quotient = quotient * 128 + floor(rest / p0)
        rest = rest % p0
        weight = weight / 128
    end
    return quotient
end

-- The life of a bucket in milliseconds, `full` being that of its largest capacity: until it is full, rounded up.
local function life_of(at, full, n, level)
    return max(1, ceil((at + ceil(max(0, full - level) / n) - now) / 1000))
end

-- The five numbers of a stored bucket, or nothing where it is not one.
local function parse(bucket)
    local at, capacity, n, p, level = match(bucket, BUCKET)
    if at then
        at, capacity, n, p, level = at + 0, capacity + 0, n + 0, p + 0, level + 0
        if at < 4 * UNITS_MAX and capacity >= 1 and capacity <= 2147483648 and n >= 1 and n <= 1099511627776
            and p >= 1 and p <= 35184372088832 and level <= UNITS_MAX and level >= -UNITS_MAX then
            return at, capacity, n, p, level
        end
    end
end

-- A bucket as charge i sees it, before anything is taken:
--   at, level     the time and the level of its last write, in units of this charge's quota
--   refilled      the level now
--   quota, full   `:capacity:n:p:` to be written, with the largest capacity, and that capacity in units, up to 2^51
--   other         whether it was written under another quota
--   behind        whether its time lay too far ahead of the clock, and is now
local function read(bucket, i)
    local quota, full, n = quotas[i], fulls[i], ns[i]
    if not bucket then return now, full, full, quota, full, false, false end
    local at, level
    local largest, other, behind = full, false, false
    local rest = 17 + #quota
    if sub(bucket, 17, rest - 1) == quota then
        at, level = tonumber(sub(bucket, 1, 16)), tonumber(sub(bucket, rest))
    end
    if not (at and level and level <= full and level >= -full) then
        local capacity0, n0, p0, level0
        at, capacity0, n0, p0, level0 = parse(bucket)
        if not at then
            failure = { err = 'TOKENBUCKET the key holds something else than a bucket' }
            return now, full, full, quota, full, false, false
        end
        local capacity, own_n, p = match(quota, '(%d+):(%d+):(%d+)')
        capacity, p, other = capacity + 0, p + 0, true
        local whole = floor(level0 / p0)
        if whole >= capacity then
            level = full
        else
            level = max(whole, -capacity) * p + scale(level0 - whole * p0, p, p0)
        end
        if capacity0 > capacity then
            quota = format(':%.0f:%s:%.0f:', capacity0, own_n, p)
            largest = min(capacity0 * p, UNITS_MAX)
        end
    end
    if at > now + AHEAD_MAX then at, behind = now, true end
    local refilled = level
    if at < now then
        local earned = (now - at) * n
        if earned < full - level then refilled = level + earned else refilled = full end
    end
    return at, level, refilled, quota, largest, other, behind
end

-- The two writes that a denial may make to `bucket`, which charge i has read: the bucket and its life, or nothing.
local function keep(bucket, i, at, level, quota, largest, other, behind)
    if bucket and (other or behind) then
        local life = life_of(at, largest, ns[i], level)
        if not behind then
            local at0, capacity0, n0, p0, level0 = parse(bucket)
            if life <= life_of(at0, min(capacity0 * p0, UNITS_MAX), n0, level0) then return end
        end
        return format('%.0f%s%.0f', at, quota, level), life
    end
end

-- Makes charge i: the reply, by how much the bucket's time is ahead, and where it changes the bucket and its life.
local function step(bucket, i)
    local at, level, refilled, quota, largest, other, behind = read(bucket, i)
    local kind, ahead, left = kinds[i], at - now, nil
    if kind == 'take' then
        left = refilled - units[i]
        if left < 0 then return 2 * refilled, ahead, keep(bucket, i, at, level, quota, largest, other, behind) end
    elseif kind == 'spend' then
        left = max(refilled - units[i], -fulls[i])
    elseif kind == 'give' then
        left = min(refilled + units[i], fulls[i])
    else
        return 2 * refilled + 1, ahead
    end
    if at < now then at = now end
    return 2 * left + 1, ahead, format('%.0f%s%.0f', at, quota, left), life_of(at, largest, ns[i], left)
end

-- Each bucket is read once. MGET does not tell a key of another type from no key, so GET is asked as well.
if single ~= nil then
    buckets[KEYS[1]] = single
else
    local names = {}
    for k = 1, #KEYS do
        local key = KEYS[k]
        if buckets[key] == nil then
            buckets[key] = false
            names[#names + 1] = key
        end
    end
    local values = redis.call('MGET', unpack(names))
    for k = 1, #names do
        buckets[names[k]] = values[k] or redis.pcall('GET', names[k])
    end
end

local replies, aheads, any_ahead = {}, {}, false
local before, next_arg = 0, 1
while before < #KEYS do
    local requests, charges = 1, 1
    if #KEYS > 1 then
        requests, charges = ARGV[next_arg] + 0, ARGV[next_arg + 1] + 0
        next_arg = next_arg + 2
    end
    for i = 1, charges do
        local kind = ARGV[next_arg]
        shadows[i] = sub(kind, 1, 7) == 'shadow '
        kinds[i] = shadows[i] and sub(kind, 8) or kind
        units[i], quotas[i] = ARGV[next_arg + 1] + 0, ARGV[next_arg + 2]
        fulls[i], ns[i] = ARGV[next_arg + 3] + 0, ARGV[next_arg + 4] + 0
        next_arg = next_arg + 5
    end
    for _ = 1, requests do
        failure = nil
        for i = 1, charges do
            local bucket = buckets[KEYS[before + i]]
            if bucket and bucket.err then failure = bucket end
        end
        -- What the request makes of its buckets; dropped if it is denied.
        local changed, changed_lives = {}, {}
        local all = true
        for pass = 1, failure and 0 or 2 do
            for i = 1, charges do
                if shadows[i] == (pass == 2) then
                    local key = KEYS[before + i]
                    local bucket = changed[key]
                    if bucket == nil then bucket = buckets[key] end
                    local reply, ahead, left, life = step(bucket, i)
                    replies[before + i], aheads[before + i] = reply, ahead
                    if left then changed[key], changed_lives[key] = left, life end
                    if pass == 1 and reply % 2 == 0 then all = false end
                end
            end
            if not all then break end
        end
        if not all then
            changed, changed_lives = {}, {}
            for i = 1, charges do
                local key = KEYS[before + i]
                local bucket = buckets[key]
                local at, level, refilled, quota, largest, other, behind = read(bucket, i)
                local allowed = 1
                if kinds[i] == 'take' then
                    local left, life = keep(changed[key] or bucket, i, at, level, quota, largest, other, behind)
                    if left then changed[key], changed_lives[key] = left, life end
                    if shadows[i] then
                        allowed = refilled >= units[i] and 1 or 0
                    else
                        allowed = replies[before + i] % 2
                    end
                end
                replies[before + i], aheads[before + i] = 2 * refilled + allowed, at - now
            end
        end
        if failure then
            for i = 1, charges do replies[before + i], aheads[before + i] = failure, 0 end
        else
            for key, bucket in pairs(changed) do buckets[key], lives[key] = bucket, changed_lives[key] end
            for i = 1, charges do
                if aheads[before + i] > 0 then any_ahead = true end
            end
        end
        before = before + charges
    end
end

for k = 1, before do
    local key = KEYS[k]
    if lives[key] then
        local done = redis.pcall('SET', key, buckets[key], 'PX', lives[key])
        if done.err then return done end
        lives[key] = nil
    end
end
if any_ahead then
    for k = 1, before do replies[before + k] = max(0, aheads[k]) end
elseif before == 1 then
    return replies[1]
end
return replies
