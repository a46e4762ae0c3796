-- SPDX-License-Identifier: Apache-2.0
-- Drop a pool that slots.lua cannot read, since any client may write to its keys. What the operator set stays, as far as it
-- can be read. The next call of slots.lua begins an epoch.
--
-- KEYS[1]  as in slots.lua

local MOST_LIMITS = 64
local MOST_SLOTS, MOST_NUMBER = 65536, 2 ^ 53

local M, prefix = KEYS[1], string.sub(KEYS[1], 1, -2)

local function number(value, most)
	return type(value) == 'number' and value > 0 and value <= most and value or 0
end

local all, found = redis.pcall('HGETALL', M), {}
for i = 1, #all, 2 do
	local is_good, value = pcall(cmsgpack.unpack, all[i + 1])
	if is_good and type(value) == 'table' then
		found[all[i]] = value
		if type(value.client) == 'string' then
			redis.call('DEL', prefix .. 'w:' .. value.client) -- may be no list
		end
	end
end
local from, set, limits, count = found.set or {}, {}, {}, 0
for _, name in ipairs({'capacity', 'express'}) do
	set[name] = number(from[name], MOST_SLOTS)
end
for _, name in ipairs({'pool_rate', 'job_rate', 'small', 'changed'}) do
	set[name] = number(from[name], MOST_NUMBER)
end
for key, limit in pairs(found.limits or {}) do
	if type(limit) == 'table' and type(key) == 'string' and string.match(key, '^%a+:') and count < MOST_LIMITS then
		limits[key] = {share = number(limit.share, MOST_NUMBER), rate = number(limit.rate, MOST_NUMBER), free = 0}
		count = count + 1
	end
end
set.limits = count
redis.call('DEL', M, prefix .. 'h', prefix .. 'q', prefix .. 's', prefix .. 'l', prefix .. 'j')
redis.call('HSET', M, 'set', cmsgpack.pack(set), 'limits', cmsgpack.pack(limits))
return 1
