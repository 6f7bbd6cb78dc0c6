-- What any bucket in one string costs at least: the clock, one read and one write with a life, and no arithmetic.
redis.call('TIME')
redis.call('GET', KEYS[1])
redis.call('SET', KEYS[1], '1764456789123456:100:1:100000:8700000', 'PX', 60000)
return 1
