-- Token buckets: makes the charges of one or more requests, in order, in one step.
--
-- Bucket  A key holds `at:capacity:n:p:level`, five decimal integers:
--           at        when the level was that, in microseconds since 1970
--           capacity  the largest that has used the bucket, in tokens: the key lives until that one would be full
--           n, p      the refill rate of the last writer: n tokens per p microseconds
--           level     in units of 1/p token; negative while a debt is worked off
--         In e microseconds a bucket earns e * n units, so nothing is ever rounded. No key is a full bucket.
--
-- KEYS    The bucket of each charge, request after request; a bucket may be named many times. At most 4,000 keys.
-- ARGV    With one key: a charge. With several: runs, until each key has had its charge. A run is
--           requests  how many requests in a row make the charges that follow, each on keys of its own
--           charges   how many charges each of them makes, and then these
--         A charge is five values:
--           kind      take    takes the units if they are there, else refuses; there are at most `full` of them
--                     take n  as many requests that make this one charge, on the bucket that is named once
--                     refuse  refuses: a take of more than `full`
--                     spend   takes them whether they are there or not, down to -full
--                     give    gives them, up to full
--                     peek    changes nothing
--                     `shadow take` and so on: never keeps others from being made, and is made if all those are
--           units     tokens * p, at most 2 * full: no more can be spent or given
--           quota     `:capacity:n:p:`, with n/p in lowest terms
--           full      capacity * p, at most 2^51
--           n         once more
--
-- Reply   For each charge 2 * level + (1 if the tokens were there), in units of its own quota; for `take n` the level
--         before the first of them, from which follows how many were made and what each has left. One charge is answered
--         with the integer, several with an array; two also with a text of both, which costs the server less. Where the clock has stepped back and a bucket's time lies ahead of
--         it, the reply is an array of twice as many integers: these, then by how many microseconds each is ahead.
--         A key that does not hold a bucket is an error in place of each integer of the requests that name it, and of
--         those only. An error that is the whole reply has written nothing.
--
-- A request makes all of its charges or none. A denial takes nothing and writes nothing, with two exceptions for a charge
-- that refuses: it brings back a time that lies more than 1 s ahead of the clock, and extends a life that its own, slower
-- quota needs longer; not that of a full bucket, in which a larger quota may have more.
-- A bucket is written at most once, together with its life: until it is full, rounded up to a millisecond of the clock, since
-- a server counts it from the millisecond that has begun, and may end it as soon as that of its end begins. A bucket is read
-- once, or once more where several takes turn out not to be the common case. Every number is an integer below 2^53, where
-- doubles are exact and `%d` prints all digits; a product that may be larger is only ever compared with a smaller number.
-- src/bucket.rs computes the same with integers, and tests/it/redis_script.rs holds the two together.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local KEYS, ARGV = KEYS, ARGV
local total = #KEYS
-- With one key: what it holds, once it has been read.
local single

-- The common case, which needs neither a table nor a function: one take from a bucket that was last written under the
-- same quota, and not ahead of the clock. Whatever else there is goes the long way below, to the same result. Numbers
-- in text become numbers where they are first reckoned with, and only then: that is what most of the time goes into.
if total == 1 and ARGV[1] == 'take' then
    single = redis.pcall('GET', KEYS[1])
    local quota, n = ARGV[3], ARGV[5]
    local at, level = now, nil
    if not single then
        level = ARGV[4]
    elseif #single > 0 then -- an error has no length
        local string = string
        local first, last = string.find(single, quota, 1, true)
        if first then
            at, level = string.sub(single, 1, first - 1) + 0, string.sub(single, last + 1)
        end
    end
    if level and at <= now then
        level = level + (now - at) * n
        local left = level - ARGV[2]
        -- Not clamped to `full`, which is more than the units: what refuses is below it.
        if left < 0 and left >= -4503599627370496 then return 2 * level end
        local full = ARGV[4] + 0
        if level > full then left = full - ARGV[2] end
        if left >= 0 then
            -- x + -x % 1 is x rounded up, without a call; to a microsecond first: both quotients are of integers.
            local life = (full - left) / n
            life = (life + -life % 1 + now % 1000) / 1000
            life = life > 1 and life + -life % 1 or 1
            local value = string.format('%d%s%d', now, quota, left)
            local done = redis.pcall('SET', KEYS[1], value, 'PX', string.format('%d', life))
            return done.err and done or 2 * left + 1
        end
    end

-- The same for one request with two takes, written out: in a loop, with tables for what is kept between its passes, it
-- costs 5 % more. Both buckets are read, and known to be of this kind, before anything is written. Where a value is not
-- what `read` below takes as it is, nothing has happened, and all of it goes the long way.
elseif total == 2 and ARGV[1] == '1' and ARGV[2] == '2' and ARGV[3] == 'take' and ARGV[8] == 'take'
    and KEYS[1] ~= KEYS[2] then
    local call, find, sub, format = redis.pcall, string.find, string.sub, string.format
    local bucket1, bucket2 = call('GET', KEYS[1]), call('GET', KEYS[2])
    if not (bucket1 and bucket1.err or bucket2 and bucket2.err) then
        local quota1, full1, n1 = ARGV[5], ARGV[6] + 0, ARGV[7] + 0
        local level1, usual = full1, true
        if bucket1 then
            local first, last = find(bucket1, quota1, 1, true)
            usual = first
            if first then
                local at, level = sub(bucket1, 1, first - 1) + 0, sub(bucket1, last + 1) + 0
                usual = at >= 0 and at <= now and level >= -full1 and level <= full1
                level = level + (now - at) * n1
                if level < full1 then level1 = level end
            end
        end
        local quota2, full2, n2 = ARGV[10], ARGV[11] + 0, ARGV[12] + 0
        local level2 = full2
        if bucket2 and usual then
            local first, last = find(bucket2, quota2, 1, true)
            usual = first
            if first then
                local at, level = sub(bucket2, 1, first - 1) + 0, sub(bucket2, last + 1) + 0
                usual = at >= 0 and at <= now and level >= -full2 and level <= full2
                level = level + (now - at) * n2
                if level < full2 then level2 = level end
            end
        end
        if usual then
            local left1, left2 = level1 - ARGV[4], level2 - ARGV[9]
            if left1 < 0 or left2 < 0 then
                return format('%d %d', 2 * level1 + (left1 < 0 and 0 or 1), 2 * level2 + (left2 < 0 and 0 or 1))
            end
            local at, part = format('%d', now), now % 1000
            local life = (full1 - left1) / n1
            life = (life + -life % 1 + part) / 1000
            life = life > 1 and life + -life % 1 or 1
            local done = redis.pcall('SET', KEYS[1], at .. quota1 .. format('%d', left1), 'PX', format('%d', life))
            if done.err then return done end
            life = (full2 - left2) / n2
            life = (life + -life % 1 + part) / 1000
            life = life > 1 and life + -life % 1 or 1
            done = redis.pcall('SET', KEYS[2], at .. quota2 .. format('%d', left2), 'PX', format('%d', life))
            if done.err then return done end
            return format('%d %d', 2 * left1 + 1, 2 * left2 + 1)
        end
    end

-- And for one with a few more: the table that MGET has made takes the levels, and then the replies; numbers take the
-- place of their texts in ARGV, where the long way finds them as well.
elseif total > 2 and total <= 8 and ARGV[1] == '1' and ARGV[2] + 0 == total then
    local call, find, sub, format = redis.pcall, string.find, string.sub, string.format
    local levels, usual, all, a = nil, true, true, 3
    for i = 1, total do
        usual = usual and ARGV[a] == 'take'
        for j = 1, i - 1 do usual = usual and KEYS[j] ~= KEYS[i] end
        a = a + 5
    end
    if usual then
        levels = call('MGET', unpack(KEYS))
        usual = not levels.err
    end
    for i = 1, usual and total or 0 do
        -- No bucket, or no string.
        if not levels[i] then
            local value = call('GET', KEYS[i])
            usual = usual and not (value and value.err)
        end
    end
    a = 3
    for i = 1, usual and total or 0 do
        local bucket, full, n = levels[i], ARGV[a + 3] + 0, ARGV[a + 4] + 0
        local level = full
        if bucket then
            local first, last = find(bucket, ARGV[a + 2], 1, true)
            usual = first
            if not first then break end
            local at = sub(bucket, 1, first - 1) + 0
            level = sub(bucket, last + 1) + 0
            usual = at >= 0 and at <= now and level >= -full and level <= full
            if not usual then break end
            level = level + (now - at) * n
            if level > full then level = full end
        end
        local left = level - ARGV[a + 1]
        if left < 0 then all = false end
        levels[i], ARGV[a + 3], ARGV[a + 4] = left, full, n
        a = a + 5
    end
    if usual then
        local at = format('%d', now)
        a = 3
        for i = 1, total do
            local left = levels[i]
            if all then
                local life = (ARGV[a + 3] - left) / ARGV[a + 4]
                life = (life + -life % 1 + now % 1000) / 1000
                life = life > 1 and life + -life % 1 or 1
                local value = at .. ARGV[a + 2] .. format('%d', left)
                local done = redis.pcall('SET', KEYS[i], value, 'PX', format('%d', life))
                if done.err then return done end
                levels[i] = 2 * left + 1
            else
                levels[i] = 2 * (left + ARGV[a + 1]) + (left < 0 and 0 or 1)
            end
            a = a + 5
        end
        return levels
    end
end

local find, sub, format = string.find, string.sub, string.format
local floor, max, min = math.floor, math.max, math.min
local UNITS_MAX = 2251799813685248

-- The different keys, and the place of each among them. By that place: the bucket as this call has left it (false: no
-- key), its expiry where it has to be written, and the error where the key does not hold a bucket.
local names, slots, count = {}, {}, 0
local buckets, expiries, errors = nil, {}, {}
-- By place in KEYS; `aheads` only where the clock is behind.
local replies, aheads = {}, nil

-- When a bucket is full for its largest capacity, `most` units: a time in microseconds, rounded up.
local function expiry_of(at, level, most, n)
    if level >= most then return at end
    local missing = (most - level) / n
    return at + missing + -missing % 1
end

-- A bucket that was written under another quota, in terms of this one: its time, its level (whole tokens are kept, the
-- part of one is rounded down, and a smaller capacity clamps, a debt as well), the quota's text with the largest
-- capacity, the units of that, and the expiry of the bucket as it stands. Nothing where it is not a bucket.
local function convert(bucket, quota, full)
    local at, capacity0, n0, p0, level0 = string.match(bucket, '^(%d+):(%d+):(%d+):(%d+):(%-?%d+)$')
    if not at then return end
    at, capacity0, n0, p0, level0 = at + 0, capacity0 + 0, n0 + 0, p0 + 0, level0 + 0
    if at > 9007199254740992 or capacity0 < 1 or capacity0 > 2147483648 or n0 < 1 or n0 > 1099511627776
        or p0 < 1 or p0 > 35184372088832 or level0 < -UNITS_MAX or level0 > UNITS_MAX then
        return
    end
    local capacity, n, p = string.match(quota, '(%d+):(%d+):(%d+)')
    capacity, p = capacity + 0, p + 0
    local whole, level, most = floor(level0 / p0), full, full
    if whole < capacity then
        -- floor(part * p / p0), both periods up to 2^45: long division, by the digits of p in base 128.
        local part, quotient, rest, weight = level0 - whole * p0, 0, 0, 4398046511104
        while weight >= 1 do
            rest = rest * 128 + part * (floor(p / weight) % 128)
            quotient = quotient * 128 + floor(rest / p0)
            rest = rest % p0
            weight = weight / 128
        end
        level = max(whole, -capacity) * p + quotient
    end
    if capacity0 > capacity then
        quota = format(':%d:%s:%d:', capacity0, n, p)
        most = min(capacity0 * p, UNITS_MAX)
    end
    return at, level, quota, most, expiry_of(at, level0, min(capacity0 * p0, UNITS_MAX), n0)
end

-- A bucket as a charge sees it, before anything is taken:
--   at, level     the time of its last write, or now if that is more than 1 s ahead, and the level now
--   quota, most   the text to be written between them, with the largest capacity, and the units of that
--   kept, expiry  what a denial may have to write, and when that expires
--   least         which it has to if that is later than this: the expiry of the bucket as it stands, or -1
-- Nothing where the key does not hold a bucket.
local function read(slot, bucket, quota, full, n)
    if not bucket then
        if errors[slot] then return end
        return now, full, quota, full
    end
    local at, level, most, least
    local first, last = find(bucket, quota, 1, true)
    if first then at, level, most = sub(bucket, 1, first - 1) + 0, sub(bucket, last + 1) + 0, full end
    if not (first and at >= 0 and level >= -full and level <= full) then
        at, level, quota, most, least = convert(bucket, quota, full)
        if not at then
            errors[slot] = { err = 'TOKENBUCKET the key holds something else than a bucket' }
            return
        end
    end
    if at > now + 1000000 then at, least = now, -1 end
    local kept, expiry
    if least then kept, expiry = format('%d%s%d', at, quota, level), expiry_of(at, level, most, n) end
    if at < now then
        local earned = (now - at) * n
        if earned < full - level then level = level + earned else level = full end
    end
    return at, level, quota, most, kept, expiry, least
end

-- What a charge leaves of a level; nothing where it refuses.
local function charge(kind, level, units, full)
    if kind == 'take' then
        if level >= units then return level - units end
    elseif kind == 'spend' then
        return max(level - units, -full)
    elseif kind == 'give' then
        return min(level + units, full)
    elseif kind == 'peek' then
        return level
    end
end

for i = 1, total do
    local key = KEYS[i]
    if not slots[key] then
        count = count + 1
        names[count], slots[key] = key, count
    end
end
-- Each bucket is read once. MGET does not tell a key of another type from no key, so that GET is asked as well.
if single == nil then
    buckets = redis.pcall('MGET', unpack(names))
    if buckets.err then return buckets end
    for slot = 1, count do
        if not buckets[slot] then
            local value = redis.pcall('GET', names[slot])
            if value and value.err then errors[slot] = value else buckets[slot] = value end
        end
    end
elseif single and single.err then
    return single
else
    buckets = { single }
end

local k, arg = 1, 1
while k <= total do
    local requests, charges = 1, 1
    if total > 1 then
        requests, charges = ARGV[arg] + 0, ARGV[arg + 1] + 0
        arg = arg + 2
    end
    local last = k + requests * charges - 1

    if charges == 1 then
        -- Requests that follow each other on one bucket are reckoned in numbers, and its text is made once.
        local kind, quota = ARGV[arg], ARGV[arg + 2]
        local units, full, n = ARGV[arg + 1] + 0, ARGV[arg + 3] + 0, ARGV[arg + 4] + 0
        local times
        if #kind > 4 and sub(kind, 1, 5) == 'take ' then
            kind, times = 'take', sub(kind, 6) + 0
        -- Only kinds in shadow are longer than `refuse`. Alone, such a charge is like any other.
        elseif #kind > 6 then
            kind = sub(kind, 8)
        end
        while k <= last do
            local key, first, left = KEYS[k], k, nil
            local slot = slots[key]
            local at, level, text, most, kept, expiry, least = read(slot, buckets[slot], quota, full, n)
            repeat
                if not at then
                    replies[k] = errors[slot]
                elseif times then
                    replies[k] = 2 * level + (level >= units and 1 or 0)
                    if level >= units then
                        level = level - min(times, floor(level / units)) * units
                        left = level
                    end
                elseif kind == 'take' and level >= units then
                    level = level - units
                    left = level
                    replies[k] = 2 * level + 1
                else
                    local after = charge(kind, level, units, full)
                    if after and kind ~= 'peek' then level, left = after, after end
                    replies[k] = 2 * level + (after and 1 or 0)
                end
                k = k + 1
            until k > last or KEYS[k] ~= key
            if at and at > now then
                aheads = aheads or {}
                for j = first, k - 1 do aheads[j] = at - now end
            end
            if left then
                if at < now then at = now end
                buckets[slot], expiries[slot] = format('%d%s%d', at, text, left), expiry_of(at, left, most, n)
            elseif kept and expiry > least and level < full and (kind == 'take' or kind == 'refuse') then
                buckets[slot], expiries[slot] = kept, expiry
            end
        end
    else
        local shadows = false
        for a = arg, arg + 5 * charges - 1, 5 do shadows = shadows or #ARGV[a] > 6 end
        -- By charge: its bucket and its expiry before the request, and the level it found, if that was before it too.
        local before, expiries_before, levels = {}, {}, {}
        while k <= last do
            local failure
            for i = 1, charges do
                local slot = slots[KEYS[k + i - 1]]
                before[i], expiries_before[i], levels[i] = buckets[slot], expiries[slot], nil
                failure = failure or errors[slot]
            end
            -- The enforced charges, then those in shadow, one after the other.
            local all, pass = true, 1
            while all and not failure and pass <= (shadows and 2 or 1) do
                local a = arg
                for i = 1, charges do
                    local kind, quota = ARGV[a], ARGV[a + 2]
                    local shadow = #kind > 6
                    if shadow == (pass == 2) and not failure then
                        if shadow then kind = sub(kind, 8) end
                        local slot, full, n = slots[KEYS[k + i - 1]], ARGV[a + 3] + 0, ARGV[a + 4] + 0
                        local bucket = buckets[slot]
                        local at, level, text, most, kept, expiry, least = read(slot, bucket, quota, full, n)
                        if at then
                            if bucket == before[i] and not kept then levels[i] = level end
                            if at > now then
                                aheads = aheads or {}
                                aheads[k + i - 1] = at - now
                            end
                            local left = charge(kind, level, ARGV[a + 1] + 0, full)
                            if left then
                                replies[k + i - 1] = 2 * left + 1
                                if kind ~= 'peek' then
                                    if at < now then at = now end
                                    buckets[slot] = format('%d%s%d', at, text, left)
                                    expiries[slot] = expiry_of(at, left, most, n)
                                end
                            else
                                replies[k + i - 1] = 2 * level
                                all = all and shadow
                                if kept and expiry > least and level < full then
                                    buckets[slot], expiries[slot] = kept, expiry
                                end
                            end
                        else
                            failure = errors[slot]
                        end
                    end
                    a = a + 5
                end
                pass = pass + 1
            end
            if failure or not all then
                for i = 1, charges do
                    local slot = slots[KEYS[k + i - 1]]
                    buckets[slot], expiries[slot] = before[i], expiries_before[i]
                end
                local a = arg
                for i = 1, charges do
                    local place, level = k + i - 1, levels[i]
                    local slot, kind, quota = slots[KEYS[place]], ARGV[a], ARGV[a + 2]
                    local shadow = #kind > 6
                    if shadow then kind = sub(kind, 8) end
                    local takes = kind == 'take' or kind == 'refuse'
                    if not failure and not level then
                        local at, _, kept, expiry, least
                        local full, n = ARGV[a + 3] + 0, ARGV[a + 4] + 0
                        at, level, _, _, kept, expiry, least = read(slot, before[i], quota, full, n)
                        if at and at > now then
                            aheads = aheads or {}
                            aheads[place] = at - now
                        end
                        local refuses = not shadow and takes and replies[place] % 2 == 0
                        if shadow and takes then refuses = kind == 'refuse' or level and level < ARGV[a + 1] + 0 end
                        if refuses and kept and level < full then
                            -- An earlier charge of the request may have kept it for longer already.
                            if least >= 0 then least = expiries[slot] or least end
                            if expiry > least then buckets[slot], expiries[slot] = kept, expiry end
                        end
                        if not at then failure = errors[slot] end
                    end
                    if failure then
                        for j = k, k + charges - 1 do replies[j] = failure end
                    elseif not takes then
                        replies[place] = 2 * level + 1
                    elseif not shadow then
                        -- It was decided on what the charges before it left.
                        replies[place] = 2 * level + replies[place] % 2
                    elseif kind == 'take' and level >= ARGV[a + 1] + 0 then
                        replies[place] = 2 * level + 1
                    else
                        replies[place] = 2 * level
                    end
                    a = a + 5
                end
            end
            k = k + charges
        end
    end
    arg = arg + 5 * charges
end

-- Each changed bucket is written once, in one command with its life. A server that refuses one write refuses the first.
for slot = 1, next(expiries) and count or 0 do
    if expiries[slot] then
        local life = (expiries[slot] - now + now % 1000) / 1000
        life = life > 1 and life + -life % 1 or 1
        local done = redis.pcall('SET', names[slot], buckets[slot], 'PX', format('%d', life))
        if done.err then return done end
    end
end
if aheads then
    for i = 1, total do replies[total + i] = aheads[i] or 0 end
elseif total == 1 then
    return replies[1]
end
return replies
