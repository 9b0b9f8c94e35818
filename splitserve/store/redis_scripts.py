"""What the redis server does as one step. With a limit it keeps an index of all namespaces:

  splitserve:kv:index   sorted set: `size:key of the value` by score (store.eviction)
  splitserve:kv:expiry  sorted set: the same members, by the time at which the value expires
  splitserve:kv:bytes   sum of the sizes in the index

A value that redis evicts by its own rules stays in the index until it is the least used; one that
is saved again is not counted twice.
"""

from __future__ import annotations

from splitserve.store.eviction import HALF_LIFE_S

INDEX = (b"splitserve:kv:index", b"splitserve:kv:expiry", b"splitserve:kv:bytes")

_FORGET = """
local function forget(member)
  local cut = string.find(member, ':', 1, true)
  redis.call('UNLINK', string.sub(member, cut + 1))
  redis.call('ZREM', KEYS[2], member)
  if redis.call('ZREM', KEYS[1], member) == 1 then
    redis.call('DECRBY', KEYS[3], string.sub(member, 1, cut - 1))
  end
end
"""

KEEP = (
    _FORGET
    + """
local limit, now, evicted, ours = tonumber(ARGV[1]), ARGV[2], 0, {}
for i = 3, #ARGV, 2 do
  local member, score = ARGV[i], ARGV[i + 1]
  local cut = string.find(member, ':', 1, true)
  ours[member] = true
  if redis.call('ZADD', KEYS[1], 'NX', score, member) == 1 then
    redis.call('INCRBY', KEYS[3], string.sub(member, 1, cut - 1))
  end
  local left_ms = redis.call('PTTL', string.sub(member, cut + 1))
  if left_ms >= 0 then
    redis.call('ZADD', KEYS[2], string.format('%.6f', tonumber(now) + left_ms / 1000), member)
  end
end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. now)) do
  forget(member)
end
while tonumber(redis.call('GET', KEYS[3]) or '0') > limit do
  local victim
  for _, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, #ARGV / 2)) do
    if not ours[member] then victim = member break end
  end
  if not victim then break end
  forget(victim)
  evicted = evicted + 1
end
return {evicted, redis.call('ZCARD', KEYS[1]), tonumber(redis.call('GET', KEYS[3]) or '0')}
"""
)
"""ARGV: limit in bytes, now, then member and score of each that was saved. Evicts others until all
are within the limit. Returns how many, then blocks and bytes that are there."""

TOUCH = f"""
local half_life = {HALF_LIFE_S}
for i = 2, #ARGV, 2 do
  local member, now = ARGV[i], tonumber(ARGV[i + 1])
  local score = tonumber(redis.call('ZSCORE', KEYS[1], member) or '')
  if score then
    local high, low = math.max(score, now), math.min(score, now)
    if ARGV[1] == 'frequency' then
      high = high + half_life * math.log(1 + 2 ^ ((low - high) / half_life)) / math.log(2)
    end
    redis.call('ZADD', KEYS[1], string.format('%.6f', high), member)
  end
end
return 0
"""
"""ARGV: policy, then member and time of use of each: `eviction.used`."""

FORGET = (
    _FORGET
    + """
local cut = string.find(ARGV[1], ':', 1, true)
local kind = redis.call('TYPE', string.sub(ARGV[1], cut + 1)).ok
if ARGV[2] == 'any' or (kind ~= 'string' and kind ~= 'none') then forget(ARGV[1]) return 1 end
return 0
"""
)
"""ARGV: member, and `any`, or nothing to remove only what is no string."""
