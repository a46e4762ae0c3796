-- SPDX-License-Identifier: Apache-2.0
-- Grant bandwidth. A part of slots.lua, which includes this file.

local PACE_MS = 250 -- a grant of bandwidth lasts about so long ...
local PACE_WRITERS = 8 -- ... divided by the number of writers, or by this number

if operation == 'pace' then
	operate = function(bytes, own_rate, user)
		bytes = tonumber(bytes)
		local function lower(a, b)
			return a > 0 and b > 0 and math.min(a, b) or math.max(a, b)
		end
		local limit, of_user = limit_of('job', subject), limit_of('user', user) or {rate = 0}
		local of_job = {rate = lower(lower(tonumber(own_rate), set.job_rate), limit and limit.rate or 0)}
		local of_pool = {rate = set.pool_rate, free = pool.free}
		local rate, start = lower(lower(of_job.rate, of_user.rate), of_pool.rate), now
		if rate == 0 then
			return {'bytes', 0, 'start', 0, 'end', 10000}
		end
		local job = of_job.rate > 0 and load_job(subject)
		of_job.free = job and job.paces == pool.paces and job.free or 0
		local paced = {of_pool, of_job, of_user}
		if bytes > 0 then
			local writers = math.min(math.max(pool.holders, 1), PACE_WRITERS)
			bytes = math.max(bytes, math.floor(rate * PACE_MS / 1000 / writers))
			for _, each in ipairs(paced) do
				start = math.max(start, each.rate > 0 and each.free or 0)
			end
		end
		-- Bytes that come back are of the latest grant, unless another one came after it: then nobody loses.
		for _, each in ipairs(paced) do
			if each.rate > 0 then
				each.free = (bytes > 0 and start or each.free) + bytes * 1000 / each.rate
			end
		end
		pool.free, is_changed = of_pool.free, true
		if job then
			job.free, job.paces = of_job.free, pool.paces
			store_job(subject, job)
		end
		if of_user.rate > 0 then
			call('HSET', M, 'limits', encode(limits))
		end
		if bytes <= 0 then
			return {'bytes', 0, 'start', 0, 'end', 0}
		end
		return {
			'bytes', bytes, 'start', math.floor(start - now), 'end', math.ceil(start - now + bytes * 1000 / rate)
		}
	end
end
